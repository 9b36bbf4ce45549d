"""A simulated Cloud Storage bucket that can fail: training.storage's protocol for simulated hosts.

Objects are whole or absent, listings are consistent, and a create-only write has exactly one winner. Each operation
takes effect at one moment between its call and its answer. The world decides how long both take and whether the
operation fails: before it took effect, after it did (the answer is lost for good), or when the caller is dead by then
(a request that was sent is carried out all the same).
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from tests.simulation.scheduler import Killed, Scheduler
from training.storage import AlreadyExists, Changed, NotFound, Stat, StorageError, name_of

READ, WRITE, DELETE, LIST = "read", "write", "delete", "list"
Effect = Callable[[bool], Any]  # what an operation does to the bucket, with a wrong byte or without, and returns


@dataclass
class Stored:
    data: bytes
    generation: int
    writer: str  # the process
    crc32c: int


@dataclass(frozen=True)
class Request:
    host: str
    kind: str
    url: str
    name: str
    size: int = 0


@dataclass(frozen=True)
class Treatment:
    """The outcome of a request: seconds until it takes effect, seconds until its answer, and whether it fails."""

    before: float
    after: float
    fails: str = ""  # "", "before" or "after" it took effect
    flips: bool = False  # storage stores a wrong byte, or a read returns one


@dataclass
class Bucket:
    """All objects of a bucket; reports every change."""

    scheduler: Scheduler
    randomness: random.Random
    treat: Callable[[Request], Treatment]
    changed: Callable[[str, Stored | None, Stored | None, str], None]  # url, before, after, writer
    refused: Callable[[str, str], None]  # url, writer: of a create-only write of an object that exists
    objects: dict[str, Stored] = field(default_factory=dict)
    generations: int = 0

    def put(self, url: str, data: bytes, writer: str) -> Stored:
        self.generations += 1
        before = self.objects.get(url)
        stored = self.objects[url] = Stored(data, self.generations, writer, int(google_crc32c.value(data)))
        self.changed(url, before, stored, writer)
        return stored

    def remove(self, url: str, by: str) -> None:
        before = self.objects.pop(url, None)
        if before is not None:
            self.changed(url, before, None, by)


class HostStorage:
    """The storage of one process."""

    def __init__(self, bucket: Bucket, host: str) -> None:
        self._bucket, self._host = bucket, host

    def stat(self, url: str) -> Stat | None:
        return self._call(READ, url, lambda _: self._stat(url))

    def listing(self, folder: str) -> list[Stat]:
        prefix = folder.rstrip("/") + "/"
        objects = self._bucket.objects
        return self._call(
            LIST, folder, lambda _: [self._stat(url) for url in sorted(objects) if url.startswith(prefix)]
        )

    def read(self, url: str, start: int = 0, end: int | None = None, *, generation: int | None = None) -> bytes:
        def effect(flips: bool) -> bytes:
            if url not in self._bucket.objects:
                raise NotFound(f"{url} does not exist")
            stored = self._bucket.objects[url]
            if generation is not None and stored.generation != generation:
                raise Changed(f"{url} was replaced while it was in use: start again")
            data = stored.data[start:end]
            return _flip_last_bit(data) if flips else data

        return self._call(READ, url, effect)

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False) -> Stat:
        content = bytes(data)  # a copy: the caller may reuse its memory afterwards

        def effect(flips: bool) -> Stat:
            if create_only and url in self._bucket.objects:
                self._bucket.refused(url, self._host)
                raise AlreadyExists(f"{url} already exists")
            self._bucket.put(url, _flip_last_bit(content) if flips else content, self._host)
            return self._stat(url)

        return self._call(WRITE, url, effect, len(content))

    def delete(self, url: str) -> None:
        self._call(DELETE, url, lambda _: self._bucket.remove(url, self._host))

    def remove_partial_files(self, folder: str, abandoned: Callable[[str], bool]) -> None:
        pass

    def append(self, path: str, data: bytes) -> None:
        raise AssertionError(path)

    def _stat(self, url: str) -> Stat | None:
        stored = self._bucket.objects.get(url)
        return None if stored is None else Stat(url, len(stored.data), stored.generation, stored.crc32c)

    def _call(self, kind: str, url: str, effect: Effect, size: int = 0) -> Any:
        """Carries out an operation with the delays and failures that the world decides."""
        scheduler = self._bucket.scheduler
        scheduler.check_alive()
        treatment = self._bucket.treat(Request(self._host, kind, url, name_of(url), size))
        failure = StorageError(f"{url}: {kind} failed for {treatment.before + treatment.after:.0f} s; last: 503")
        if treatment.fails == "before":
            scheduler.sleep(treatment.before + treatment.after)
            scheduler.note(f"{kind} {url}: fails, and nothing was done")
            raise failure
        result: list[Any] = []
        try:
            scheduler.sleep(treatment.before)
        except Killed:
            # The request is on its way: it may take effect after its process has ended.
            if kind in (WRITE, DELETE) and self._bucket.randomness.random() < 0.5:
                when = scheduler.now + treatment.after * self._bucket.randomness.random() * 2
                scheduler.call_at(when, lambda: _ignore_errors(effect, treatment.flips))
            raise
        try:
            result.append(effect(treatment.flips))
        finally:
            if scheduler.trace is not None and kind != READ:
                scheduler.note(f"{kind} {url}{' (' + str(len(result[0])) + ' objects)' if kind == LIST else ''}")
            scheduler.sleep(treatment.after)
        if treatment.fails == "after":
            scheduler.note(f"{kind} {url}: was done, and the answer is lost")
            raise failure
        return result[0]


def _flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _ignore_errors(effect: Effect, flips: bool) -> None:
    with contextlib.suppress(StorageError):
        effect(flips)
