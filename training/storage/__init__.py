"""Files and Cloud Storage objects behind one set of functions; a URL is a local path or `gs://bucket/name`.

Callers write `from training import storage` and `storage.read(url)`. `types` has the types and errors, `gcs` the client
of Cloud Storage, which imports Google's library at the first `gs://` URL, with its retries and time-outs; `hub` the
folders that are named on the Hugging Face Hub. This module implements the protocol `Storage`: code whose storage can be
replaced takes one as an argument, with this module as the default.

Framework-free. All operations but `append` are atomic: a reader sees an object whole or not at all, one `create_only`
writer succeeds, and a read pinned to a generation never mixes two versions of an object. Failure model:

* A local write goes to a hidden `.<name>.<random>.partial` beside its target and appears by one `link` or `replace`
  after an fsync. A crash leaves at most the hidden file, which `listing` does not show and `remove_partial_files`
  removes.
* A bucket write becomes visible when the server finalises it. When the answer to a create-only write is lost, the write
  is retried; if the object then exists with exactly the bytes that were sent, the write has succeeded.
* A ranged read that breaks off is repeated whole, so no half range is ever returned.
"""

import contextlib
import errno
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG

from training.storage import gcs
from training.storage.types import (
    REMOTE,
    AlreadyExists,
    Changed,
    NotAllowed,
    NotFound,
    RangedFile,
    Stat,
    Storage,
    StorageError,
    crc32c,
    is_remote,
    join,
    local_errors,
    name_of,
    split_remote,
)

__all__ = ["REMOTE", "AlreadyExists", "Changed", "NotAllowed", "NotFound", "Stat", "Storage", "StorageError"]
__all__ += ["append", "delete", "download", "folders", "listing", "read", "remove_partial_files", "stat"]
__all__ += ["RangedFile", "traffic", "transfer_seconds", "write"]
__all__ += ["crc32c", "is_remote", "join", "name_of", "split_remote"]

_PARTIAL = ".partial"
_PIECE = 8 << 20
_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EMLINK)
_WRITTEN = 64 << 20  # bytes after which the write-back begins, and other Python threads can run


traffic = Counter[str]()  # of this process: "read", bytes that `read` returned; threads may lose a few: it is shown


def stat(url: str) -> Stat | None:
    """Returns size, generation and, in a bucket, CRC-32C and age of an object; None for none, and a local folder.
    Raises StorageError."""
    if is_remote(url):
        return gcs.stat(url)
    with local_errors(url):
        try:
            status = os.stat(url)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return Stat(url, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None


def listing(folder: str) -> list[Stat]:
    """Lists the files below a folder, at any depth, sorted by URL, no unfinished ones; [] for none. Does not follow
    links to folders. Raises NoBucket, StorageError, also if a local subfolder can't be read."""
    if is_remote(folder):
        return gcs.listing(folder)
    with local_errors(folder):
        paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder, onerror=_raise) for name in names)
        found = [status for path in paths if not _is_partial(name_of(path)) and (status := stat(path))]
    return sorted(found, key=lambda status: status.url)


def _raise(error: OSError) -> None:
    """Raises the error of a folder, as a StorageError, unless the folder is missing or a file."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        with local_errors(error.filename):
            raise error


def files(folder: str) -> list[Stat]:
    """Lists the files directly in a folder, not those of its subfolders, as `listing` does."""
    start = len(folder.rstrip("/"))
    return [found for found in listing(folder) if "/" not in found.url[start:].lstrip("/")]


def folders(url: str) -> list[str]:
    """Returns the names of the direct subfolders of a bucket's folder (a gs:// URL), sorted; [] if it is missing.
    Raises NoBucket, StorageError."""
    return gcs.folders(url)


def read(url: str, start: int = 0, end: int | None = None, *, generation: int | None = None) -> bytes:
    """Reads bytes [start, end), fewer if the object ends, b"" beyond it; counts them in `traffic`. Raises NotFound,
    Changed for another `generation` (None: any), StorageError; ValueError unless 0 <= start <= end."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"{url}: bytes [{start}, {end}) is not a range")
    data = gcs.read(url, start, end, generation) if is_remote(url) else _read_local(url, start, end, generation)
    traffic["read"] += len(data)
    return data


def _read_local(url: str, start: int, end: int | None, generation: int | None) -> bytes:
    """Reads as `read`, from a file, whose generation is its st_mtime_ns."""
    with local_errors(url), open(url, "rb") as file:
        status = os.fstat(file.fileno())
        if generation is not None and status.st_mtime_ns != generation:
            raise Changed(f"{url} was changed while it was in use: don't write to data that is being read; start again")
        file.seek(start)
        stop = status.st_size if end is None else min(end, status.st_size)
        return file.read(max(0, stop - start))


