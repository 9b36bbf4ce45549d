"""Host memory for the bytes of a part: one mapping, whose pages exist before the loop copies into them.

Fresh pages cost the kernel several times what the copy itself costs (a page fault and a zeroing each). So a writer
allocates its pages once, in the background while the first step compiles, and copies every snapshot into the same ones.
"""

from __future__ import annotations

import contextlib
import mmap

_CHUNK = 4 << 20  # other threads wait for the process' memory map during a call, so calls are short
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: https://man7.org/linux/man-pages/man2/madvise.2.html


def allocate(size: int) -> memoryview:
    """Allocates `size` private bytes of zeros, which are freed when nothing refers to them."""
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


def fault_in(view: memoryview) -> None:
    """Makes the pages of an allocation exist. Where the kernel does not support this they come with the first copy."""
    pages = view.obj
    assert isinstance(pages, mmap.mmap)
    for start in range(0, len(pages), _CHUNK):
        with contextlib.suppress(OSError):
            pages.madvise(_POPULATE_WRITE, start, min(_CHUNK, len(pages) - start))
