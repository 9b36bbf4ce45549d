"""The lease of a run whose ledger is in a bucket: it says which process, on any machine, supervises the run.

`lease.json` is replaced by generation, so only one of several processes gets it, and renewed every few seconds. It has
expired when its age, measured only by the bucket's clock, is over `LEASE_SECONDS`. The new holder then records
`Supervised`. An event's number can be used only once, so the bucket refuses the previous holder's next event.

A holder that finds that it has lost the lease exits at once, as if it were killed: the hosts keep running, and the new
holder continues from the ledger. While the lease can't be renewed, it decides nothing (`Ledger.confirm`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

from launcher.errors import Exit, LaunchError
from launcher.home import write_private
from launcher.run import specification
from launcher.run.bucket import LEASE_SECONDS, LeaseState, RunBucket
from launcher.run.events import Supervised
from launcher.run.ledger import Ledger
from launcher.tpu_vm.requests import RequestRecord
from launcher.workstation import Workstation
from training import storage
from training.machine import Event

RENEW_SECONDS = 5.0
_JOIN_SECONDS = 10.0  # for a renewal that is under way

Say = Callable[[str], None]


@contextlib.contextmanager
def supervising(ledger: Ledger, machine: Workstation, say: Say) -> Iterator[None]:
    """Holds the run's lock and, if it has a bucket, its lease, which a thread renews; copies the run's files there.
    Ends this process when another one has taken the lease. Raises LaunchError if the bucket does not answer, or
    (Exit.CONFLICT) if a process of any machine supervises the run."""
    with ledger.supervising():
        if ledger.bucket is None:
            yield
            return
        lease = Lease(ledger, ledger.bucket, machine, say)
        lease.take()
        over = machine.threads.event()
        thread = machine.threads.start(lease.keep, over)
        try:
            lease.share()  # for longer than the lease lasts, on a slow line
            yield
        finally:
            over.set()
            thread.join(_JOIN_SECONDS)
            ledger.lease = None
            if not thread.is_alive():
                lease.release()


class Lease:
    """A process's lease of one run. `keep` runs in a thread of its own."""

    def __init__(self, ledger: Ledger, bucket: RunBucket, machine: Workstation, say: Say) -> None:
        self._ledger, self._bucket, self._machine, self._say = ledger, bucket, machine, say
        self._holder = ledger.holder or self._new_name()
        self._lock = machine.threads.lock()
        self._generation = self.supervisions = 0
        self._renewed = (0.0, 0.0)  # monotonic clock, which may stand still while a laptop sleeps, and Unix seconds
        self._said = set[bool]()  # whether of the problems that were said one was a LaunchError, and one was not

    def _new_name(self) -> str:
        """Writes and returns a new holder name in the run's folder; later processes with the folder's lock reuse it."""
        name = f"{os.uname().nodename}:{self._machine.random.randrange(1 << 32):08x}"
        write_private(self._ledger.folder / "holder", name)
        return name

    def take(self) -> None:
        """Takes the lease and records Supervised. Raises LaunchError: Exit.CONFLICT if another machine has the lease,
        or the bucket does not answer."""
        ledger = self._ledger
        try:
            # First the lease, then the events: a Supervised that follows is that of a process with a newer lease.
            found = self._bucket.judge_lease(self._machine.clock)
            ledger.pull(self._machine.threads)
            self.supervisions = ledger.state.supervisions
            if found is not None and found.is_live and found.holder != self._holder:
                raise self._conflict(found)
            self._renewed = (self._machine.clock.monotonic(), self._machine.clock.time())
            try:
                self._generation = self._bucket.write_lease(self._holder, found.generation if found else 0)
            except storage.AlreadyExists:
                raise self._conflict(self._bucket.read_lease()) from None
        except storage.StorageError as error:
            raise LaunchError(f"run {ledger.run_id}: its lease can't be taken: {error}") from None
        ledger.lease = self
        ledger.append(Supervised(max(0, ledger.state.attempt), self._holder))
        self.supervisions += 1

    def share(self) -> None:
        """Copies the run's files and the requests for the slice's candidates to the bucket, for other machines. Says so
        if the requests can't be copied; raises LaunchError if the files can't."""
        self._ledger.publish()
        config = specification.read(self._ledger.folder).config()
        if config.slice.candidates:
            try:
                RequestRecord(config).share(self._bucket.requests)
            except (storage.StorageError, OSError) as error:
                self._say(f"requests for slice {config.slice.name} are recorded on this machine only: {error}")

    def keep(self, over: Event) -> None:
        """Renews the lease and pulls new events, such as a stop from another machine, every few seconds until `over` is
        set. Ends the process when another one has the lease."""
        while not over.wait(RENEW_SECONDS):
            try:
                self._renew()
                self._ledger.pull()
                self._said.clear()
            except (storage.StorageError, LaunchError) as error:
                self._say_once(error)

    def confirm(self) -> None:
        """Returns at once if the lease was renewed less than 15 s ago; else renews it, and waits until that succeeds.
        Ends the process if another one has the lease."""
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

    def _renew(self) -> None:
        """Renews the lease. Raises StorageError; ends the process if another one has the lease."""
        with self._lock:
            while True:
                before = (self._machine.clock.monotonic(), self._machine.clock.time())
                try:
                    self._generation = self._bucket.write_lease(self._holder, self._generation)
                    break
                except storage.AlreadyExists:
                    found = self._bucket.read_lease()
                    if found is None or found.holder != self._holder:
                        self.end(found.holder if found is not None and found.holder else "another process")
                    self._generation = found.generation  # of a renewal of this process, whose answer was lost
            self._renewed = before

    def is_fresh(self) -> bool:
        """Returns whether the lease was renewed less than 15 s ago, by the monotonic and the wall clock."""
        clock, (monotonic, time) = self._machine.clock, self._renewed
        return max(clock.monotonic() - monotonic, abs(clock.time() - time)) < LEASE_SECONDS / 2

    def end(self, supervisor: str) -> NoReturn:
        """Says that `supervisor` supervises the run now, and ends the process (Exit.CONFLICT)."""
        self._say(
            f"run {self._ledger.run_id} is supervised by {supervisor} now, so this tpu-launch exits; "
            f"`tpu-launch logs -f --run {self._ledger.run_id}` follows the run"
        )
        self._machine.exit(int(Exit.CONFLICT))

    def _conflict(self, found: LeaseState | None) -> LaunchError:
        """Returns the error (Exit.CONFLICT) that names the supervisor that has the lease (`found`; None: unknown)."""
        return LaunchError(
            f"run {self._ledger.run_id} is supervised by {found.holder if found is not None else 'another process'}: "
            "`tpu-launch logs -f` follows it, `tpu-launch stop` stops it",
            exit_code=Exit.CONFLICT,
        )

    def _say_once(self, error: storage.StorageError | LaunchError) -> None:
        """Says once, until `keep` succeeds, that the lease can't be renewed (LaunchError: events can't be pulled)."""
        if (is_of_pull := isinstance(error, LaunchError)) not in self._said:
            self._said.add(is_of_pull)
            waiting = f"run {self._ledger.run_id}: its lease can't be renewed; decisions wait until it is: {error}; "
            bill = "what runs on hosts goes on, and is billed until `tpu-launch down`"
            self._say(str(error) if is_of_pull else waiting + bill)
