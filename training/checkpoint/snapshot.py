"""A snapshot of the state, copied to host memory while the loop goes on.

Whoever starts a snapshot promises that what is copied stays as it is until `wait_before_mutation` returns; a backend
calls that right before it runs the program that changes the state. So the next batch, the tracing of the next step and,
where gradients come to the host first, their whole computation overlap with the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from training.checkpoint.safetensors_file import TensorSpec

_FLOATS: dict[str, type[np.floating]] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BATCH_BYTES = 64 << 20  # the memory that a copy takes beside the state
_BLOCK = 1 << 18  # elements that are looked at together: they fit into a processor's cache


def find_nonfinite(tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> str | None:
    """The name of a tensor that has a NaN or an infinity among its bytes; None when all are finite."""
    return next((name for name, (spec, data) in tensors.items() if not _is_finite(spec.dtype, data)), None)


def _is_finite(dtype: str, data: memoryview) -> bool:
    """By the extremes, which are NaN where an element is: no memory of its own, 11 GB/s (`np.isfinite`: 8)."""
    if dtype not in _FLOATS:
        return True
    values = np.frombuffer(data, _FLOATS[dtype])
    blocks = (values[start : start + _BLOCK] for start in range(0, len(values), _BLOCK))
    return all(np.isfinite(block.max()) and np.isfinite(block.min()) for block in blocks)


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


def in_batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names, in batches of at most 64 MiB that are copied together. `sizes`: bytes of the tensor of each name; one
    that alone has more is a batch."""
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


# Starts a snapshot of the named tensors into the given buffers, as raw little-endian bytes.
StartSnapshot = Callable[[Mapping[str, memoryview]], Snapshot]
