"""A snapshot of the state, copied to host memory while the loop goes on.

Whoever starts a snapshot promises that what is copied stays as it is until `wait_before_mutation` returns; a backend
calls that right before it runs the program that changes the state. So the next batch, the tracing of the next step and,
where gradients come to the host first, their whole computation overlap with the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np


class Snapshot:
    """A copy of arrays into buffers of the same shape, made by a thread of its own."""

    def __init__(
        self, pairs: Iterable[tuple[np.ndarray, np.ndarray]] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts to copy.

        Args:
            pairs: (buffer, array) pairs; none when everything is copied already. Both are released once copied.
            clock: Seconds, for `blocked_seconds`.
        """
        self.blocked_seconds = 0.0  # that `wait_before_mutation` has waited
        self._clock = clock
        self._pairs = list(pairs)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
        if self._pairs:
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._pairs:
                buffer, array = self._pairs.pop()
                buffer[...] = array
        except BaseException as error:
            self._error = error
            self._pairs.clear()

    def wait(self) -> None:
        """Waits until everything is copied. Raises what went wrong."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_before_mutation(self) -> None:
        """As `wait`, for the loop, which is about to change the state: the time counts as the cost of the save."""
        began = self._clock()
        self.wait()
        self.blocked_seconds += self._clock() - began


# Starts a snapshot of the named tensors into the given buffers, as raw little-endian bytes.
StartSnapshot = Callable[[Mapping[str, memoryview]], Snapshot]
