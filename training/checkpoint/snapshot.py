"""A snapshot of the state on its way to host memory, beside whatever the loop does until it is about to change the
state again.

Who copies promises that what is copied stays as it is until `wait_before_mutation` returns; a backend calls that right before it
runs the program that changes the state. So the next batch, the tracing of the next step and, where gradients come to
the host first, their whole computation go on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np


class Snapshot:
    """Copies arrays into places of the same shape, in a thread of its own, and then lets go of both."""

    def __init__(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]] = ()) -> None:
        """`pairs` are (place, array); none: all is copied already."""
        self.blocked_seconds = 0.0
        self._pairs = list(pairs)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
        if self._pairs:
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._pairs:
                place, array = self._pairs.pop()
                place[...] = array
        except BaseException as error:
            self._error = error
            self._pairs.clear()

    def wait(self) -> None:
        """Until everything is copied. Raises what went wrong."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_before_mutation(self) -> None:
        """As `wait`, for the loop: the seconds count as those that the save has cost it."""
        began = time.monotonic()
        self.wait()
        self.blocked_seconds += time.monotonic() - began


# Begins to copy the named tensors into the given places, as their raw little-endian bytes.
StartSnapshot = Callable[[Mapping[str, memoryview]], Snapshot]
