"""Claims about the lease and the ledger of a run in its bucket, over the emulator's Cloud Storage with the real client:
of two machines, one decides, whatever is frozen, killed or late, and whatever their clocks say."""

import contextlib
import errno
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from email.utils import formatdate
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from launcher.emulator.http_server import HttpResponse
from launcher.errors import Exit, LaunchError
from launcher.home import write_whole
from launcher.run import bucket as run_bucket
from launcher.run.bucket import LEASE_SECONDS
from launcher.run.events import AttemptBegan, HostBack, Supervised
from launcher.run.ledger import Ledger
from launcher.run.session import Session, import_run, share, supervising, take_lease
from launcher.workstation import Workstation
from tests.launcher.run_files import new_run
from tests.nightly import others_at_night
from tests.servers import BucketServer
from tests.simulation.scheduler import Process, Scheduler, SimulatedClock, SimulatedThreads, Task
from training import storage
from training.storage import gcs

DECISIONS = 3
EPOCH = 1_800_000_000.0
LATE = [0.0] * 12 + [0.1, 1.0, 3.0, 12.0]  # seconds, before and after a request
FROZEN = 0.03  # probability that the process stands still then, as on a laptop that sleeps
FULL = 0.05  # probability that the disk is full when an event is written


pytestmark = pytest.mark.usefixtures("server")


class Machines:
    """Machines that share a bucket, in virtual time. Unless they are calm, a machine may stand still before and after
    each request, and its disk may be full."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, calm: bool = False) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(self.random)
        self.folder, self.calm = folder, calm
        self.run = f"gs://bucket/{seed}/runs/r"
        self.said: list[str] = []
        self.exits: list[str] = []
        clock = SimpleNamespace(time=lambda: EPOCH + self.scheduler.now)
        monkeypatch.setattr("launcher.emulator.bucket.time", clock)
        monkeypatch.setattr(
            "launcher.emulator.http_server._Connection.date_time_string",
            lambda _: formatdate(clock.time(), usegmt=True),
        )
        monkeypatch.setattr(run_bucket, "storage", self)
        monkeypatch.setattr("launcher.run.ledger.write_whole", self._write)
        new_run(folder / "a", "r", Machine(self, "a").workstation, bucket=f"{self.run}/launcher")

    def __getattr__(self, name: str) -> Any:
        """Returns a function of `storage`, before and after whose request anything may happen."""
        found = getattr(storage, name)
        if name not in ("read", "write", "stat", "listing", "upload"):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._wait()
            try:
                return found(*arguments, **options)
            finally:
                self._wait()

        return call

    def _wait(self) -> None:
        scheduler = self.scheduler
        if scheduler.current is not None and not self.calm:
            scheduler.sleep(self.random.choice(LATE))
            if self.random.random() < FROZEN:
                process = scheduler.current.process
                scheduler.call_at(scheduler.now + self.random.uniform(10, 100), lambda: scheduler.thaw(process))
                scheduler.freeze(process)

    def _write(self, file: FileIO, data: bytes) -> None:
        if not self.calm and self.random.random() < FULL:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(file, data)

    def recorded(self) -> list[dict[str, Any]]:
        """Returns the events in the bucket, whose numbers have no gap."""
        found = storage.listing(f"{self.run}/launcher/events")
        assert [storage.name_of(each.url) for each in found] == [f"{n + 1:08d}.json" for n in range(len(found))]
        return [json.loads(storage.read(each.url)) for each in found]


class Machine:
    """One of the machines, with a process. Machine `a` has begun the run."""

    def __init__(self, machines: Machines, name: str, wrong_clock: float = 0.0) -> None:
        self.machines, self.name, self.process = machines, name, Process(name)
        self.scheduler, self.said = machines.scheduler, machines.said
        self.workstation = Workstation(
            clock=SimulatedClock(self.scheduler, wall=EPOCH + wrong_clock),
            threads=SimulatedThreads(self.scheduler),
            random=random.Random(machines.random.random()),
            exit=self._exit,
            connect=lambda address: pytest.fail("no host is contacted"),
        )

    def _exit(self, code: int) -> NoReturn:
        assert code == Exit.CONFLICT
        self.machines.exits.append(self.name)
        self.scheduler.kill(self.process)
        raise AssertionError

    def ledger(self) -> Ledger:
        """Returns the run in the machine's folder, imported unless it is there."""
        home = self.machines.folder / self.name
        while not (home / "runs" / "r" / "run.json").exists():
            with contextlib.suppress(LaunchError):  # not in the bucket yet, or the disk is full
                return import_run(home, self.workstation, self.machines.run)
            self.scheduler.sleep(5)
        return Ledger(home / "runs" / "r", self.workstation.clock)

    def supervising(self, ledger: Ledger | None = None) -> AbstractContextManager[None]:
        return supervising(ledger or self.ledger(), self.workstation, self.said.append)

    def hold(self, act: Callable[[], object] = lambda: None) -> None:
        """Does something while it has the lease."""
        with self.supervising():
            act()

    def spawn(self, scene: Callable[[], object]) -> Task:
        return self.scheduler.spawn(scene, name=self.name, process=self.process)

    def play(self, scene: Callable[[], object]) -> None:
        """Runs a function in the machine's process until it ends; raises its error."""
        self.finish(self.spawn(scene))

    def finish(self, task: Task) -> None:
        self.scheduler.run(lambda: not task.is_alive(), seconds=1e6)
        if task.error is not None:
            raise task.error

    def decide(self) -> None:
        """Supervises the run until all decisions are made."""
        while True:
            ledger = self.ledger()
            with contextlib.suppress(LaunchError), self.supervising(ledger):
                while (number := ledger.state.attempt + 1) < DECISIONS:
                    ledger.confirm()
                    ledger.append(AttemptBegan(number))
                    self.workstation.clock.sleep(self.machines.random.random() * 10)
            if ledger.state.attempt + 1 == DECISIONS:
                return
            self.workstation.clock.sleep(15.0)


