"""`data.cache`: a folder on the host's own disk for blocks that were read from a bucket.

What can fail half-way: a file is written whole or not at all (`storage.write`). Nothing depends on a file: one that
can't be read or has another size counts as missing. When the disk refuses a write, no more files are added and the run
goes on. The reader checks the content as if it came from the bucket.
"""

from __future__ import annotations

import sys
from pathlib import Path

from training import storage


class Cache:
    """Cached files of one dataset. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full = False

    def get(self, name: str, size: int) -> bytes | None:
        """The file's content; None where there is no file of `size` bytes."""
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            return None
        return data if len(data) == size else None

    def put(self, name: str, data: bytes) -> None:
        """Writes a file. After the first write that fails, prints a warning and writes nothing any more."""
        if self._full:
            return
        try:
            storage.write(str(self._folder / name), data)
        except storage.StorageError as error:
            self._full = True
            print(
                "tpu-train: warning: data.cache takes no more, what is missing there is read from the bucket instead: "
                f"{error}",
                file=sys.stderr,
                flush=True,
            )

    def drop(self, name: str) -> None:
        """Removes a file whose content is wrong."""
        storage.delete(str(self._folder / name))
