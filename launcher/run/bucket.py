"""A run's folder in its bucket: what any machine needs in order to go on with the run.

`<output>/<run id>/launcher/`
    run.json, specification.yaml, config.yaml    as in the run's folder on a machine
    overlays/overlay-<sha256>.tar.gz
    events/00000001.json      an event; numbered without a gap, created once and never changed
    requests/                 the record of requests for the slice (launcher.tpu_vm.requests)
    lease.json                the supervisor's name; replaced only by generation

Only one of several writers can create the event with a number: a supervisor that has lost its lease finds the first
event of its successor there, and records nothing more. No value of a secret is in the bucket.

The lease says which process, on any machine, supervises the run. Only one of several processes can replace it, and its
holder renews it every few seconds. It has expired when its age, measured only by the bucket's clock, is over
`LEASE_SECONDS`. The new holder then records `Supervised`, with an event's number that can be used only once, so the
bucket refuses the previous holder's next event. A holder that finds that it has lost the lease exits at once, as if it
were killed: the hosts keep running, and the new holder continues from the ledger. While the lease can't be renewed, its
holder decides nothing (`Ledger.confirm`).

All functions raise StorageError while the bucket does not answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import write_private
from launcher.workstation import Workstation
from training import storage
from training.machine import Clock, Event, Threads

FOLDER = "launcher"
LEASE_SECONDS = 30.0  # after which a lease that is not renewed has expired
RENEW_SECONDS = 5.0
_RECORD = "run.json"
_REPLACED = ("config.yaml", "specification.yaml")  # `run` may resume a run with other values
_OVERLAYS = "overlays"
_AT_ONCE = 16


@dataclass(frozen=True)
class LeaseState:
    """The lease of a run, as its bucket has it."""

    holder: str  # the supervisor's name; empty after it has released the lease
    generation: int
    age: float | None  # seconds since its renewal, by the bucket's clock; None if the bucket's answers have no time

    @property
    def is_live(self) -> bool:
        """Returns whether a supervisor has the lease and it has not expired; one of unknown age counts as live."""
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
        """Creates event `number` in the bucket. Returns `text`, or the text of an event that had the number before."""
        url = self._event(number)
        try:
            storage.write(url, text.encode(), create_only=True)
        except storage.AlreadyExists:
            return storage.read(url).decode()
        return text

    def read_event(self, number: int) -> str | None:
        """Returns the text of the event of a number; None if there is none yet."""
        url = self._event(number)
        return None if storage.stat(url) is None else storage.read(url).decode()

    def read_events(self, first: int, threads: Threads) -> list[str]:
        """Returns the texts of all events from the number `first` on, in order. Reads them in parallel."""
        urls = [found.url for found in storage.listing(storage.join(self.url, "events"))]
        texts = threads.map(storage.read, [url for url in urls if url >= self._event(first)], at_once=_AT_ONCE)
        return [text.decode() for text in texts]

    def _event(self, number: int) -> str:
        """Returns the URL of the event with a number, which may not exist."""
        return storage.join(self.url, "events", f"{number:08d}.json")

    def judge_lease(self, clock: Clock, seen: int = 0) -> LeaseState | None:
        """Returns the run's lease; None before the first, or if its generation is `seen`. If it looks live and the
        bucket tells no time, waits 30 s and reads again; if not renewed by then, its age says that it has expired.
        Raises as `read_lease`."""
        lease = self.read_lease(seen)
        if lease is None or lease.age is not None or not lease.is_live:
            return lease
        clock.sleep(LEASE_SECONDS)
        later = self.read_lease()
        return replace(lease, age=LEASE_SECONDS) if later == lease else later

    def read_lease(self, seen: int = 0) -> LeaseState | None:
        """Returns the run's lease; None before the first, and if its generation is `seen`. Does not wait: a lease
        without an age counts as live. Raises StorageError, for a damaged lease too."""
        url = storage.join(self.url, "lease.json")
        while (found := storage.stat(url)) is not None and found.generation != seen:
            with contextlib.suppress(storage.Changed):
                data = storage.read(url, generation=found.generation)
                try:
                    return LeaseState(json.loads(data)["holder"], found.generation, found.age)
                except (ValueError, KeyError, TypeError):
                    raise storage.StorageError(f"{url} is damaged: delete it") from None
        return None

    def write_lease(self, holder: str, replaces: int) -> int:
        """Writes the lease for `holder` ("": releases it) and returns its generation. Raises AlreadyExists unless the
        lease still has the generation `replaces` (0: there is none yet)."""
        content = json.dumps({"holder": holder}).encode()
        return storage.write(storage.join(self.url, "lease.json"), content, replaces=replaces).generation

    def upload(self, folder: Path) -> None:
        """Copies config.yaml and specification.yaml of a run's folder to the bucket, then overlays and last run.json if
        they are missing there, as these never change. Copies no events. Raises StorageError, and OSError for a file
        here."""
        for name in _REPLACED:
            storage.write(storage.join(self.url, name), (folder / name).read_bytes())
        overlays = [(path, storage.join(self.url, _OVERLAYS, path.name)) for path in folder.glob("overlay-*.tar.gz")]
        for path, url in (*overlays, (folder / _RECORD, storage.join(self.url, _RECORD))):
            if storage.stat(url) is None:
                storage.write(url, path.read_bytes())

    def download(self, folder: Path, *, overlays: bool) -> None:
        """Copies config.yaml, specification.yaml and last run.json from the bucket over those in a folder of this
        machine, with `overlays` also overlays that it lacks; no events. Raises, before it writes, BadInput if this is
        a copy of the run's folder, NotFound if there is no run; another StorageError if the bucket does not answer,
        OSError for a file here."""
        record = storage.read(storage.join(self.url, _RECORD))
        with contextlib.suppress(ValueError, AttributeError):  # damaged: `Ledger.record` says so
            if (own := json.loads(record).get("bucket")) != self.url:
                raise BadInput(f"{self.url.removesuffix(f'/{FOLDER}')} was copied: the run's folder is {own}")
        for found in storage.listing(storage.join(self.url, _OVERLAYS)) if overlays else ():
            path = folder / storage.name_of(found.url)
            if not path.exists():
                write_private(path, storage.read(found.url))
        for name in _REPLACED:
            write_private(folder / name, storage.read(storage.join(self.url, name)))
        write_private(folder / _RECORD, record)


class Lease:
    """This process's lease of one run. `keep` runs in a thread of its own."""

    def __init__(
        self, bucket: RunBucket, run_id: str, holder: str, machine: Workstation, say: Callable[[str], None]
    ) -> None:
        """Takes nothing yet. `holder` is the name of this machine's folder of the run in the run's leases."""
        self._bucket, self._run_id, self._holder, self._machine, self._say = bucket, run_id, holder, machine, say
        self._lock = machine.threads.lock()
        self._generation = 0
        self._renewed = (0.0, 0.0)  # monotonic clock, which may stand still while a laptop sleeps, and Unix seconds
        self._said = set[bool]()  # whether of the problems that were said one was a LaunchError, and one was not
        self.supervisions = 0  # how many Supervised events there are while this process holds the lease

    def take(self, found: LeaseState | None) -> None:
        """Writes the lease if `found`, as it was last read, is None, not live or of the same holder. Raises LaunchError
        (Exit.CONFLICT) that names the supervisor that has it, or has taken it since; StorageError."""
        try:
            if found is None or not found.is_live or found.holder == self._holder:
                self._renewed = self._now()
                self._generation = self._bucket.write_lease(self._holder, found.generation if found else 0)
                return
        except storage.AlreadyExists:
            found = self._bucket.read_lease()
        raise LaunchError(
            f"run {self._run_id} is supervised by {found.holder if found is not None else 'another process'}: "
            "`tpu-launch logs -f` follows it, `tpu-launch stop` stops it",
            exit_code=Exit.CONFLICT,
        )

    def keep(self, over: Event, pull: Callable[[], None]) -> None:
        """Until `over`, renews the lease and calls `pull`, which fetches events such as a stop, every 5 s. Says a
        failure once and tries again, without end. Ends the process only if another one has the lease, or it is gone."""
        while not over.wait(RENEW_SECONDS):
            try:
                self._renew()
                pull()
                self._said.clear()
            except (storage.StorageError, LaunchError) as error:
                self._say_once(error)

    def confirm(self) -> None:
        """Waits, without a limit, until the lease was renewed less than 15 s ago; renews it if need be. Ends the
        process if another one has the lease, or it was deleted."""
        while not self.is_fresh():
            try:
                self._renew()
            except storage.StorageError as error:
                self._say_once(error)
                self._machine.clock.sleep(RENEW_SECONDS)

    def release(self) -> None:
        """Lets another process take the lease at once. Does nothing if that fails: the lease expires."""
        with self._lock, contextlib.suppress(storage.StorageError):
            self._bucket.write_lease("", self._generation)

    def is_fresh(self) -> bool:
        """Returns whether the lease was renewed less than 15 s ago, by the monotonic and the wall clock."""
        (monotonic, time), now = self._renewed, self._now()  # first the renewal, which another thread replaces
        return max(now[0] - monotonic, abs(now[1] - time)) < LEASE_SECONDS / 2

    def end(self, supervisor: str) -> NoReturn:
        """Says that `supervisor` supervises the run now; ends the process at once, without cleanup (Exit.CONFLICT)."""
        self._say(
            f"run {self._run_id} is supervised by {supervisor} now, so this tpu-launch exits; "
            f"`tpu-launch logs -f --run {self._run_id}` follows the run"
        )
        self._machine.exit(int(Exit.CONFLICT))

    def _now(self) -> tuple[float, float]:
        """Returns the monotonic clock, and the Unix time, in seconds."""
        return self._machine.clock.monotonic(), self._machine.clock.time()

    def _renew(self) -> None:
        """Renews the lease. Raises StorageError; ends the process if another one has the lease, or it was deleted."""
        with self._lock:
            while True:
                before = self._now()
                try:
                    self._generation = self._bucket.write_lease(self._holder, self._generation)
                    break
                except storage.AlreadyExists:
                    found = self._bucket.read_lease()
                    if found is None or found.holder != self._holder:
                        self.end(found.holder if found is not None and found.holder else "another process")
                    self._generation = found.generation  # of a renewal of this process, whose answer was lost
            self._renewed = before

    def _say_once(self, error: storage.StorageError | LaunchError) -> None:
        """Says once, until `keep` succeeds, that the lease can't be renewed (LaunchError: events can't be pulled)."""
        if (is_of_pull := isinstance(error, LaunchError)) not in self._said:
            self._said.add(is_of_pull)
            waiting = f"run {self._run_id}: its lease can't be renewed; decisions wait until it is: {error}; "
            bill = "what runs on hosts goes on, and is billed until `tpu-launch down`"
            self._say(str(error) if is_of_pull else waiting + bill)
