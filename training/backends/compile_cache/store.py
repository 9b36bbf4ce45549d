"""A folder of compiled programs: one file an entry, named by its key.

    <64 hexadecimal digits>        magic, SHA-256 of the program's bytes, the bytes
    <the same>.unproven            empty: the entry was loaded, and has had no result yet
    .<name>.<random>               an entry that is being written

Nothing here may end a run: what can't be read is not there, what can't be written is not kept. An entry appears whole,
by a rename, so processes may share a folder. One whose bytes are not those that were written is removed. What is in the
folder beside entries stays untouched.

A program may load and then fail or hang when it runs, in every start that loads it. So an entry is unproven from its
load to its first result, and a later start neither loads nor replaces an unproven one.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MAGIC = b"tpu-launch compiled program 1\n"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\..*")
_ABANDONED_SECONDS = 3600.0  # since an unfinished entry was written to
_DIGEST_BYTES = hashlib.sha256().digest_size


class ProgramStore:
    """A folder of compiled programs, created when the first is written."""

    def __init__(self, folder: Path, warn: Callable[[str], None], largest_bytes: int) -> None:
        """`warn` is called once with a line if the folder can't be written; `largest_bytes` bounds all entries."""
        self._folder, self._warn, self._largest_bytes = folder, warn, largest_bytes

    def read(self, key: str) -> bytes | None:
        """Returns the program with this key, marked as unproven until `prove`, and notes its use; None if there is none
        or an unproven one, which it warns of. Removes a damaged entry."""
        path, mark = self._folder / key, self._mark(key)
        if mark.exists():
            self._warn(
                f"an earlier start loaded a compiled program and had no result of it: it is compiled again, and not "
                f"kept as long as there is {mark}"
            )
            return None
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head, program = content[: len(MAGIC) + _DIGEST_BYTES], content[len(MAGIC) + _DIGEST_BYTES :]
        if head != MAGIC + hashlib.sha256(program).digest():
            self.remove(key)
            return None
        try:
            mark.touch()
            os.utime(path)  # the time of its last use
        except OSError:
            return None
        return program

    def write(self, key: str, program: bytes) -> None:
        """Keeps a program, unless it alone exceeds the bound or is marked as unproven. Removes the least recently used
        entries as long as all together exceed the bound. Warns, once, if the folder can't be written."""
        content = MAGIC + hashlib.sha256(program).digest() + program
        if len(content) > self._largest_bytes or self._mark(key).exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(content))
            descriptor, name = tempfile.mkstemp(prefix=f".{key}.", dir=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.replace(name, self._folder / key)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self._warn(f"the compiled program is not kept for the next start: {self._folder}: {error.strerror}")
            self._warn = lambda _message: None  # it was shown

    def prove(self, key: str) -> None:
        """Removes the mark of an entry that was read, as its program has had a result; ignores failures."""
        with contextlib.suppress(OSError):
            self._mark(key).unlink()

    def _mark(self, key: str) -> Path:
        """Returns the path of the file that marks an entry as unproven."""
        return self._folder / f"{key}.unproven"

    def remove(self, key: str) -> None:
        """Removes an entry and its mark if they are there; ignores failures."""
        self.prove(key)
        with contextlib.suppress(OSError):
            (self._folder / key).unlink()

    def _make_room(self, size: int) -> None:
        """Removes files of killed writers, and the oldest entries until `size` bytes more are within the bound."""
        entries = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat()
                if _UNFINISHED.fullmatch(path.name) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
                elif _ENTRY.fullmatch(path.name):
                    entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, path in sorted(entries):
            if total + size <= self._largest_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= entry_size
