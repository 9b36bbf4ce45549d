"""The `checkpoint` section of the YAML file, and its policies: when to save, and which checkpoints to keep."""

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from training.yaml_file import Section


class Best(Section):
    """Never delete the checkpoint whose evaluation had the best figure. Needs `evaluation.every`."""

    metric: str
    """The deciding figure of an evaluation: `loss`, or one of the task, such as `accuracy`."""

    mode: Literal["min", "max"]
    """Which value is the best: `min`, the smallest, for a loss; `max`, the largest, for an accuracy."""

    def better(self, value: float, than: float | None) -> bool:
        """Returns whether `value` is better than `than` (None: there is none yet); False if it is not finite."""
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)


class CheckpointSection(Section):
    """When the state of training is saved, and which checkpoints are kept. It is also saved when training ends or is
    asked to stop."""

    every_steps: int | None = Field(default=None, ge=1)
    """Save after every so many steps. A run that is killed repeats at most this many."""

    every_minutes: float | None = Field(default=15.0, gt=0)
    """Save when so many minutes have passed since any save began. `null`: never."""

    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept. With one, a checkpoint that turns out to be damaged has none before
    it to fall back to."""

    keep_every: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "steps"})
    """Checkpoints whose step is a multiple of this are never deleted."""

    best: Best | None = None
    """Never delete the checkpoint with the best evaluation."""

    stop_seconds: float = Field(default=25.0, gt=0, le=86400)
    """How long a host has to save after it was asked to stop (SIGTERM). One that has not saved by then exits, and the
    run continues from the last commit. Spot and preemptible machines are taken away after 30 seconds."""

    background: bool = True
    """Write a checkpoint while the next steps run. `false` waits for each save to be committed."""

    def deletable(self, committed: Iterable[int], best: int | None = None) -> list[int]:
        """Returns the committed steps to delete, oldest first: all but the `keep_last` newest, multiples of
        `keep_every` and the step `best`."""
        old = sorted(committed)[: -self.keep_last]
        return [step for step in old if not (self.keep_every and step % self.keep_every == 0) and step != best]


def is_step_due(step: int, every: int | None) -> bool:
    """Returns whether an action due after each `every` steps (None: never) is due now that `step` steps are done.
    True at step 0."""
    return every is not None and step % every == 0


def are_minutes_over(minutes: float | None, seconds: float) -> bool:
    """Returns whether `seconds`, by host 0's clock, are at least so many minutes (None: never)."""
    return minutes is not None and seconds >= 60 * minutes
