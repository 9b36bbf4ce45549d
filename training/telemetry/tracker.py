"""Where the numbers of a run go. A tracker receives them in one process (host 0) and keeps them in its own form.

To add a tracker, write a module with a class that satisfies `Tracker` and takes an
`AttemptInfo`, and add it to `TRACKERS`. A tracker's package is imported only when a run uses it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from training import storage as default_storage
from training.storage import Storage

Values = Mapping[str, float | None]


def finite_or_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON can have them: None for a float that is NaN or infinite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


@dataclass(frozen=True)
class AttemptInfo:
    """Which attempt of which run a tracker records."""

    folder: str  # of the run
    attempt: int
    resumed_at: int  # steps that were done before
    file_number: int  # for names of files: no earlier attempt has used it, even where all attempts have number 0
    storage: Storage = default_storage
    settings: Mapping[str, Any] = field(default_factory=dict)  # the trainer's configuration


class Tracker(Protocol):
    """Keeps the numbers of one attempt. Values may be held back until `flush`; a crash loses only those."""

    def log(self, step: int, values: Values) -> None:
        """Records values that belong to the state after `step` steps."""

    def flush(self) -> None:
        """Writes what is held back."""

    def finish(self) -> None:
        """Ends the attempt's records after the last `log`. Not called when the attempt fails."""


# Name -> "module:class", or a function that makes one. It is called with an AttemptInfo.
TRACKERS = {
    "jsonl": "training.telemetry.metrics:JsonLinesTracker",
    "tensorboard": "training.telemetry.tensorboard:TensorBoardTracker",
    "wandb": "training.telemetry.services.weights_and_biases:open_tracker",
    "mlflow": "training.telemetry.services.mlflow_tracking:open_tracker",
}


def open_tracker(name: str, info: AttemptInfo) -> Tracker:
    """Starts the tracker that is registered under `name`."""
    module, _, attribute = TRACKERS[name].partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), attribute)(info)
    return tracker
