"""Trackers receive the numbers of a run on host 0, and keep them in their own form.

To add a tracker, write a class that satisfies `Tracker` and takes an `AttemptInfo`, and add it to `TRACKERS`. Its
package is imported only when a run uses it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from training import storage as default_storage
from training.registry import load
from training.storage import Storage

Values = Mapping[str, float | None]


def finite_or_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with None for each float that is NaN or infinite, which JSON can't represent."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


@dataclass(frozen=True)
class AttemptInfo:
    """The attempt that a tracker records."""

    folder: str  # of the run
    attempt: int
    resumed_at: int  # steps done by earlier attempts
    file_number: int  # for file names: unique even in a local run, whose attempts all have number 0
    token: str = ""  # of this group of processes: no attempt of another run has it, whatever its folder's name
    storage: Storage = default_storage
    settings: Mapping[str, Any] = field(default_factory=dict)  # the trainer's configuration


class Tracker(Protocol):
    """Keeps the numbers of one attempt. Values may be buffered until `flush`; a crash loses only those."""

    def log(self, step: int, values: Values) -> None:
        """Records values of the state after `step` steps."""

    def flush(self) -> None:
        """Writes buffered values. Raises if it can't; the values stay buffered."""

    def finish(self, failed: bool) -> None:
        """Ends the attempt's records after the last `log`. `failed`: by an error, not at the last step or by a stop."""


# Name -> "module:function or class", which is called with an AttemptInfo and returns a Tracker.
TRACKERS = {
    "jsonl": "training.telemetry.metrics:JsonLinesTracker",
    "tensorboard": "training.telemetry.tensorboard:TensorBoardTracker",
    "wandb": "training.telemetry.services:open_wandb",
    "mlflow": "training.telemetry.services:open_mlflow",
}


def open_tracker(name: str, info: AttemptInfo) -> Tracker:
    """Imports the module of the tracker `name` in `TRACKERS`, and opens the tracker for the attempt."""
    tracker: Tracker = load(TRACKERS[name])(info)
    return tracker
