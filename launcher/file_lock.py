"""Shared locks (flock) on files. A lock ends with the last process that holds it, even when that process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_shared(path: Path) -> Iterator[int | None]:
    """Holds a shared lock on a file, and yields its descriptor: a process that inherits it keeps the lock. Creates the
    file and its folder; the file stays. Yields None, without a lock, where the file can't be made (a full disk)."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Returns whether any process holds a lock on a file; False if the file can't be opened. Keeps no lock itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
