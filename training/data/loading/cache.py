"""`data.cache`: a folder on the host's own disk for what was read from a bucket.

    <data.cache>/tpu-launch-blocks-<key>/<name>    content, and its CRC-32C in 4 bytes, little-endian

The key has everything that decides the content: the dataset, the generations of its objects, the length of rows, the
records of a block. All folders together hold at most `data.cache_gb` and leave 2 % of the disk free, at least 1 GB.
When there is no more room, the key's folder that was opened or written longest ago goes, unless a process uses it.
Files of a key in use stay: an epoch reads each of them once, in random order, so a newer one would save no more.

Failure model: any file may be damaged or missing. One that can't be read, or has another size or checksum, counts as
missing, so files are renamed into place but not synced to the disk. The first write without room, or that the disk
refuses, prints a warning, and nothing is written from then on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from training import storage

_LEAST_FREE_BYTES = 1 << 30
_LEAST_FREE_SHARE = 0.02  # of the disk
_CHECKS = 16  # of the room, while the folder fills
_FOLDER = re.compile(r"tpu-launch-blocks-[0-9a-f]{16}(-\d+)*")


class Cache:
    """The cached files of one process. Thread-safe."""

    def __init__(
        self, folder: Path, largest_bytes: int, disk_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    ) -> None:
        """`folder` may hold `largest_bytes`. `disk_usage` returns total, used and free bytes of a folder's disk."""
        self._folder, self._largest_bytes, self._disk_usage = folder, largest_bytes, disk_usage
        self._keys: set[str] = set()  # whose folders this process has opened
        self._full = False
        self._left = 0  # bytes that may be written before the next check
        self._lock = threading.Lock()

    def get(self, key: str, name: str, size: int) -> bytes | None:
        """Returns a file's content; None if it can't be read, is damaged, or its content is not of `size` bytes."""
        try:
            return unseal((self._open(key) / name).read_bytes(), size)
        except OSError:
            return None

    def put(self, key: str, name: str, data: bytes) -> None:
        """Writes a file, unless an earlier one could not be written; if it can't, prints the warning."""
        if self._full:
            return
        sealed = seal(data)
        try:
            folder = self._open(key)
            with self._lock:
                if self._left < len(sealed):
                    self._left = self._make_room(len(sealed))
                self._left -= len(sealed)
            _write(folder, name, sealed)
        except OSError as error:
            with self._lock:
                self._full, was_full = True, self._full
            if not was_full:
                print(
                    "tpu-train: warning: data.cache takes no more; blocks that it lacks are read from the bucket: "
                    f"{self._folder}: {error.strerror or error}",
                    file=sys.stderr,
                    flush=True,
                )

    def _open(self, key: str) -> Path:
        """Returns a key's folder; the first time makes it, if need be, and locks it until this cache is no more."""
        folder = self._folder / f"tpu-launch-blocks-{key}"
        with self._lock:
            if key not in self._keys:
                folder.mkdir(parents=True, exist_ok=True)
                self._keys.add(key)
                descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
                weakref.finalize(self, os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.utime(folder)  # the time of its last use
        return folder

    def _make_room(self, size: int) -> int:
        """Returns how many bytes may be written until the next check, at least `size`; removes folders that no process
        uses until there is room. Raises OSError if there is none."""
        while True:
            folders = [folder for folder in self._folder.iterdir() if _FOLDER.fullmatch(folder.name)]
            kept = sum(map(_size, folders))
            total, _, free = self._disk_usage(self._folder)
            least_free = max(_LEAST_FREE_BYTES, int(total * _LEAST_FREE_SHARE))
            room = min(self._largest_bytes - kept, free - least_free)
            if room >= size:
                return max(size, min(room, self._largest_bytes // _CHECKS))
            if not any(map(_remove, sorted(folders, key=lambda folder: folder.stat().st_mtime_ns))):
                raise OSError(
                    f"it holds {kept / 1e9:.3g} of {self._largest_bytes / 1e9:.3g} GB (data.cache_gb), and "
                    f"{free / 1e9:.3g} GB of the disk are free, of which it leaves {least_free / 1e9:.3g}"
                )


def seal(content: bytes) -> bytes:
    """Returns the content followed by its CRC-32C, for `unseal`."""
    return content + storage.crc32c(content).to_bytes(4, "little")


def unseal(data: bytes, size: int) -> bytes | None:
    """Returns the content that was sealed; None if it is damaged or not of `size` bytes."""
    content = data[:-4]
    return content if len(content) == size and seal(content) == data else None


def _write(folder: Path, name: str, sealed: bytes) -> None:
    """Writes to a hidden file and renames it into place; deletes it and raises on an OSError."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(sealed)
        os.replace(partial, folder / name)
    except OSError:
        os.unlink(partial)
        raise


def _size(folder: Path) -> int:
    """Returns the bytes of the whole files in a folder; 0 if another process removes it."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if not entry.name.startswith("."))
    return 0


def _remove(folder: Path) -> bool:
    """Removes a key's folder and returns True, unless a process uses it."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
