"""The learning rate, in double precision on the host, and the seed of dropout as pure functions of the step, so that
every backend and every resumed run sees the same numbers."""

import hashlib
import math
from typing import Literal

from pydantic import Field

from training.yaml_file import Section


class ScheduleSettings(Section):
    """The part of section `train` that says how long to train and how the learning rate changes meanwhile."""

    steps: int = Field(ge=1)
    """Training steps in all. The learning rate reaches its floor after the last one."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """The peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly to its peak: `1/warmup_steps` of it in the first step, all of it
    in the last. (Hugging Face's schedules begin with 0, a step that changes nothing, and are one step behind.)"""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """How the learning rate falls from its peak to its floor; `constant`: not at all; `wsd` (warm-up, stable, decay):
    stays at the peak, then falls linearly in the last `decay_steps`."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps in which `wsd` falls. Default: the last fifth of `steps`."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """The share of `learning_rate` that is left after the last step."""


def learning_rate(settings: ScheduleSettings, step: int) -> float:
    """Returns the rate of step number `step`, counted from 0: warm-up to the peak, then as `settings.schedule` says
    down to the floor after the last step ("constant": stays at the peak). Warm-up is one step ahead of
    `transformers.get_linear_schedule_with_warmup`, whose first step has the rate 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    begin = settings.warmup_steps
    if settings.schedule == "wsd":
        begin = max(begin, settings.steps - (settings.decay_steps or -(-settings.steps // 5)))
    progress = max(0, step - begin) / max(1, settings.steps - begin)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.learning_rate * (settings.floor + (1 - settings.floor) * max(0.0, share))


def step_seed(seed: int, step: int, host: int) -> int:
    """Returns the seed of dropout for one step on one host (its worker number), in [0, 2**31)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{host}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
