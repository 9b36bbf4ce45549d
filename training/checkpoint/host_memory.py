"""Host memory for the bytes of a part: one mapping, whose pages are there before the loop copies into them.

Fresh pages cost the kernel several times what the copy itself costs (a fault and a zeroing each), so a saver asks for
its pages once, in the background while the first step compiles, and copies every snapshot into the same ones.
"""

from __future__ import annotations

import contextlib
import mmap

_PIECE = 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: https://man7.org/linux/man-pages/man2/madvise.2.html


def mapping(size: int) -> memoryview:
    """`size` bytes of zeros that no process shares. Gone when nothing refers to them."""
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


def fault_in(view: memoryview) -> None:
    """Makes the pages of a mapping be there. Elsewhere than on a recent Linux they come with the first copy."""
    pages = view.obj
    assert isinstance(pages, mmap.mmap)
    for start in range(
        0, len(pages), _PIECE
    ):  # in pieces, since other threads of the process wait for its memory map meanwhile
        with contextlib.suppress(OSError):
            pages.madvise(_POPULATE_WRITE, start, min(_PIECE, len(pages) - start))
