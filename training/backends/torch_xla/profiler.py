"""torch_xla's profiler, behind the protocol of `training.profiler.Tracer`."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_xla.debug import profiler

from training.backends.torch_xla import internals


class TorchProfiler:
    def start(self, folder: str) -> None:
        profiler.start_trace(folder)

    def stop(self) -> None:
        profiler.stop_trace()

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        return internals.trace_event(name, **facts)
