"""Cloud Storage without HTTP: buckets and objects on disk, with generations.

Each bucket is a folder `<folder>/<bucket>/`: `bucket.json`; `objects/<generation>.json`, an object's metadata;
`data/<generation>`, its bytes.

What can fail half-way: data is written under a temporary name and renamed, then the metadata likewise; the rename of
the metadata is the commit. A server that is killed before the commit leaves data without metadata, which the next start
removes. The metadata of a replaced object is removed after the new one is written; at the next start the newest
generation of a name wins. Renames are not synced: objects survive a crash of the server, not of the machine.

The generation is compared and the change is made under one lock for each bucket, so exactly one of several writers with
ifGenerationMatch=0 succeeds.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from launcher.home import write_private

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")
# Fields of an object that a client may set.
_SETTABLE = frozenset((
    "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "customTime",
    "metadata", "storageClass",
))  # fmt: skip
_BLOCK = 1 << 20


class StorageApiError(Exception):
    """An error of the service: HTTP status, reason and message, in Google's words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class StoredObject:
    """One generation of an object. Checksums are base64 of big-endian bytes, as the API shows them."""

    name: str
    generation: int
    size: int
    crc32c: str
    md5: str
    created: float
    settings: Mapping[str, Any] = field(default_factory=dict)


def require_generation(expected: int | None, current: StoredObject | None) -> None:
    """Raises StorageApiError 412 unless the object has the expected generation (0: it does not exist; None: any)."""
    if expected not in (None, current.generation if current else 0):
        raise StorageApiError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


def _checksums(path: Path) -> tuple[int, str, str]:
    """Returns the size of a file, its CRC32C and its MD5 (base64, as the API writes them)."""
    size, crc, md5 = 0, google_crc32c.Checksum(), hashlib.md5()
    with open(path, "rb") as file:
        while data := file.read(_BLOCK):
            size += len(data)
            crc.update(data)
            md5.update(data)
    return size, base64.b64encode(crc.digest()).decode(), base64.b64encode(md5.digest()).decode()


