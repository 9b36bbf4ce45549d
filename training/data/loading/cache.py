"""`data.cache`: a folder on the host's own disk for blocks that were read from a bucket.

Failure model: any file may be damaged or missing. Each ends in a CRC-32C of its content; one that can't be read, or has
another size or checksum, counts as missing, so files are renamed into place but not synced to the disk. The cache
leaves 2 % of the disk free, at least 1 GB; below that, and when the disk refuses a write, it adds no more files and the
run goes on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from training import storage

_CRC_BYTES = 4
_LEAST_FREE_BYTES = 1 << 30
_LEAST_FREE_SHARE = 0.02  # of the disk
_CHECK_EVERY_BYTES = 64 << 20  # written between two checks of the disk


class Cache:
    """Cached files of one dataset. Thread-safe."""

    def __init__(self, folder: Path, disk_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage) -> None:
        """`disk_usage` returns total, used and free bytes of a folder's disk."""
        self._folder, self._disk_usage = folder, disk_usage
        self._full = False
        self._unchecked = _CHECK_EVERY_BYTES  # bytes written since the last check of the disk
        self._lock = threading.Lock()

    def get(self, name: str, size: int) -> bytes | None:
        """Returns the file's content; None if it can't be read, is damaged, or its content is not of `size` bytes."""
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            return None
        content, checksum = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        return content if len(content) == size and checksum == _checksum(content) else None

    def put(self, name: str, data: bytes) -> None:
        """Writes a file and its checksum. The first write without room, or that the disk refuses, prints a warning, and
        nothing is written from then on."""
        if self._full:
            return
        try:
            self._require_room(len(data))
            self._write(name, data)
        except OSError as error:
            self._full = True
            print(
                "tpu-train: warning: data.cache is full; blocks that it lacks are read from the bucket: "
                f"{self._folder / name}: {error.strerror or error}",
                file=sys.stderr,
                flush=True,
            )

    def drop(self, name: str) -> None:
        """Removes a file, if it exists."""
        storage.delete(str(self._folder / name))

    def _require_room(self, size: int) -> None:
        """Raises OSError when the disk has too little free space; checks once for every 64 MB, and makes the folder."""
        with self._lock:
            self._unchecked += size
            if self._unchecked < _CHECK_EVERY_BYTES:
                return
            self._unchecked = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        total, _, free = self._disk_usage(self._folder)
        least = max(_LEAST_FREE_BYTES, int(total * _LEAST_FREE_SHARE))
        if free < least:
            raise OSError(f"{free >> 20} MB of the disk are free, and the cache leaves {least >> 20} MB")

    def _write(self, name: str, data: bytes) -> None:
        """Writes data and checksum to a hidden file and renames it into place; deletes it and raises on an OSError."""
        partial = self._folder / f".{name}.{secrets.token_hex(6)}.partial"
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                view = memoryview(data + _checksum(data))
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            os.replace(partial, self._folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C as 4 little-endian bytes."""
    return storage.crc32c(data).to_bytes(_CRC_BYTES, "little")
