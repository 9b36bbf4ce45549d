"""Weights & Biases: one of its runs an attempt, and the attempts of a run are a group.

It takes steps in rising order only, and an attempt that resumes trains some again: hence a record for each. Its
variables (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE, ...) mean what they always mean. With WANDB_MODE=offline nothing is
sent; the files are in `wandb` below WANDB_DIR, else below the run's folder where that is on a disk, and `wandb sync`
uploads them later.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from training.storage import is_remote, name_of
from training.telemetry.services.guard import GuardedTracker, Line
from training.telemetry.tracker import AttemptInfo

PROJECT = "tpu-launch"
_SECONDS = 15  # for a beginning and for an end


class WeightsAndBiases:
    """One attempt's record."""

    def __init__(self, info: AttemptInfo) -> None:
        """Begins it, or goes on with it when an earlier call did."""
        import wandb

        run = name_of(info.folder)
        local = None if is_remote(info.folder) else info.folder
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=f"{run}-{info.file_number}",
            name=f"{run}, attempt {info.attempt}",
            group=run,
            dir=os.environ.get("WANDB_DIR") or local or tempfile.gettempdir(),
            config={**info.settings, "attempt": info.attempt, "resumed_at": info.resumed_at},
            resume="allow",
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=_SECONDS, finish_timeout=_SECONDS, login_timeout=_SECONDS
            ),
        )

    def send(self, lines: Sequence[Line]) -> None:
        """Hands values to its own background process."""
        for step, values in lines:
            self._run.log(values, step=step)

    def close(self) -> None:
        """Ends the record, and waits for its upload for a limited time."""
        self._run.finish()


def open_tracker(info: AttemptInfo) -> GuardedTracker:
    """The tracker of an attempt."""
    return GuardedTracker("wandb", WeightsAndBiases, info)
