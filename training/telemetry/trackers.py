"""Trackers for TensorBoard, Weights & Biases and MLflow. Each records an attempt separately.

TensorBoard's events are one series of files an attempt:

    <run folder>/tensorboard/events.out.tfevents.1795169047.attempt-0002.00000

A file is a sequence of TFRecord frames of `Event` messages. On a disk it grows by appending, so that readers that keep
the file open see new events; a crash leaves at most one incomplete frame at its end, which readers ignore. An object
store can't append: there the newest object is rewritten whole until it has `ROLL_BYTES`, then the next begins. An
attempt that resumed at step s begins with a START message at s + 1, which makes TensorBoard drop the events of earlier
attempts for the steps that are trained again.

A service (Weights & Biases, MLflow) that fails costs a warning: the run and the other trackers go on. Values wait in
memory, at most `MOST_WAITING` lines. After a failure the service is left alone for `PAUSE_SECONDS`, so that its
time-outs don't hold up the other trackers again and again. Values of a failed call are sent again, so a service may
have some of them twice. Services take steps in rising order only, and a resumed attempt repeats some.
"""

import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from training import storage
from training.data.formats import tfrecord
from training.storage import is_remote, name_of
from training.telemetry.console import warn
from training.telemetry.metrics import AttemptInfo, Values, finite_or_none

FOLDER = "tensorboard"
ROLL_BYTES = 1 << 20


class TensorBoardTracker:
    """Writes the events of one attempt. Needs the package tensorboard, which defines the messages."""

    def __init__(self, info: AttemptInfo) -> None:
        """Buffers the first two events, version and START; `flush` creates the file."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary, now = event_pb2.Event, summary_pb2.Summary, time.time()
        name = f"events.out.tfevents.{int(now):010d}.attempt-{info.file_number:04d}"
        self._base = storage.join(info.folder, FOLDER, name)
        self._number = 0  # of the newest file or object
        self._written = bytearray()  # content of the newest object, in a bucket
        self._pending = bytearray()
        self._append_event(self._event(wall_time=now, step=0, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append_event(self._event(wall_time=now, step=info.resumed_at + 1, session_log=start))

    def log(self, step: int, values: Values) -> None:
        """Buffers an event with the values that are not None, at the time now."""
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in name_scalars(values).items()]
        self._append_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def flush(self) -> None:
        """Appends to the file, after a failed append to a new one; in a bucket, rewrites the newest object."""
        if not self._pending:
            return
        url = f"{self._base}.{self._number:05d}"
        if storage.is_remote(url):
            written = self._written + self._pending
            storage.write(url, bytes(written))
            self._written = written
            if len(self._written) >= ROLL_BYTES:
                self._number, self._written = self._number + 1, bytearray()
        else:
            try:
                storage.append(url, bytes(self._pending))
            except Exception:
                self._number += 1  # readers stop at an incomplete frame, which this file may have now
                raise
        self._pending.clear()

    def finish(self, failed: bool) -> None:
        self.flush()

    def _append_event(self, event: Any) -> None:
        """Adds an event to those that the next `flush` writes."""
        self._pending += tfrecord.frame(event.SerializeToString())


def name_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns numbers, without None, by TensorBoard's tag: `eval_loss` becomes evaluation/loss, `loss` train/loss."""
    return {
        f"evaluation/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
    }


PAUSE_SECONDS = 60.0
MOST_WAITING = 10_000
_PROJECT = "tpu-launch"  # and the name of MLflow's experiment
_WANDB_TIMEOUTS = dict.fromkeys(("login_timeout", "init_timeout", "finish_timeout"), 15)  # seconds
# MLflow's own defaults retry for many minutes, and would hold up the other trackers.
_MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_MLFLOW_METRICS = 500  # of one call; a server takes 1,000
_MLFLOW_PARAMETERS = 100  # of one call: a server's limit
_MLFLOW_PARAMETER_LENGTH = 500  # characters

Line = tuple[int, dict[str, float]]  # a step, and values by name


class Service(Protocol):
    """One attempt's record at a service. If `send` raises, its lines are sent again. Methods may raise anything."""

    def send(self, lines: Sequence[Line]) -> None: ...

    def close(self, failed: bool) -> None:
        """Marks the record as finished or failed."""


