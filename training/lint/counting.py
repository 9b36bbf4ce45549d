"""A step watcher that has nothing but a backend's own counts, for frameworks whose steps are functions that are traced
once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from training.backends.protocol import Backend
from training.lint.rules import HOST, Finding, StepTrace


class CountingWatcher:
    """Counts the programs that a step compiles and the operations that it runs on the host."""

    def __init__(self, backend: Backend) -> None:
        """Watches the steps of `backend`."""
        self._backend = backend

    @contextmanager
    def step(self) -> Iterator[StepTrace]:
        """Watches the step that runs in the block; the trace is complete when the block has ended."""
        trace, compiled, known = StepTrace(), self._backend.compilations()[0], set(self._backend.fallbacks())
        yield trace
        trace.compilations = self._backend.compilations()[0] - compiled
        trace.findings += [Finding(HOST, "", name) for name in self._backend.fallbacks() if name not in known]