class Bucket:
    """One bucket; every method is atomic."""

    def __init__(self, folder: Path) -> None:
        """Reads the bucket that `Buckets.create` made in a folder, and deletes what a killed server left (`_load`)."""
        self.folder = folder
        self.name = folder.name
        self._lock = threading.RLock()
        self._objects: dict[str, StoredObject] = {}
        self._last = 0
        for part in ("objects", "data", "incoming", "uploads"):
            (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings: dict[str, Any] = json.loads((folder / "bucket.json").read_text())
        self._load()

    def _load(self) -> None:
        """Reads the newest generation of each object; deletes older ones, and bytes that were never committed, but
        keeps those of resumable uploads."""
        shutil.rmtree(self.folder / "incoming")
        (self.folder / "incoming").mkdir(mode=0o700)
        for path in (self.folder / "objects").glob("*.json"):
            stored = StoredObject(**json.loads(path.read_text()))
            known = self._objects.get(stored.name)
            if known is None or known.generation < stored.generation:
                self._objects[stored.name] = stored
        live = {str(stored.generation) for stored in self._objects.values()}
        for folder in ("objects", "data"):
            for path in (self.folder / folder).iterdir():
                if path.name.removesuffix(".json") not in live:
                    path.unlink()
        self._last = max(map(int, live), default=0)

    def get(self, name: str, generation: int | None = None) -> StoredObject:
        """Returns the object. Raises StorageApiError 404 when there is none, or when that generation was replaced."""
        stored = self.find(name)
        if stored is None or (generation is not None and generation != stored.generation):
            version = f"#{generation}" if generation is not None and stored else ""
            raise StorageApiError(404, "notFound", f"No such object: {self.name}/{name}{version}")
        return stored

    def find(self, name: str) -> StoredObject | None:
        """Returns the object; None if there is none."""
        return self._objects.get(name)

    def open(self, name: str, generation: int | None, expected: int | None) -> tuple[StoredObject, BinaryIO]:
        """Returns the object and an open file of its bytes, which the caller closes; it stays readable when the object
        is replaced. Raises StorageApiError 404, also for another `generation`, 412 unless `expected`. None: any."""
        with self._lock:
            stored = self.get(name, generation)
            require_generation(expected, stored)
            return stored, open(self._data(stored.generation), "rb")

    @contextlib.contextmanager
    def incoming(self) -> Iterator[BinaryIO]:
        """Opens an empty temporary file for the bytes of a new object, and deletes one that was not committed."""
        path = self.folder / "incoming" / os.urandom(8).hex()
        try:
            with open(path, "wb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def commit(
        self,
        name: str,
        file: BinaryIO,
        settings: Mapping[str, Any],
        expected: int | None,
        crc32c: str | None = None,
        md5: str | None = None,
    ) -> StoredObject:
        """Flushes (without fsync) an open file of this bucket's folder and moves it to the object's newest generation,
        all or nothing; deletes the one before. Drops unknown settings. Raises StorageApiError 400 for a bad name and
        for bytes that do not have the given checksums (base64), 412 unless the object has the `expected` generation
        (0: none; None: any), OSError from a full disk; the file stays then."""
        if not 1 <= len(name.encode()) <= 1024 or "\n" in name or "\r" in name:
            raise StorageApiError(400, "invalid", f"Invalid object name: {name[:80]!r}")
        file.flush()
        size, actual_crc32c, actual_md5 = _checksums(Path(file.name))
        for kind, sent, actual in (("CRC32C", crc32c, actual_crc32c), ("MD5 hash", md5, actual_md5)):
            if sent and sent != actual:
                message = f'Provided {kind} "{sent}" doesn\'t match calculated {kind} "{actual}".'
                raise StorageApiError(400, "invalid", message)
        with self._lock:
            current = self._objects.get(name)
            require_generation(expected, current)
            now = time.time()
            self._last = generation = max(self._last + 1, int(now * 1e6))
            kept = {key: value for key, value in settings.items() if key in _SETTABLE and value is not None}
            new = StoredObject(name, generation, size, actual_crc32c, actual_md5, now, kept)
            os.rename(file.name, self._data(generation))
            try:
                write_private(self.folder / "objects" / f"{generation}.json", json.dumps(asdict(new)))
            except OSError:  # a full disk: the caller keeps the bytes of an upload, or deletes them
                os.rename(self._data(generation), file.name)
                raise
            self._objects[name] = new
            if current is not None:
                self._forget(current)
            return new

    def delete(self, name: str, generation: int | None, expected: int | None) -> None:
        """Removes the object. Raises StorageApiError 404, also for another `generation`, or 412, as `open`."""
        with self._lock:
            current = self.get(name, generation)
            require_generation(expected, current)
            self._forget(current)
            del self._objects[name]

    def listing(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[list[StoredObject], list[str], str]:
        """Returns the objects with a prefix, the common prefixes of names that have `delimiter` ("": none) after it, at
        most `limit` of both together, sorted, and the token of the next page ("": this is the last). `after`: the token
        of the page before; "" for the first."""
        entries: dict[str, StoredObject | None] = {}  # None: a common prefix
        with self._lock:
            for name in sorted(name for name in self._objects if name.startswith(prefix)):
                end = name.find(delimiter, len(prefix)) if delimiter else -1
                common = name[: end + len(delimiter)] if end >= 0 else None
                entries.setdefault(common or name, None if common else self._objects[name])
        rest = [entry for entry in entries if entry > after]
        page = {entry: entries[entry] for entry in rest[:limit]}
        items = [stored for stored in page.values() if stored is not None]
        prefixes = [entry for entry, stored in page.items() if stored is None]
        return items, prefixes, rest[limit - 1] if len(rest) > limit else ""

    def _data(self, generation: int) -> Path:
        return self.folder / "data" / str(generation)

    def _forget(self, old: StoredObject) -> None:
        """Deletes an object's files; its entry in memory stays."""
        for path in (self.folder / "objects" / f"{old.generation}.json", self._data(old.generation)):
            path.unlink(missing_ok=True)


class Buckets:
    """All buckets of an emulator."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._buckets = {path.name: Bucket(path) for path in folder.iterdir() if (path / "bucket.json").is_file()}

    def get(self, name: str) -> Bucket:
        """Returns the bucket. Raises StorageApiError 404."""
        if name not in self._buckets:
            raise StorageApiError(404, "notFound", "The specified bucket does not exist.")
        return self._buckets[name]

    def create(self, name: str, settings: Mapping[str, Any]) -> Bucket:
        """Creates a bucket, with all `settings`. Raises StorageApiError 400 for a bad name, 409 for a taken one."""
        if not _NAME.match(name) or len(name) > (222 if "." in name else 63) or ".." in name or name.startswith("goog"):
            raise StorageApiError(400, "invalid", f"Invalid bucket name: '{name}'")
        with self._lock:
            if name in self._buckets:
                message = "Your previous request to create the named bucket succeeded and you already own it."
                raise StorageApiError(409, "conflict", message)
            folder = self._folder / name
            write_private(folder / "bucket.json", json.dumps({**settings, "name": name, "timeCreated": time.time()}))
            self._buckets[name] = Bucket(folder)
            return self._buckets[name]

    def ensure(self, name: str) -> None:
        """Creates the bucket unless it exists. Raises ValueError when its name is bad."""
        try:
            self.create(name, {})
        except StorageApiError as error:
            if error.status != 409:
                raise ValueError(str(error)) from None

    def all(self) -> list[Bucket]:
        """Returns the buckets, sorted by name."""
        with self._lock:
            return [self._buckets[name] for name in sorted(self._buckets)]

    def summary(self) -> dict[str, dict[str, int]]:
        """Returns the number of "objects" and their "bytes" in each bucket, by name."""
        found = {bucket.name: bucket.listing("", "", "", sys.maxsize)[0] for bucket in self.all()}
        return {
            name: {"objects": len(items), "bytes": sum(item.size for item in items)} for name, items in found.items()
        }