class GuardedTracker:
    """A tracker that passes values on to a service, and never raises."""

    def __init__(
        self,
        name: str,
        open_service: Callable[[AttemptInfo], Service],
        info: AttemptInfo,
        *,
        warn: Callable[[str], None] = warn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_service` begins the attempt's record; the first `flush` calls it, and later ones after it failed."""
        self._name, self._open, self._info, self._warn, self._clock = name, open_service, info, warn, clock
        self._service: Service | None = None
        self._waiting: deque[Line] = deque(maxlen=MOST_WAITING)
        self._lost, self._retry_at, self._is_failing = 0, float("-inf"), False

    def log(self, step: int, values: Values) -> None:
        """Queues the finite values under TensorBoard's names. A full queue drops its oldest line."""
        self._lost += len(self._waiting) == MOST_WAITING
        self._waiting.append((step, name_scalars(finite_or_none(values))))

    def flush(self) -> None:
        """Opens the record and sends the queue, unless the service failed less than `PAUSE_SECONDS` ago."""
        if self._clock() >= self._retry_at:
            self._send()

    def finish(self, failed: bool) -> None:
        """Sends the queue, even in a pause, and closes the record; warns of lines that did not arrive."""
        self._send(lambda service: service.close(failed))
        if self._waiting or self._lost:
            self._warn(f"{self._name}: {len(self._waiting) + self._lost} lines of metrics did not reach it")

    def _send(self, close: Callable[[Service], None] = lambda service: None) -> None:
        """Opens the record if it is not open, sends the queue and clears it, and then calls `close`. An error begins a
        pause of `flush`; warns of the first in succession."""
        try:
            if self._service is None:
                self._service = self._open(self._info)
            if self._waiting:
                self._service.send(list(self._waiting))
                self._waiting.clear()
            close(self._service)
        except Exception as error:  # the service's package may raise anything
            if not self._is_failing:
                reason = " ".join(str(error).split()) or type(error).__name__
                self._warn(f"{self._name}: {reason}; training continues, and tpu-train will try again")
            self._is_failing, self._retry_at = True, self._clock() + PAUSE_SECONDS
        else:
            self._is_failing = False


class WandbRun:
    """One of Weights & Biases' runs for each attempt; the attempts of a run are a group. WANDB_API_KEY,
    WANDB_PROJECT and its other variables apply. With WANDB_MODE=offline nothing is sent; the files are in `wandb`
    below WANDB_DIR, else below the run's folder if that is local, and `wandb sync` uploads them."""

    def __init__(self, info: AttemptInfo) -> None:
        """Starts the attempt's run, or continues the one that an earlier call has started."""
        import wandb

        run = name_of(info.folder)
        local = None if is_remote(info.folder) else info.folder
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=f"{run}-{info.file_number}-{info.token}",  # folders of other experiments have the same name
            name=f"{run}, attempt {info.attempt}",
            group=run,
            dir=os.environ.get("WANDB_DIR") or local or tempfile.gettempdir(),
            config={**info.settings, "attempt": info.attempt, "resumed_at": info.resumed_at},
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, **_WANDB_TIMEOUTS),
        )

    def send(self, lines: Sequence[Line]) -> None:
        for step, values in lines:
            self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowRun:
    """One of MLflow's runs for each attempt, with the run's id as a tag. Its variables apply; without
    MLFLOW_TRACKING_URI, records are files in `mlflow` of the run's folder, which must be local (MLflow writes no
    bucket): `mlflow ui --backend-store-uri` shows them."""

    def __init__(self, info: AttemptInfo) -> None:
        """Creates the attempt's run with its settings, or continues an earlier call's; sets MLflow's unset time-outs in
        os.environ. Raises ValueError if MLFLOW_TRACKING_URI is not set and the run's folder is in a bucket."""
        for name, value in _MLFLOW_TIMEOUTS.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri and is_remote(info.folder):
            advice = "name a tracking server in run.environment"
            raise ValueError(f"MLFLOW_TRACKING_URI is not set, and MLflow writes no bucket: {advice}")
        uri = uri or (Path(info.folder).absolute() / "mlflow").as_uri()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow refuses plain files
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = name_of(info.folder)
        tags = {"tpu-launch.run": run, "tpu-launch.attempt": str(info.attempt), "tpu-launch.token": info.token}
        records = self._client.search_runs([experiment_id], f"tags.`tpu-launch.token` = '{info.token}'") or [
            self._client.create_run(experiment_id, run_name=f"{run}, attempt {info.attempt}", tags=tags)
        ]
        self._run_id: str = records[0].info.run_id
        settings = dict(flatten(info.settings))  # a name twice in a call is refused
        parameters = [Param(name, str(value)[:_MLFLOW_PARAMETER_LENGTH]) for name, value in settings.items()]
        for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + _MLFLOW_PARAMETERS])

    def send(self, lines: Sequence[Line]) -> None:
        """Sends the values with the time now, in calls of at most `_MLFLOW_METRICS`."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for step, values in lines for name, value in values.items()]
        for first in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MLFLOW_METRICS])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested settings as pairs like ("train.steps", 100), leaving out those that are None. What MLflow refuses
    in a name becomes "_" (labels may have such characters), and a name is cut to its 250 characters."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield re.sub(r"[^\w. -]", "_", f"{prefix}{name}")[:250], value


open_wandb = partial(GuardedTracker, "wandb", WandbRun)
open_mlflow = partial(GuardedTracker, "mlflow", MlflowRun)
