"""Claims about the lease and the ledger of a run in its bucket, over the emulator's Cloud Storage with the real client:
of two machines, one decides, whatever is frozen, killed or late, and whatever their clocks say."""

import contextlib
import errno
import json
import random
from collections.abc import Callable, Iterator
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
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.session import Session, begin_run, import_run, share, supervising, take_lease
from launcher.run.specification import Specification
from launcher.workstation import Workstation
from tests.servers import BucketServer
from tests.simulation.scheduler import Process, Scheduler, SimulatedClock, SimulatedThreads
from training import storage
from training.storage import gcs

DECISIONS = 3
CONFIGURATION = {"project": "p", "zone": "us-central2-b", "slice": {"name": "s", "accelerator_type": "v4-16"}}
EPOCH = 1_800_000_000.0
LATE = [0.0] * 12 + [0.1, 1.0, 3.0, 12.0]  # seconds, before and after a request
FROZEN = 0.03  # probability that the process stands still then, as on a laptop that sleeps
FULL = 0.05  # probability that the disk is full when an event is written


pytestmark = pytest.mark.usefixtures("server")


class Machines:
    """Machines that share a bucket, in virtual time. A machine may stand still before and after each request."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(self.random)
        self.folder = folder
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
        record = RunRecord("r", "p", "z", "s", "hash", 0.0, "tpu-vm", bucket=f"{self.run}/launcher", user="ann")
        specification = Specification(run="", provider="tpu-vm", file="f.yaml", configuration=CONFIGURATION)
        begin_run(folder / "a", self.make("a")[0], record, "a: 1", specification, None)

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
        if scheduler.current is not None:
            scheduler.sleep(self.random.choice(LATE))
            if self.random.random() < FROZEN:
                process = scheduler.current.process
                scheduler.call_at(scheduler.now + self.random.uniform(10, 100), lambda: scheduler.thaw(process))
                scheduler.freeze(process)

    def _write(self, file: FileIO, data: bytes) -> None:
        if self.random.random() < FULL:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(file, data)

    def make(self, name: str, wrong_clock: float = 0.0) -> tuple[Workstation, Process]:
        process = Process(name)

        def end(code: int) -> NoReturn:
            assert code == Exit.CONFLICT
            self.exits.append(name)
            self.scheduler.kill(process)
            raise AssertionError

        machine = Workstation(
            clock=SimulatedClock(self.scheduler, wall=EPOCH + wrong_clock),
            threads=SimulatedThreads(self.scheduler),
            random=random.Random(self.random.random()),
            exit=end,
            connect=lambda address: pytest.fail("no host is contacted"),
        )
        return machine, process

    def ledger(self, name: str, machine: Workstation) -> Ledger:
        """Returns the run in the folder of a machine, imported unless it is there; machine `a` has begun it."""
        home = self.folder / name
        while not (home / "runs" / "r" / "run.json").exists():
            with contextlib.suppress(LaunchError):  # not in the bucket yet, or the disk is full
                return import_run(home, machine, self.run)
            self.scheduler.sleep(5)
        return Ledger(home / "runs" / "r", machine.clock)

    def supervise(self, name: str, machine: Workstation) -> None:
        while True:
            ledger = self.ledger(name, machine)
            with contextlib.suppress(LaunchError), supervising(ledger, machine, self.said.append):
                while (number := ledger.state.attempt + 1) < DECISIONS:
                    ledger.confirm()
                    ledger.append(AttemptBegan(number))
                    machine.clock.sleep(self.random.random() * 10)
            if ledger.state.attempt + 1 == DECISIONS:
                return
            machine.clock.sleep(15.0)


def recorded(machines: Machines) -> list[dict[str, Any]]:
    """Returns the events in the bucket, whose numbers have no gap."""
    found = storage.listing(f"{machines.run}/launcher/events")
    assert [storage.name_of(each.url) for each in found] == [f"{n + 1:08d}.json" for n in range(len(found))]
    return [json.loads(storage.read(each.url)) for each in found]


def check(machines: Machines) -> None:
    """Each decision was made once, by the supervisor of that time, and every copy agrees."""
    events = recorded(machines)
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

    def finish(name: str, machine: Workstation) -> None:
        machines.supervise(name, machine)
        done.append(name)

    def live(name: str, wrong: float) -> None:
        while name not in done:
            machine, process = machines.make(name, wrong)
            task = scheduler.spawn(finish, name, machine, name=name, process=process)
            if rng.random() < 0.3:
                scheduler.sleep(rng.random() * 60)
                if process.alive:
                    scheduler.kill(process)
            task.join()
            assert task.error is None, task.error
            scheduler.sleep(rng.random() * 20)

    def look_on(name: str, event: bool) -> None:
        machine, _ = machines.make(name)
        while len(done) < 2:
            scheduler.sleep(20 + rng.random() * 60)
            with contextlib.suppress(LaunchError, FileNotFoundError):
                ledger = machines.ledger(name, machine)
                ledger.pull()
                if event:
                    ledger.append(HostBack(0, 1))

    scheduler.spawn(live, "a", rng.uniform(-9e3, 9e3), name="a")
    scheduler.spawn(live, "b", rng.uniform(-9e3, 9e3), name="b")
    scheduler.spawn(lambda: (scheduler.sleep(60), look_on("a", False)), name="status beside a")
    scheduler.spawn(lambda: (scheduler.sleep(60), look_on("c", True)), name="stop elsewhere")
    try:
        scheduler.run(lambda: len(done) == 2 or bool(scheduler.crashed), seconds=20_000)
        for task in scheduler.crashed:
            raise AssertionError(f"{task} failed at {scheduler.now:.0f} s") from task.error
    finally:
        scheduler.close()
    return machines


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=[pytest.mark.nightly] if block else []) for block in range(10)]
)
def test_one_of_two_supervisors_makes_a_decision(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 interleavings, of which the fast tests run 100."""
    lost = 0
    for seed in range(block * 100, block * 100 + 100):
        machines = interleave(seed, tmp_path / str(seed), monkeypatch)
        check(machines)
        lost += len(machines.exits)
    assert lost > 10, "supervisors lose their leases"


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Machines whose requests are not late, and whose disks have room."""
    monkeypatch.setattr(f"{__name__}.LATE", [0.0])
    monkeypatch.setattr(f"{__name__}.FROZEN", 0.0)
    monkeypatch.setattr(f"{__name__}.FULL", 0.0)
    machines = Machines(0, tmp_path, monkeypatch)
    yield machines
    machines.scheduler.close()


def play(machines: Machines, *scenes: tuple[Process, Callable[[], object]]) -> None:
    """Runs functions, each in a process, one after another."""
    for process, scene in scenes:
        task = machines.scheduler.spawn(scene, name="scene", process=process)
        machines.scheduler.run(lambda task=task: not task.is_alive(), seconds=1e6)  # type: ignore[misc]
        if task.error is not None:
            raise task.error


@pytest.mark.parametrize("tells_time", [True, False])
def test_a_lease_ends_by_the_buckets_clock(prompt: Machines, tells_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bucket tells no time, a lease expires that its holder does not renew."""
    scheduler = prompt.scheduler
    waits = 0 if tells_time else LEASE_SECONDS
    if not tells_time:
        silent = type("Silent", (), {"date": property(lambda _: "", lambda *_: None)})
        monkeypatch.setattr(gcs, "_this_thread", silent())
    a, of_a = prompt.make("a", wrong_clock=7 * 3600)
    b, of_b = prompt.make("b", wrong_clock=-5 * 3600)
    taken: list[float] = []

    def hold() -> None:
        with supervising(prompt.ledger("a", a), a, prompt.said.append):
            scheduler.sleep(100)  # renewed meanwhile
            scheduler.call_at(scheduler.now, lambda: scheduler.kill(of_a))
            scheduler.sleep(1)

    def wait() -> None:
        ledger, last = prompt.ledger("b", b), scheduler.now
        while len(taken) < 2:
            with contextlib.suppress(LaunchError), supervising(ledger, b, prompt.said.append):
                taken.append(scheduler.now - last)
            scheduler.sleep(1)

    def refuse() -> None:
        scheduler.sleep(90 - waits)
        elsewhere = supervising(prompt.ledger("b", b), b, prompt.said.append)
        with pytest.raises(LaunchError, match=r"run r is supervised by \S+:\S+: `tpu-launch logs") as raised, elsewhere:
            pass
        assert raised.value.exit_code == Exit.CONFLICT

    scheduler.spawn(hold, name="hold", process=of_a)
    scheduler.run(lambda: scheduler.now > 5, seconds=10)
    play(prompt, (of_b, refuse), (of_b, wait))
    assert scheduler.now > 100
    assert LEASE_SECONDS - 6 < taken[0] < LEASE_SECONDS + 12 + waits, "from its last renewal at most"
    assert taken[1] < taken[0] + 5, "one that was released does not need to expire"


