"""What `training.storage` speaks of: URLs, what is known of an object, and what can go wrong with one."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field

import google_crc32c

from training.errors import BadInput, Exit, TrainError

REMOTE = "gs://"
_PIECE = 8 << 20
_SUMMED = (
    256 << 10
)  # fits into a processor's own cache: google_crc32c takes nothing but bytes, and this copy costs next to nothing


class StorageError(TrainError):
    """A file or object could not be read or written; the message names it."""


class NotFound(StorageError):
    """The object, or its bucket, does not exist."""


class NoBucket(NotFound):
    """The bucket itself: a name in the configuration is wrong, and trying again changes nothing."""

    exit_code = Exit.BAD_INPUT


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


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """CRC-32C, going on from `crc`; in pieces, so that other threads get their turn."""
    view = memoryview(data)
    for start in range(0, len(view), _SUMMED):
        crc = google_crc32c.extend(crc, bytes(view[start : start + _SUMMED]))
    return int(crc)


def is_remote(url: str) -> bool:
    """Whether `url` is in Cloud Storage. A local path such as `./gs` is not."""
    return url.startswith(REMOTE)


def join(base: str, *names: str) -> str:
    """`base/name/...`; names are relative."""
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


@contextlib.contextmanager
def local_errors(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{url} does not exist") from None
    except OSError as error:
        advice = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(f"{url}: {error.strerror or error}{advice}") from error