def check(machines: Machines) -> None:
    """Each decision was made once, by the supervisor of that time, and every copy agrees."""
    events = machines.recorded()
    assert [event["attempt"] for event in events if event["event"] == AttemptBegan.kind] == list(range(DECISIONS))
    holder = ""
    for event in events:
        if event["event"] == Supervised.kind:
            holder = event["by"]
        elif event["event"] == AttemptBegan.kind:
            assert event["by"] == holder, f"a decision of a machine without the lease: {events}"
    for path in machines.folder.glob("*/runs/r/events.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines == events[: len(lines)], f"{path} is not a copy"


def interleave(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Runs two supervisors, whose clocks are wrong by hours, whose disks are full at times, and whose processes are
    frozen, killed and started again. A command beside the first one pulls events into its folder; a third machine
    records events without the lease."""
    machines = Machines(seed, folder, monkeypatch)
    scheduler, rng = machines.scheduler, machines.random
    done: list[str] = []

    def live(name: str, wrong: float) -> None:
        while name not in done:
            machine = Machine(machines, name, wrong)
            task = machine.spawn(lambda: (machine.decide(), done.append(name)))  # noqa: B023
            if rng.random() < 0.3:
                scheduler.sleep(rng.random() * 60)
                if machine.process.alive:
                    scheduler.kill(machine.process)
            task.join()
            assert task.error is None, task.error
            scheduler.sleep(rng.random() * 20)

    def look_on(name: str, event: bool) -> None:
        scheduler.sleep(60)
        machine = Machine(machines, name)
        while len(done) < 2:
            scheduler.sleep(20 + rng.random() * 60)
            with contextlib.suppress(LaunchError, FileNotFoundError):
                ledger = machine.ledger()
                ledger.pull()
                if event:
                    ledger.append(HostBack(0, 1))

    for name in "ab":
        scheduler.spawn(live, name, rng.uniform(-9e3, 9e3), name=name)
    scheduler.spawn(look_on, "a", False, name="status beside a")
    scheduler.spawn(look_on, "c", True, name="stop elsewhere")
    try:
        scheduler.run(lambda: len(done) == 2 or bool(scheduler.crashed), seconds=20_000)
        for task in scheduler.crashed:
            raise AssertionError(f"{task} failed at {scheduler.now:.0f} s") from task.error
    finally:
        scheduler.close()
    return machines


@pytest.mark.parametrize("block", others_at_night(range(20), now=[0]))
def test_one_of_two_supervisors_makes_a_decision(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 interleavings, of which the fast tests run 50; each takes a quarter of a second of the processor."""
    lost = 0
    for seed in range(block * 50, block * 50 + 50):
        machines = interleave(seed, tmp_path / str(seed), monkeypatch)
        check(machines)
        lost += len(machines.exits)
    assert lost, "supervisors lose their leases"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    machines = Machines(0, tmp_path, monkeypatch, calm=True)
    yield machines
    machines.scheduler.close()


@pytest.fixture
def a(machines: Machines) -> Machine:
    return Machine(machines, "a")


@pytest.fixture
def b(machines: Machines) -> Machine:
    return Machine(machines, "b")


@pytest.mark.parametrize("waits", [0, LEASE_SECONDS], ids=["which tells time", "which tells none"])
def test_a_lease_ends_by_the_buckets_clock(machines: Machines, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bucket tells no time, a lease expires that its holder does not renew."""
    scheduler = machines.scheduler
    if waits:
        silent = type("Silent", (), {"date": property(lambda _: "", lambda *_: None)})
        monkeypatch.setattr(gcs, "_this_thread", silent())
    a, b = Machine(machines, "a", wrong_clock=7 * 3600), Machine(machines, "b", wrong_clock=-5 * 3600)
    taken: list[float] = []

    def renew_and_die() -> None:
        scheduler.sleep(100)
        scheduler.call_at(scheduler.now, lambda: scheduler.kill(a.process))
        scheduler.sleep(1)

    def wait() -> None:
        ledger, last = b.ledger(), scheduler.now
        while len(taken) < 2:
            with contextlib.suppress(LaunchError), b.supervising(ledger):
                taken.append(scheduler.now - last)
            scheduler.sleep(1)

    a.spawn(lambda: a.hold(renew_and_die))
    scheduler.run(lambda: scheduler.now > 5, seconds=10)
    b.play(lambda: scheduler.sleep(90 - waits))
    with pytest.raises(LaunchError, match=r"run r is supervised by \S+:\S+: `tpu-launch logs") as raised:
        b.play(b.hold)
    assert raised.value.exit_code == Exit.CONFLICT
    b.play(wait)
    assert scheduler.now > 100
    assert LEASE_SECONDS - 6 < taken[0] < LEASE_SECONDS + 12 + waits, "from its last renewal at most"
    assert taken[1] < taken[0] + 5, "one that was released does not need to expire"


def test_a_lease_is_taken_at_once_if_released_or_its_holder_in_this_folder_is_dead(a: Machine, b: Machine) -> None:
    a.play(lambda: a.hold(lambda: a.scheduler.kill(a.process)))
    for machine in Machine(a.machines, "a"), b:
        machine.play(lambda: machine.hold(lambda: a.scheduler.sleep(1)))  # noqa: B023
    assert a.scheduler.now < 5
    assert [event["event"] for event in a.machines.recorded()] == [Supervised.kind] * 3


@pytest.mark.parametrize("is_pulled", [True, False], ids=["another command has pulled", "nothing is known here"])
@pytest.mark.parametrize(
    "act", [lambda s: s.ledger.append(AttemptBegan(0)), lambda s: s.ledger.pull(), Session.check_stop]
)
def test_a_supervisor_ends_that_has_lost_its_lease(a: Machine, b: Machine, act: Any, is_pulled: bool) -> None:
    ledgers = [a.ledger()]

    def take(machine: Machine, ledger: Ledger) -> None:
        take_lease(ledger, ledger.bucket, machine.workstation, a.said.append)
        share(ledger, ledger.bucket, a.said.append)
        a.scheduler.sleep(LEASE_SECONDS + 2)

    a.play(lambda: take(a, ledgers[0]))
    b.play(lambda: take(b, b.ledger()))
    if is_pulled:
        Machine(a.machines, "a").play(lambda: a.ledger().pull())
    a.play(lambda: act(SimpleNamespace(ledger=ledgers[0])))
    assert a.machines.exits == ["a"]
    assert "run r is supervised by " in a.said[-1]
    assert [event["event"] for event in a.machines.recorded()] == [Supervised.kind] * 2


def test_a_supervisor_decides_nothing_while_its_bucket_refuses(a: Machine, server: BucketServer) -> None:
    server.fault = lambda request: HttpResponse(403) if 20 < a.scheduler.now % 300 < 200 else None
    recorded_at: list[float] = []

    def decide() -> None:
        ledger = a.ledger()
        with a.supervising(ledger):
            a.scheduler.sleep(25)
            ledger.note(HostBack(0, 0), a.said.append)
            assert a.scheduler.now < 35, "what only informs is not waited for"
            a.scheduler.call_at(100, lambda: recorded_at.append(a.ledger().state.attempt))
            ledger.append(AttemptBegan(0))
            recorded_at.append(a.scheduler.now)
            a.scheduler.sleep(200)

    a.play(decide)
    server.fault = lambda request: None
    assert recorded_at[0] == -1, "nothing is decided at 100 s"
    assert 200 <= recorded_at[1] < 210
    waits = "its lease can't be renewed; decisions wait until it is"
    assert sum(waits in text for text in a.said) == 2, "once each time"
    assert [event["event"] for event in a.machines.recorded()] == [Supervised.kind, AttemptBegan.kind]


def test_a_process_without_renewals_waits_and_without_lease_ends(a: Machine, server: BucketServer) -> None:
    server.fault = lambda request: HttpResponse(403) if a.scheduler.now < 10 or 20 < a.scheduler.now < 100 else None
    ledger = a.ledger()

    def wait() -> None:
        with pytest.raises(LaunchError, match="run r: its lease can't be taken: "):
            take_lease(ledger, ledger.bucket, a.workstation, a.said.append)
        a.scheduler.sleep(15)
        lease = take_lease(ledger, ledger.bucket, a.workstation, a.said.append)
        a.scheduler.sleep(30)
        lease.confirm()
        assert a.scheduler.now >= 100
        assert sum("lease can't be renewed" in text for text in a.said) == 1
        storage.delete(f"{ledger.bucket.url}/lease.json")
        a.scheduler.sleep(30)
        lease.confirm()

    a.play(wait)
    assert a.machines.exits == ["a"]
    assert "supervised by another process now" in a.said[-1]


def test_a_lost_answer_ends_no_lease(a: Machine, server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "timeouts", gcs.Timeouts(deadline=0.3, first_delay=0.01, longest_delay=0.1))
    renewed: list[int] = []

    def lose_answer(request: Any) -> HttpResponse | None:
        if request.method != "POST" or not 20 < a.scheduler.now < 40:
            return None
        renewed.append(server.serve_storage(request).status)
        return HttpResponse(503)

    server.fault = lose_answer
    a.play(lambda: a.hold(lambda: a.scheduler.sleep(60)))
    assert {200, 412} <= {*renewed}
    assert a.machines.exits == []
    assert any("lease can't be renewed" in text for text in a.said)


def test_a_lease_is_renewed_while_files_are_copied(a: Machine, b: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def upload(ledger: Ledger) -> NoReturn:
        a.scheduler.sleep(10 * LEASE_SECONDS)  # a large overlay on a slow line
        raise LaunchError("the line is cut")

    a.play(lambda: a.ledger().publish())
    monkeypatch.setattr(Ledger, "publish", upload)
    task = a.spawn(a.hold)
    a.scheduler.run(lambda: a.scheduler.now > 5 * LEASE_SECONDS, seconds=1e6)
    with pytest.raises(LaunchError, match="is supervised by"):
        b.play(b.hold)
    with pytest.raises(LaunchError, match="the line is cut"):
        a.finish(task)
    monkeypatch.setattr(Ledger, "publish", lambda ledger: None)
    over = a.scheduler.now
    b.play(b.hold)
    assert a.scheduler.now - over < 10
    assert a.said == []


@pytest.mark.parametrize("trouble", ["a stopped process is recording an event", "the disk is full"])
def test_events_that_wait_end_no_renewals(a: Machine, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z of another command of the machine may come at any moment."""
    ages: list[float] = []

    def lock() -> None:
        ledger = a.ledger()
        with ledger._recording():
            a.scheduler.sleep(3 * LEASE_SECONDS)
            ages.append(ledger.bucket.read_lease().age)
            with pytest.raises(
                LaunchError, match=r"can't be recorded for 60 s: .*events\.lock is locked: end a tpu-launch"
            ):
                a.ledger().append(HostBack(0, 1))

    def fill() -> None:
        a.scheduler.sleep(10)
        ledger = Machine(a.machines, "c").ledger()
        ledger.append(HostBack(0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            a.scheduler.sleep(3 * LEASE_SECONDS)
        ages.append(ledger.bucket.read_lease().age)

    act, words = (lock, "events.lock is locked") if "stopped" in trouble else (fill, "make room")
    a.play(lambda: a.hold(act))
    assert ages[0] < LEASE_SECONDS / 2
    assert sum(words in text for text in a.said) == 1


def test_a_damaged_lease_is_named(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text("{")
    with pytest.raises(storage.StorageError, match=r"lease\.json is damaged"):
        run_bucket.RunBucket(str(tmp_path)).read_lease()