def test_a_lease_is_taken_at_once_that_was_released_or_whose_holder_in_this_folder_is_dead(prompt: Machines) -> None:
    a, of_a = prompt.make("a")
    again, of_again = prompt.make("a")
    b, of_b = prompt.make("b")

    def die() -> None:
        with supervising(prompt.ledger("a", a), a, prompt.said.append):
            prompt.scheduler.kill(of_a)

    def hold(name: str, machine: Workstation) -> None:
        with supervising(prompt.ledger(name, machine), machine, prompt.said.append):
            prompt.scheduler.sleep(1)

    play(prompt, (of_a, die), (of_again, lambda: hold("a", again)), (of_b, lambda: hold("b", b)))
    assert prompt.scheduler.now < 5
    assert [event["event"] for event in recorded(prompt)] == [Supervised.kind] * 3


@pytest.mark.parametrize(
    "act", [lambda s: s.ledger.append(AttemptBegan(0)), lambda s: s.ledger.pull(), Session.check_stop]
)
def test_a_supervisor_ends_that_another_commands_pull_has_shown(prompt: Machines, act: Callable[[Any], None]) -> None:
    scheduler = prompt.scheduler
    a, of_a = prompt.make("a")
    b, of_b = prompt.make("b")
    status, of_status = prompt.make("status")
    ledgers: list[Ledger] = []

    def take(name: str, machine: Workstation) -> None:
        ledger = prompt.ledger(name, machine)
        take_lease(ledger, ledger.bucket, machine, prompt.said.append)
        share(ledger, ledger.bucket, prompt.said.append)
        ledgers.append(ledger)
        scheduler.sleep(LEASE_SECONDS + 2)

    play(prompt, (of_a, lambda: take("a", a)), (of_b, lambda: take("b", b)))
    play(prompt, (of_status, lambda: prompt.ledger("a", status).pull()))
    play(prompt, (of_a, lambda: act(SimpleNamespace(ledger=ledgers[0]))))
    assert prompt.exits == ["a"]
    assert "run r is supervised by " in prompt.said[-1]
    assert [event["event"] for event in recorded(prompt)] == [Supervised.kind] * 2