def write(url: str, data: bytes | memoryview, *, create_only: bool = False, replaces: int | None = None) -> Stat:
    """Writes a whole object (and creates a local file's folder); returns its new state. Raises AlreadyExists with
    `create_only` for all but one of several writers, and with `replaces`, for buckets only, if the object has another
    generation (0: there is none; None: any); StorageError."""
    if is_remote(url):
        return gcs.write(url, data, 0 if create_only else replaces)
    assert replaces is None
    with local_errors(url):
        with _replacing(url, create_only) as descriptor:
            crc = _write_summed(descriptor, memoryview(data))
        return Stat(url, len(data), os.stat(url).st_mtime_ns, crc)


def transfer_seconds(url: str, size: int) -> float:
    """Returns the seconds after which a transfer of `size` bytes to or from a bucket gives up; 0 for a file."""
    return gcs.timeouts.seconds(size) if is_remote(url) else 0.0


def append(path: str, data: bytes) -> None:
    """Appends to a local file (no gs:// URL), or creates it and its folder; a crash may leave a part of `data`. Raises
    StorageError."""
    with local_errors(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)


def download(url: str, path: Path) -> None:
    """Copies one generation of an object, or a file, to a local file, in pieces; creates its folder, and replaces the
    file once the copy is complete. Raises NotFound, Changed, StorageError."""
    source = stat(url)
    if source is None:
        raise NotFound(f"{url} does not exist")
    path.parent.mkdir(parents=True, exist_ok=True)
    with local_errors(str(path)), _replacing(str(path), create_only=False) as descriptor:
        for start in range(0, source.size, 4 * _PIECE):
            view = memoryview(read(url, start, start + 4 * _PIECE, generation=source.generation))
            while view:
                view = view[os.write(descriptor, view) :]


def delete(url: str) -> None:
    """Deletes an object, if it exists. Raises StorageError, for a local folder too."""
    if is_remote(url):
        gcs.delete(url)
        return
    with local_errors(url), contextlib.suppress(FileNotFoundError):
        os.unlink(url)


def remove_partial_files(folder: str, abandoned: Callable[[str], bool]) -> None:
    """Deletes killed writers' hidden files in those direct subfolders of a local folder whose names are `abandoned` (no
    process writes there), and subfolders then empty; in a bucket nothing. Raises NotFound without the folder."""
    if is_remote(folder):
        return
    with local_errors(folder):
        for name in filter(abandoned, os.listdir(folder)):
            inside = os.path.join(folder, name)
            for partial in filter(_is_partial, os.listdir(inside)):
                delete(os.path.join(inside, partial))
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(inside)


def _write_summed(descriptor: int, view: memoryview) -> int:
    """Writes all bytes to a file and returns their crc32c, which another thread computes meanwhile. Advises the
    kernel after each piece to begin to write it to a local disk, so that the final fsync has little to do."""
    done = 0
    with ThreadPoolExecutor(1, thread_name_prefix="crc32c") as pool:
        crc = pool.submit(crc32c, view)
        while done < len(view):
            count = os.write(descriptor, view[done : done + _WRITTEN])
            if sys.platform == "linux":  # macOS has no such call
                os.posix_fadvise(descriptor, done, count, os.POSIX_FADV_DONTNEED)
            done += count
        return crc.result()


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(_PARTIAL)


@contextlib.contextmanager
def _replacing(url: str, create_only: bool) -> Iterator[int]:
    """Creates the folder, and yields the descriptor of a hidden file, which is synced and moved to `url` at the block's
    end, deleted if it raises. With `create_only`, raises AlreadyExists for an existing file, StorageError where there
    are no hard links. OSErrors pass."""
    folder, name = os.path.split(os.path.abspath(url))
    os.makedirs(folder, exist_ok=True)
    if create_only and os.path.lexists(url):
        raise AlreadyExists(f"{url} already exists")
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(6)}{_PARTIAL}")
    try:
        with open(partial, "xb", buffering=0) as file:
            yield file.fileno()
            os.fsync(file.fileno())
        if create_only:
            _link(partial, url)
        else:
            os.replace(partial, url)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was moved
            os.unlink(partial)
    parent = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _link(partial: str, url: str) -> None:
    """Gives a file the name `url` too. Raises AlreadyExists, StorageError where there are no hard links, or OSError."""
    try:
        os.link(partial, url)
    except FileExistsError:
        raise AlreadyExists(f"{url} already exists") from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise StorageError(
            f"{url}: this file system has no hard links ({error.strerror}), and without them two writers could both "
            "win: write to gs:// itself instead of a mounted bucket, or to another file system"
        ) from None
