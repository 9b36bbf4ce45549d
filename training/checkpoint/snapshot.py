"""Snapshots of the state: copies into host memory while the loop goes on, and that memory.

The caller of a snapshot must not change the copied arrays before `wait_before_mutation` returns; a backend calls it
right before it runs the program that changes the state. So the next batch, the tracing of the next step and, where
gradients come to the host first, their whole computation overlap with the copy.

Fresh memory pages cost the kernel several times what the copy itself costs (a page fault and a zeroing each). So a
writer allocates its pages once, in the background while the first step compiles, and copies every snapshot into the
same ones.
"""

import contextlib
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from training.checkpoint.tensors import TensorSpec
from training.machine import SYSTEM

_FLOATS: dict[str, type[np.floating]] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BATCH_BYTES = 64 << 20  # the memory that a copy takes beside the state
_BLOCK = 1 << 18  # elements that are checked together: they fit into a processor's cache
_CHUNK = 4 << 20  # other threads wait for the process' memory map during an madvise call, so calls are short
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: https://man7.org/linux/man-pages/man2/madvise.2.html


def allocate(size: int) -> memoryview:
    """Allocates `size` private bytes of zeros, which are freed when nothing refers to them."""
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


def fault_in(view: memoryview) -> None:
    """Creates the pages of a view from `allocate`; on kernels without support, the first copy creates them."""
    pages = view.obj
    assert isinstance(pages, mmap.mmap)
    for start in range(0, len(pages), _CHUNK):
        with contextlib.suppress(OSError):
            pages.madvise(_POPULATE_WRITE, start, min(_CHUNK, len(pages) - start))


def find_nonfinite(tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> str | None:
    """Returns the name of the first tensor with a NaN or an infinity; None when all are finite."""
    return next((name for name, (spec, data) in tensors.items() if not _is_finite(spec.dtype, data)), None)


def _is_finite(dtype: str, data: memoryview) -> bool:
    """Returns whether all elements are finite; True for other dtypes than BF16, F16, F32 and F64. Looks at the extremes
    of blocks, which are NaN if an element is: 11 GB/s (`np.isfinite`: 8)."""
    if dtype == "BF16":  # numpy has none: the upper half of an F32, whose exponent is all ones if it is not finite
        bits = np.frombuffer(data, np.uint16)
        return all((bits[start : start + _BLOCK] & 0x7F80).max() < 0x7F80 for start in range(0, len(bits), _BLOCK))
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
        """Starts a thread that copies the array of each (buffer, array) pair into its buffer, and then releases the
        pair. Without pairs everything counts as copied. `clock` returns seconds, for `blocked_seconds`."""
        self.blocked_seconds = 0.0  # that `wait_before_mutation` has waited
        self._clock = clock
        waiting = list(pairs)
        self._copying = SYSTEM.threads.submit(_copy, waiting) if waiting else None

    def wait(self) -> None:
        """Waits until everything is copied. Raises the copying thread's error."""
        if self._copying:
            self._copying.result()

    def wait_before_mutation(self) -> None:
        """Waits like `wait`, and adds the time to `blocked_seconds`. A backend calls it before it changes the state."""
        began = self._clock()
        self.wait()
        self.blocked_seconds += self._clock() - began


def _copy(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies the array of each (buffer, array) pair into its buffer, the last first, and drops the pair."""
    while pairs:
        buffer, array = pairs.pop()
        buffer[...] = array


def in_batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields names of arrays (`sizes`: bytes) in batches of at most 64 MiB; a larger array is a batch of its own."""
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


# Starts a snapshot into the given buffers, as raw little-endian bytes. Their keys name whole tensors, or slices that
# this host holds (`tensors.key_in_part`).
StartSnapshot = Callable[[Mapping[str, memoryview]], Snapshot]
