"""TensorBoard's events: the numbers of a run as scalars, one series of files an attempt.

    <run folder>/tensorboard/events.out.tfevents.1795169047.attempt-0002.00000

A file is a sequence of TFRecord frames of `Event` messages. On a disk it grows by appending, so that readers that keep
the file open see new events; a crash leaves at most one incomplete frame at its end, which readers ignore. An object
store can't append: there the newest object is rewritten whole until it has `ROLL_BYTES`, then the next begins. An
attempt that resumed at step s begins with a START message at s + 1, which makes TensorBoard drop the events of earlier
attempts for the steps that are trained again.
"""

import time
from collections.abc import Mapping
from typing import Any

from training import storage
from training.data.formats import tfrecord
from training.telemetry.tracker import AttemptInfo, Values

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
