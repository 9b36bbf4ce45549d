"""`data.cache`: what was read from a bucket, kept on the host's own disk.

A file is written whole or not at all (`storage.write`), and is nothing that anybody relies on: one that can't be read
or has another size is as good as absent, and a disk that takes no more costs the cache, not the run. What a file holds
is checked by whoever reads it, as if it came from the bucket.
"""

from __future__ import annotations

import sys
from pathlib import Path

from training import storage


class Cache:
    """Files of one dataset. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full = False

    def get(self, name: str, size: int) -> bytes | None:
        """A file of that size, None when there is none."""
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            return None
        return data if len(data) == size else None

    def put(self, name: str, data: bytes) -> None:
        """Keeps it, as long as the disk has taken everything so far. The first refusal is warned of."""
        if self._full:
            return
        try:
            storage.write(str(self._folder / name), data)
        except storage.StorageError as error:
            self._full = True
            print(
                f"tpu-train: warning: data.cache takes no more, what is missing there is read from the bucket instead: {error}",
                file=sys.stderr,
                flush=True,
            )

    def drop(self, name: str) -> None:
        """Forgets a file that turned out to be wrong."""
        storage.delete(str(self._folder / name))
