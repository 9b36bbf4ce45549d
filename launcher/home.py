"""The folder of the launcher's state, `.tpu-launch` in the current folder or $TPU_LAUNCH_HOME; its files, and locks.

$TPU_LAUNCH_SUBFOLDER names a folder in it with separate state: emulated slices and their runs are in `emulated`, so
that no command takes them for Google's. Only its owner can enter it (0700): run folders hold logs and configurations.

A lock (flock) ends with the last process that holds it, even when that process is killed. NFS turns flock into locks of
byte ranges (flock(2)): an exclusive one needs a descriptor that is open for writing, a shared one a descriptor that is
open for reading. So every file is opened for both. A file system may have no locks.
"""

import contextlib
import errno
import functools
import logging
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any

from launcher.errors import BadInput

_log = logging.getLogger(__name__)


def root() -> Path:
    """Returns the absolute path of $TPU_LAUNCH_HOME, or of `.tpu-launch` in the current folder. It may be missing."""
    return Path(os.environ.get("TPU_LAUNCH_HOME") or ".tpu-launch").absolute()


def where() -> Path:
    """Returns the launcher's folder: `root`, or its subfolder $TPU_LAUNCH_SUBFOLDER. It may not exist yet."""
    return root() / os.environ.get("TPU_LAUNCH_SUBFOLDER", "")


def write_private(path: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Writes a file that only its owner can read (0600), completely or not at all. Creates missing folders. With
    `sync`, waits until the disk has the data. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk: leave the room to others
        temporary.unlink(missing_ok=True)
        raise


def write_whole(file: FileIO, data: bytes) -> None:
    """Writes to an unbuffered file. Raises OSError if not everything fits, which `write` alone does not report."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def home() -> Path:
    """Returns the launcher's folder (`where`), and creates it if missing, as `ensure_private`. Raises BadInput."""
    return ensure_private(where())


def ensure_private(path: Path) -> Path:
    """Creates a folder and its missing parents, all for their owner alone (0700), and returns it. Raises BadInput when
    that fails."""
    try:
        for folder in (*(each for each in reversed(path.parents) if not each.exists()), path):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path}: can't be created: {error.strerror}; set TPU_LAUNCH_HOME to a folder you can write"
        ) from None
    return path


def of_slice(project: str, name: str, ending: str) -> Path:
    """Returns the path of a file with this machine's local knowledge of a slice: slices/PROJECT.NAME.ENDING."""
    return where() / "slices" / f"{project.replace('/', '_')}.{name}.{ending}"


def lock(file: IO[Any] | int, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file, exclusively unless `shared`, until it is closed. Returns False if another open of the file,
    also by this process, holds the lock and `wait` is False. Raises BadInput, which names `path`, where the file system
    can't lock it."""
    import fcntl  # some systems that make images without an engine lack it

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
    """Waits while a process holds an exclusive lock on a file, then holds a shared one in the block. Yields its
    descriptor: a process that inherits it keeps the lock. Creates the file and its folder; the file stays. Yields None,
    without a lock, where the file can't be made (a full disk), and, with a warning, where it can't be locked."""
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
    """Returns whether any process holds a lock (`exclusively`: an exclusive one) on a file; False if the file can't be
    opened; None, with a warning, where the file system can't lock. Keeps no lock itself, and creates no file."""
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
    """Logs that it is not known what other commands do, once a process for each `text`, the reason."""
    _log.warning("not known which other commands are at work: %s", text)
