"""MLflow: one of its runs an attempt, with the run's id as a tag.

MLFLOW_TRACKING_URI and its other variables mean what they always mean. Without the first, records are files in `mlflow`
of the run's folder, which must then be on a disk (MLflow writes no bucket): `mlflow ui --backend-store-uri` shows them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.storage import is_remote, name_of
from training.telemetry.services.guard import GuardedTracker, Line
from training.telemetry.tracker import AttemptInfo

EXPERIMENT = "tpu-launch"
# Its defaults keep trying for many minutes, and would hold up the other trackers.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_BATCH = 500  # metrics of a call; a server takes 1,000
_PARAMETERS = 100  # of a call, as many as a server takes
_LONGEST = 500  # characters of a parameter


class MlflowRun:
    """One attempt's record."""

    def __init__(self, info: AttemptInfo) -> None:
        """Begins it. Raises what MLflow raises, and ValueError when there is no place for it."""
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or _folder(info)
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it refuses plain files
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        known = self._client.get_experiment_by_name(experiment)
        identifier = known.experiment_id if known else self._client.create_experiment(experiment)
        run = name_of(info.folder)
        tags = {"tpu-launch.run": run, "tpu-launch.attempt": str(info.attempt)}
        begun = self._client.create_run(identifier, run_name=f"{run}, attempt {info.attempt}", tags=tags)
        self._run: str = begun.info.run_id
        values = [Param(name, str(value)[:_LONGEST]) for name, value in flatten(info.settings)]
        for first in range(0, len(values), _PARAMETERS):
            self._client.log_batch(self._run, params=values[first : first + _PARAMETERS])

    def send(self, lines: Sequence[Line]) -> None:
        """Records values, in as few calls as it takes."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for step, values in lines for name, value in values.items()]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        """Marks it as finished."""
        self._client.set_terminated(self._run)


def _folder(info: AttemptInfo) -> str:
    if is_remote(info.folder):
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set, and MLflow writes no bucket: name a tracking server in run.environment"
        )
    return (Path(info.folder).absolute() / "mlflow").as_uri()


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as ("train.steps", 100), without those that are null."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def open_tracker(info: AttemptInfo) -> GuardedTracker:
    """The tracker of an attempt."""
    return GuardedTracker("mlflow", MlflowRun, info)
