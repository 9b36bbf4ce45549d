"""torch_xla's profiler, as `training.profiling.profiler` uses it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_xla import _XLAC
from torch_xla.debug import profiler


class TorchProfiler:
    """See `training.profiling.profiler.Tracer`."""

    def start(self, folder: str) -> None:
        profiler.start_trace(folder)

    def stop(self) -> None:
        profiler.stop_trace()

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        # Not profiler.Trace: that also names the operations inside it, so the step would be another program.
        scope: contextlib.AbstractContextManager[Any] = _XLAC.profiler.TraceMe(name, **facts)
        return scope