def test_a_supervisor_decides_nothing_while_its_bucket_refuses(prompt: Machines, server: BucketServer) -> None:
    scheduler = prompt.scheduler
    a, of_a = prompt.make("a")
    server.fault = lambda request: HttpResponse(403) if 20 < scheduler.now % 300 < 200 else None
    recorded_at: list[float] = []

    def decide() -> None:
        ledger = prompt.ledger("a", a)
        with supervising(ledger, a, prompt.said.append):
            scheduler.sleep(25)
            ledger.note(HostBack(0, 0), prompt.said.append)
            assert scheduler.now < 35, "what only informs is not waited for"
            ledger.append(AttemptBegan(0))
            recorded_at.append(scheduler.now)
            scheduler.sleep(200)

    def tell() -> None:
        scheduler.sleep(100)
        ledger = prompt.ledger("a", a)
        assert ledger.state.attempt == -1

    scheduler.spawn(tell, name="tell")
    play(prompt, (of_a, decide))
    server.fault = lambda request: None
    assert 200 <= recorded_at[0] < 210
    waits = "its lease can't be renewed; decisions wait until it is"
    assert sum(waits in text for text in prompt.said) == 2, "once each time"
    assert [event["event"] for event in recorded(prompt)] == [Supervised.kind, AttemptBegan.kind]


def test_a_process_without_renewals_waits_and_without_lease_ends(prompt: Machines, server: BucketServer) -> None:
    scheduler = prompt.scheduler
    a, of_a = prompt.make("a")

    def wait() -> None:
        server.fault = lambda request: HttpResponse(403) if scheduler.now < 10 or 20 < scheduler.now < 100 else None
        ledger = prompt.ledger("a", a)
        with pytest.raises(LaunchError, match="run r: its lease can't be taken: "):
            take_lease(ledger, ledger.bucket, a, prompt.said.append)
        scheduler.sleep(15)
        lease = take_lease(ledger, ledger.bucket, a, prompt.said.append)
        scheduler.sleep(30)
        lease.confirm()
        assert scheduler.now >= 100
        assert sum("lease can't be renewed" in text for text in prompt.said) == 1
        storage.delete(f"{ledger.bucket.url}/lease.json")
        scheduler.sleep(30)
        lease.confirm()

    play(prompt, (of_a, wait))
    assert prompt.exits == ["a"]
    assert "supervised by another process now" in prompt.said[-1]


