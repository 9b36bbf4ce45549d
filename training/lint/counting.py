"""Watching a backend by its own counts alone, for frameworks whose steps are functions that are traced once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from training.backends.protocol import Backend
from training.lint.rules import HOST, Finding, Watched


class Counting:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @contextmanager
    def step(self) -> Iterator[Watched]:
        watched, before, known = Watched(), self._backend.compilations()[0], set(self._backend.fallbacks())
        yield watched
        watched.compilations = self._backend.compilations()[0] - before
        watched.findings += [Finding(HOST, "", name) for name in self._backend.fallbacks() if name not in known]
