"""The types of `training.storage`: URLs, objects' states, errors, and the `Storage` protocol."""

import contextlib
import errno
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import google_crc32c

from training.errors import BadInput, Exit, TrainError

REMOTE = "gs://"
_PIECE = 8 << 20
_SUMMED = 256 << 10  # google_crc32c takes only bytes; a copy of this size fits a processor's cache and costs little


class StorageError(TrainError):
    """A file or object can't be read or written; the message names it."""


class NotFound(StorageError):
    """The object, or its bucket, does not exist."""


class NoBucket(NotFound):
    """The bucket itself does not exist: the configuration names a wrong one, and a retry changes nothing."""

    exit_code = Exit.BAD_INPUT


class NotAllowed(StorageError):
    """This account lacks the permission; another one, such as the hosts', may have it."""


class AlreadyExists(StorageError):
    """A create-only write found an object in place."""


class Changed(StorageError):
    """The object is not the generation that the caller pinned."""


@dataclass(frozen=True)
class Stat:
    """An object's state, known without reading it. `generation` of a local file is its st_mtime_ns."""

    url: str
    size: int
    generation: int
    stored_crc32c: int | None = field(default=None, compare=False)
    age: float | None = field(default=None, compare=False)
    """Seconds since it was written, by the server's clock when it answered `stat`; None if it told no time, as for a
    file."""

    @property
    def crc32c(self) -> int:
        """Returns the content's CRC-32C, as Cloud Storage or `write` gave it; else each use reads the local file."""
        if self.stored_crc32c is not None:
            return self.stored_crc32c
        crc = 0
        with local_errors(self.url), open(self.url, "rb") as file:
            while piece := file.read(_PIECE):
                crc = google_crc32c.extend(crc, piece)
        return crc


class RangedFile(io.RawIOBase):
    """A file whose bytes are read in the ranges that are asked for."""

    def __init__(self, size: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        """`read(start, end)` returns these bytes of the `size` of the file."""
        self._size, self._read, self._position = size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a position, which it does not check, and returns it. Behind the end, reads return nothing."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer by one read, up to the end of the file. Returns the number of bytes, 0 at the end."""
        place = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(place), self._size)
        if start < end:
            place[: end - start] = self._read(start, end)
            self._position = end
        return max(end - start, 0)


class Storage(Protocol):
    """The storage operations of checkpoints and runs: those functions of the module `training.storage`, which
    implements them. A simulation passes its own."""

    def stat(self, url: str) -> Stat | None: ...

    def listing(self, folder: str) -> list[Stat]: ...

    def read(self, url: str, start: int = 0, end: int | None = None, *, generation: int | None = None) -> bytes: ...

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False) -> Stat: ...

    def delete(self, url: str) -> None: ...

    def remove_partial_files(self, folder: str, abandoned: Callable[[str], bool]) -> None: ...


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Returns the CRC-32C `crc` extended by `data`; computed in pieces, so that other threads can run in between."""
    view = memoryview(data)
    for start in range(0, len(view), _SUMMED):
        crc = google_crc32c.extend(crc, bytes(view[start : start + _SUMMED]))
    return int(crc)


def is_remote(url: str) -> bool:
    """Returns whether `url` is in Cloud Storage. A local path such as `./gs` is not."""
    return url.startswith(REMOTE)


def join(base: str, *names: str) -> str:
    """Returns `base/name/...`, from the root if `base` is empty; names are relative, and empty ones are left out."""
    parts = [name.strip("/") for name in names if name.strip("/")]
    return "/".join([base.rstrip("/") or "/", *parts]) if base.rstrip("/") else "/" + "/".join(parts)


def name_of(url: str) -> str:
    """Returns the last part of a URL."""
    return url.rstrip("/").rsplit("/", 1)[-1]


def split_remote(url: str) -> tuple[str, str]:
    """Splits a gs:// URL (unchecked) into ("bucket", "a/b"), or ("bucket", ""). Raises BadInput unless the
    bucket's name begins and ends with a letter or digit."""
    bucket, _, name = url.removeprefix(REMOTE).partition("/")
    if not bucket[:1].isalnum() or not bucket[-1].isalnum():  # Google's client refuses it by a ValueError
        raise BadInput(f"{url}: expected gs://bucket/name; a bucket's name begins and ends with a letter or digit")
    return bucket, name


def place_mistake(place: str) -> str | None:
    """Returns why a text is, by its form alone, neither a local folder nor a gs:// URL; None if it is one."""
    if not place.strip():
        return "is empty: give a folder, or gs://bucket/folder"
    if place != place.strip() or any(ord(character) < 32 for character in place):
        return f"{place!r} begins or ends with white space, or has control characters: remove them"
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", place)
    if scheme and scheme[1].lower() != "gs":
        return f"{place!r}: {scheme[1]}: is not supported; give a local folder, or gs://bucket/folder"
    if scheme and not re.match(r"gs://[a-z0-9]([a-z0-9._-]*[a-z0-9])?(/|$)", place):
        return f"{place!r} is not gs:// and the name of a bucket (a-z, 0-9; between them also '-', '_', '.')"
    return None


@contextlib.contextmanager
def local_errors(url: str) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that names `url`; into NotFound if a file is missing."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{url} does not exist") from None
    except OSError as error:
        advice = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(f"{url}: {error.strerror or error}{advice}") from error
