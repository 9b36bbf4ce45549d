"""The types of `training.storage`: URLs, what is known of an object, what can go wrong with one, and the functions that
any storage has."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import google_crc32c

from training.errors import BadInput, Exit, TrainError

REMOTE = "gs://"
_PIECE = 8 << 20
_SUMMED = 256 << 10  # fits a processor's cache: google_crc32c takes only bytes, and a copy of this size costs little


class StorageError(TrainError):
    """A file or object could not be read or written; the message names it."""


class NotFound(StorageError):
    """The object, or its bucket, does not exist."""


class NoBucket(NotFound):
    """The bucket itself does not exist: a name in the configuration is wrong, and trying again changes nothing."""

    exit_code = Exit.BAD_INPUT


class NotAllowed(StorageError):
    """This account may not do it; another one, such as the hosts', may."""


class AlreadyExists(StorageError):
    """A create-only write found an object in place."""


class Changed(StorageError):
    """The object is not the generation that the caller pinned."""


@dataclass(frozen=True)
class Stat:
    """What is known of an object without reading it. `generation` of a local file is its st_mtime_ns."""

    url: str
    size: int
    generation: int
    stored_crc32c: int | None = field(default=None, compare=False)

    @property
    def crc32c(self) -> int:
        """CRC-32C of the content. Cloud Storage keeps it; a local file is read to compute it."""
        if self.stored_crc32c is not None:
            return self.stored_crc32c
        crc = 0
        with local_errors(self.url), open(self.url, "rb") as file:
            while piece := file.read(_PIECE):
                crc = google_crc32c.extend(crc, piece)
        return crc


class Storage(Protocol):
    """What checkpoints and runs need of storage. The module `training.storage` is one; a simulation passes its own.

    Every method raises StorageError when storage does not answer as it should.
    """

    def stat(self, url: str) -> Stat | None:
        """Size and generation of an object, None if there is none."""

    def listing(self, folder: str) -> list[Stat]:
        """Everything below a folder, recursively, sorted by URL; [] when there is nothing."""

    def read(self, url: str, start: int = 0, end: int | None = None, *, generation: int | None = None) -> bytes:
        """Bytes [start, end) of an object. Raises NotFound, and Changed if it is not of `generation`."""

    def read_into(self, url: str, start: int, place: memoryview) -> int:
        """Fills `place` with an object's bytes from `start` on, and returns how many there were. Raises NotFound."""

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False) -> Stat:
        """Writes a whole object, or nothing. With `create_only`, exactly one of several writers wins and the others get
        AlreadyExists."""

    def delete(self, url: str) -> None:
        """Deletes an object; a missing one is fine."""

    def remove_partial_files(self, folder: str, abandoned: Callable[[str], bool]) -> None:
        """Deletes unfinished files of killed writers in the direct subfolders whose names are `abandoned`."""


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Returns the CRC-32C of `data` appended to what has the CRC-32C `crc`; in pieces, so that other threads get their
    turn."""
    view = memoryview(data)
    for start in range(0, len(view), _SUMMED):
        crc = google_crc32c.extend(crc, bytes(view[start : start + _SUMMED]))
    return int(crc)


def is_remote(url: str) -> bool:
    """Whether `url` is in Cloud Storage. A local path such as `./gs` is not."""
    return url.startswith(REMOTE)


def join(base: str, *names: str) -> str:
    """Returns `base/name/...`; names are relative."""
    parts = [name.strip("/") for name in names if name.strip("/")]
    return "/".join([base.rstrip("/") or "/", *parts]) if base.rstrip("/") else "/" + "/".join(parts)


def name_of(url: str) -> str:
    """The last part of a URL."""
    return url.rstrip("/").rsplit("/", 1)[-1]


def split_remote(url: str) -> tuple[str, str]:
    """`gs://bucket/a/b` -> ("bucket", "a/b"). Raises BadInput."""
    bucket, _, name = url.removeprefix(REMOTE).partition("/")
    if not bucket:
        raise BadInput(f"{url}: expected gs://bucket/name")
    return bucket, name


def place_mistake(place: str) -> str | None:
    """Why a text can be no local folder and no gs:// URL; None where it can."""
    if not place.strip():
        return "is empty: give a folder, or gs://bucket/folder"
    if place != place.strip() or any(ord(character) < 32 for character in place):
        return f"{place!r} begins or ends with white space, or has control characters: remove them"
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", place)
    if scheme and scheme[1].lower() != "gs":
        return f"{place!r}: {scheme[1]}: is not supported; give a local folder, or gs://bucket/folder"
    if scheme and not re.match(r"gs://[a-z0-9][a-z0-9._-]*(/|$)", place):
        return f"{place!r} is not gs:// and the name of a bucket (lower-case letters, digits, '-', '_' and '.')"
    return None


@contextlib.contextmanager
def local_errors(url: str) -> Iterator[None]:
    """Turns the errors of local files into StorageErrors that name `url`."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{url} does not exist") from None
    except OSError as error:
        advice = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(f"{url}: {error.strerror or error}{advice}") from error
