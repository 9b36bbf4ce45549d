"""Learning rate and seeds as pure functions of the step, in double precision on the host, so that every backend and
every resume sees the same numbers."""

from __future__ import annotations

import hashlib
import math

from training.config import Train


def learning_rate(train: Train, step: int) -> float:
    """For step number `step`, counted from 0: warm-up from 0 to the peak, then down to 0 after the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.learning_rate * max(0.0, left)


def adam_numbers(train: Train, step: int) -> tuple[float, float, float]:
    """Learning rate and the two bias corrections of Adam (https://arxiv.org/abs/1412.6980, algorithm 1) for step number
    `step`."""
    return learning_rate(train, step), 1 - train.adam_beta1 ** (step + 1), 1 - train.adam_beta2 ** (step + 1)


def step_seed(seed: int, step: int, host: int) -> int:
    """The seed of dropout for one step on one host, in [0, 2**31)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{host}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
