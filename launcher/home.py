"""The folder of the launcher's state: `.tpu-launch` in the current folder, or $TPU_LAUNCH_HOME.

$TPU_LAUNCH_SUBFOLDER names a folder in it with separate state: emulated slices and their runs are in `emulated`, so
that no command takes them for Google's. Only its owner can enter it (0700): run folders hold logs and configurations.
"""

import errno
import os
import threading
from io import FileIO
from pathlib import Path

from launcher.errors import BadInput


def root() -> Path:
    """Returns the absolute path of $TPU_LAUNCH_HOME, or of `.tpu-launch` here, which may not exist yet."""
    return Path(os.environ.get("TPU_LAUNCH_HOME") or ".tpu-launch").absolute()


def where() -> Path:
    """Returns the launcher's folder: `root`, or $TPU_LAUNCH_SUBFOLDER in it. It may not exist yet."""
    return root() / os.environ.get("TPU_LAUNCH_SUBFOLDER", "")


def write_private(path: Path, text: str) -> None:
    """Writes a text file that only its owner can read (0600), completely or not at all. Creates missing folders."""
    write_private_bytes(path, text.encode())


def write_private_bytes(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Writes a file of bytes as `write_private` writes text; with `sync`, waits until the disk has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def write_whole(file: FileIO, data: bytes) -> None:
    """Writes to an unbuffered file. Raises OSError if not everything fits, which `write` alone does not report."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def home() -> Path:
    """Returns the launcher's folder, and creates it if missing. Raises BadInput when it can't be created."""
    path = where()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path}: can't be created: {error.strerror}; set TPU_LAUNCH_HOME to a folder you can write"
        ) from None
    return path


def of_slice(project: str, name: str, ending: str) -> Path:
    """Returns the path of a file with this machine's local knowledge of a slice: slices/PROJECT.NAME.ENDING."""
    return where() / "slices" / f"{project.replace('/', '_')}.{name}.{ending}"