def test_a_lost_answer_ends_no_lease(prompt: Machines, server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "timeouts", gcs.Timeouts(deadline=0.3, first_delay=0.01, longest_delay=0.1))
    scheduler = prompt.scheduler
    a, of_a = prompt.make("a")
    renewed: list[int] = []

    def lose_answer(request: Any) -> HttpResponse | None:
        if request.method != "POST" or not 20 < scheduler.now < 40:
            return None
        renewed.append(server.serve_storage(request).status)
        return HttpResponse(503)

    def decide() -> None:
        with supervising(prompt.ledger("a", a), a, prompt.said.append):
            scheduler.sleep(60)

    server.fault = lose_answer
    play(prompt, (of_a, decide))
    assert 200 in renewed
    assert 412 in renewed
    assert prompt.exits == []
    assert any("lease can't be renewed" in text for text in prompt.said)


def test_a_lease_is_renewed_while_files_are_copied(prompt: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    a, of_a = prompt.make("a")
    b, of_b = prompt.make("b")

    def upload(ledger: Ledger) -> NoReturn:
        prompt.scheduler.sleep(10 * LEASE_SECONDS)  # a large overlay on a slow line
        raise LaunchError("the line is cut")

    def begin() -> None:
        with pytest.raises(LaunchError, match="the line is cut"), supervising(prompt.ledger("a", a), a, pytest.fail):
            pass

    def take() -> None:
        with supervising(prompt.ledger("b", b), b, pytest.fail):
            pass

    play(prompt, (of_a, lambda: prompt.ledger("a", a).publish()))
    monkeypatch.setattr(Ledger, "publish", upload)
    task = prompt.scheduler.spawn(begin, name="begin", process=of_a)
    prompt.scheduler.run(lambda: prompt.scheduler.now > 5 * LEASE_SECONDS, seconds=1e6)
    with pytest.raises(LaunchError, match="is supervised by"):
        play(prompt, (of_b, take))
    prompt.scheduler.run(lambda: not task.is_alive(), seconds=1e6)
    monkeypatch.setattr(Ledger, "publish", lambda ledger: None)
    over = prompt.scheduler.now
    play(prompt, (of_b, take))
    assert prompt.scheduler.now - over < 10


def test_a_stopped_process_that_is_recording_an_event_ends_no_renewals(prompt: Machines) -> None:
    """Ctrl-Z of another command of the machine may come at any moment."""
    a, of_a = prompt.make("a")
    ages: list[float | None] = []

    def hold() -> None:
        with supervising(prompt.ledger("a", a), a, prompt.said.append):
            ledger = prompt.ledger("a", a)
            with ledger._recording():
                prompt.scheduler.sleep(3 * LEASE_SECONDS)
                ages.append(ledger.bucket.read_lease().age)
                with pytest.raises(
                    LaunchError, match=r"can't be recorded for 60 s: .*events\.lock is locked: end a tpu-launch"
                ):
                    prompt.ledger("a", a).append(HostBack(0, 1))

    play(prompt, (of_a, hold))
    assert ages[0] < LEASE_SECONDS / 2
    assert sum("events.lock is locked" in text for text in prompt.said) == 1


def test_events_that_do_not_fit_on_a_disk_end_no_renewals(prompt: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = prompt.scheduler
    a, of_a = prompt.make("a")
    c, _ = prompt.make("c")
    ages: list[float] = []
    write = Ledger._write

    def hold() -> None:
        with supervising(prompt.ledger("a", a), a, prompt.said.append):
            scheduler.sleep(10)
            ledger = prompt.ledger("c", c)
            ledger.append(HostBack(0, 1))
            monkeypatch.setattr(Ledger, "_write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            scheduler.sleep(3 * LEASE_SECONDS)
            monkeypatch.setattr(Ledger, "_write", write)
            ages.append(ledger.bucket.read_lease().age)

    play(prompt, (of_a, hold))
    assert ages[0] < LEASE_SECONDS / 2
    assert any("make room" in text for text in prompt.said)


def test_a_damaged_lease_is_named(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text("{")
    with pytest.raises(storage.StorageError, match=r"lease\.json is damaged"):
        run_bucket.RunBucket(str(tmp_path)).read_lease()
