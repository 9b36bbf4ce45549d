"""Locks on files (flock). A lock ends with the last process that holds it, even when that process is killed.

NFS turns flock into locks of byte ranges (flock(2)): an exclusive one needs a descriptor that is open for writing, a
shared one a descriptor that is open for reading. So every file is opened for both. A file system may have no locks.
"""

import contextlib
import fcntl
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from launcher.errors import BadInput

_log = logging.getLogger(__name__)


def lock(file: IO[Any] | int, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file, exclusively unless `shared`, until it is closed. Returns False if another process holds it
    and `wait` is False. Raises BadInput, which names `path`, where the file system can't lock it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise BadInput(
            f"{path}: its file system can't lock files ({error.strerror}): set TPU_LAUNCH_HOME to a folder on a local "
            "disk"
        ) from None
    return True


@contextlib.contextmanager
def hold_shared(path: Path) -> Iterator[int | None]:
    """Holds a shared lock on a file, and yields its descriptor: a process that inherits it keeps the lock. Creates the
    file and its folder; the file stays. Yields None, without a lock, where the file can't be made (a full disk), and,
    with a warning, where it can't be locked."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield None
        return
    held: int | None = descriptor
    try:
        try:
            lock(descriptor, path, shared=True, wait=True)
        except BadInput as error:
            _warn(str(error))
            held = None
        yield held
    finally:
        os.close(descriptor)


def is_held(path: Path, *, exclusively: bool = False) -> bool | None:
    """Returns whether any process holds a lock on a file, or an exclusive one; False if the file can't be opened; None,
    with a warning, if that can't be told. Keeps no lock itself, and creates no file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not lock(descriptor, path, shared=exclusively)
    except BadInput as error:
        _warn(str(error))
        return None
    finally:
        os.close(descriptor)


@functools.cache
def _warn(text: str) -> None:
    """Prints a warning, once a process."""
    _log.warning("not known which other commands are at work: %s", text)
