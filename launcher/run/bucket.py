"""A run's folder in its bucket: what any machine needs in order to go on with the run.

`<output>/<run id>/launcher/`
    run.json, specification.yaml, config.yaml    as in the run's folder on a machine
    overlays/overlay-<sha256>.tar.gz
    events/00000001.json      an event; numbered without a gap, created once and never changed
    requests/                 the record of requests for the slice (launcher.tpu_vm.requests)
    lease.json                the supervisor's name; replaced only by generation (launcher.run.lease)

Only one of several writers can create the event with a number: a supervisor that has lost its lease finds the first
event of its successor there, and records nothing more. No value of a secret is in the bucket.

All functions raise StorageError while the bucket does not answer.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.home import write_private_bytes
from training import storage
from training.machine import Clock, Threads

FOLDER = "launcher"
LEASE_SECONDS = 30.0
"""After which a lease that is not renewed has expired."""
_RECORD = "run.json"
_REPLACED = ("config.yaml", "specification.yaml")  # `run` may resume a run with other values
_OVERLAYS = "overlays"
_AT_ONCE = 16


@dataclass(frozen=True)
class LeaseState:
    """The lease of a run, as its bucket has it."""

    holder: str
    """The supervisor's name; empty after it has released the lease."""
    generation: int
    age: float | None
    """Seconds since its last renewal, by the bucket's clock; None if the bucket's answers have no time."""

    @property
    def is_live(self) -> bool:
        """Returns whether a supervisor has the lease and it has not expired, as far as its age is known."""
        return bool(self.holder) and (self.age is None or self.age < LEASE_SECONDS)


@dataclass(frozen=True)
class RunBucket:
    """The launcher's folder of one run in its bucket."""

    url: str

    @classmethod
    def of_run(cls, url: str) -> RunBucket:
        """Returns the RunBucket of the run with the URL `url` (gs://bucket/runs/ID). Asks the bucket nothing."""
        return cls(storage.join(url, FOLDER))

    @property
    def requests(self) -> str:
        """Returns the URL of the folder with the recorded requests to create the run's slice."""
        return storage.join(self.url, "requests")

    def has_run(self) -> bool:
        """Returns whether the bucket has the run's run.json, which `upload` writes last."""
        return storage.stat(storage.join(self.url, _RECORD)) is not None

    def put_event(self, number: int, text: str) -> str:
        """Creates event `number` with `text`. Returns `text`, or that of an event which had the number before."""
        url = self._event(number)
        try:
            storage.write(url, text.encode(), create_only=True)
        except storage.AlreadyExists:
            return storage.read(url).decode()
        return text

    def read_event(self, number: int) -> str | None:
        """Returns the event of a number; None if there is none yet."""
        url = self._event(number)
        return None if storage.stat(url) is None else storage.read(url).decode()

    def read_events(self, first: int, threads: Threads) -> list[str]:
        """Returns the events from the number `first` on, in order; reads them in parallel."""
        urls = [found.url for found in storage.listing(storage.join(self.url, "events"))]
        texts = threads.map(storage.read, [url for url in urls if url >= self._event(first)], at_once=_AT_ONCE)
        return [text.decode() for text in texts]

    def _event(self, number: int) -> str:
        """Returns the URL of the event with a number, which may not exist."""
        return storage.join(self.url, "events", f"{number:08d}.json")

    def judge_lease(self, clock: Clock, seen: int = 0) -> LeaseState | None:
        """Returns the run's lease; None before the first, or if its generation is `seen`. If the bucket tells no time,
        waits LEASE_SECONDS and reads again: a lease that was not renewed gets an age at which it has expired."""
        lease = self.read_lease(seen)
        if lease is None or lease.age is not None or not lease.is_live:
            return lease
        clock.sleep(LEASE_SECONDS)
        later = self.read_lease()
        return replace(lease, age=LEASE_SECONDS) if later == lease else later

    def read_lease(self, seen: int = 0) -> LeaseState | None:
        """Returns the run's lease; None before the first, and if its generation is `seen`."""
        url = storage.join(self.url, "lease.json")
        while (found := storage.stat(url)) is not None and found.generation != seen:
            with contextlib.suppress(storage.Changed):
                holder = json.loads(storage.read(url, generation=found.generation))["holder"]
                return LeaseState(holder, found.generation, found.age)
        return None

    def write_lease(self, holder: str, replaces: int) -> int:
        """Writes the lease, returns its generation. Raises AlreadyExists unless the last was `replaces` (0: none)."""
        content = json.dumps({"holder": holder}).encode()
        return storage.write(storage.join(self.url, "lease.json"), content, replaces=replaces).generation

    def upload(self, folder: Path) -> None:
        """Copies config.yaml and specification.yaml of a run's folder to the bucket, then overlays and last run.json if
        they are missing there, as these never change. Copies no events. Raises StorageError."""
        for name in _REPLACED:
            storage.write(storage.join(self.url, name), (folder / name).read_bytes())
        overlays = [(path, storage.join(self.url, _OVERLAYS, path.name)) for path in folder.glob("overlay-*.tar.gz")]
        for path, url in (*overlays, (folder / _RECORD, storage.join(self.url, _RECORD))):
            if storage.stat(url) is None:
                storage.write(url, path.read_bytes())

    def download(self, folder: Path, *, overlays: bool) -> None:
        """Copies config.yaml, specification.yaml and last run.json into a folder of this machine, with `overlays` also
        overlays; no events. Raises NotFound if there is no run, another StorageError if the bucket does not answer."""
        record = storage.read(storage.join(self.url, _RECORD))
        for found in storage.listing(storage.join(self.url, _OVERLAYS)) if overlays else ():
            path = folder / storage.name_of(found.url)
            if not path.exists():
                write_private_bytes(path, storage.read(found.url))
        for name in _REPLACED:
            write_private_bytes(folder / name, storage.read(storage.join(self.url, name)))
        write_private_bytes(folder / _RECORD, record)
