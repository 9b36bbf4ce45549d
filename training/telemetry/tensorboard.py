"""TensorBoard's events: the lines of `training.telemetry.metrics` as scalars, one series of files an attempt.

    <run folder>/tensorboard/events.out.tfevents.1795169047.attempt-0002.00000

A file is TFRecord frames of `Event` messages, as TensorBoard reads them. On a disk it grows by appending, which readers
that keep a file open follow; a crash leaves at most one cut-off frame at its end, which readers leave out. An object
store can't append: there the newest object is rewritten whole until it has `ROLL_BYTES`, then the next begins. An
attempt that goes on from step s begins with a START message at s + 1: it makes TensorBoard drop what earlier attempts
said of the steps that are trained again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from training import storage
from training.data.formats import tfrecord

FOLDER = "tensorboard"
ROLL_BYTES = 1 << 20


class EventLog:
    """The events of one attempt. Needs the package tensorboard, which brings the messages."""

    def __init__(self, folder: str, attempt: int, resumed_at: int, now: Callable[[], float] = time.time) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary, self._now = event_pb2.Event, summary_pb2.Summary, now
        self._base = storage.join(folder, FOLDER, f"events.out.tfevents.{int(now()):010d}.attempt-{attempt:04d}")
        self._number, self._whole, self._new = 0, bytearray(), bytearray()
        self._add(self._event(wall_time=now(), step=0, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self._event(wall_time=now(), step=resumed_at + 1, session_log=start))

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of the metrics: its numbers as scalars of its step."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()]
        self._add(self._event(wall_time=self._now(), step=line["step"], summary=self._summary(value=values)))

    def flush(self) -> None:
        if not self._new:
            return
        url = f"{self._base}.{self._number:05d}"
        if storage.is_remote(url):
            self._whole += self._new
            storage.write(url, bytes(self._whole))
            if len(self._whole) >= ROLL_BYTES:
                self._number, self._whole = self._number + 1, bytearray()
        else:
            storage.append(url, bytes(self._new))
        self._new.clear()

    def _add(self, event: Any) -> None:
        self._new += tfrecord.frame(event.SerializeToString())


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """TensorBoard's tag -> value: `eval_loss` is evaluation/loss, `loss` is train/loss."""
    return {
        f"evaluation/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }
