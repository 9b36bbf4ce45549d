"""A run starts, attaches, recovers, resumes and stops as promised, over a provider of two hosts in memory.

Everything but the provider and the clock is real: folders, locks, ledgers, supervision.
"""

import itertools
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.images import local
from launcher.images.build import Image
from launcher.provider import (
    Attempt,
    Capabilities,
    CommandReport,
    ContainerState,
    HostReport,
    LogLine,
    Observation,
    SliceState,
)
from launcher.providers import this_machine
from launcher.run import events, launch, specification
from launcher.run.ledger import Ledger
from launcher.run.session import Context, Outcome, Output, find_run, runs_on_slice
from launcher.run.start import _may_lack_secrets, require_ready
from launcher.run.stop import explain_interrupt, stop_run
from launcher.run.verdict import Kind
from tests.launcher.run_files import SLICE, load_text
from training.machine import Clock, format_time
from training.telemetry.progress_line import ProgressLine

FILE = (
    f"{SLICE}image: {{reference: 'r/i@sha256:{'0' * 64}'}}\n"
    "run: {command: [train], preemption_retries: 2, host_lost_seconds: 30, environment: {SETTING: SET}}\n"
)
TPU_VM = Capabilities(cloud_tpu_node=True, sends_secrets=True, replaces_hosts=True, overlays=True)
HOSTS = range(2)


@dataclass
class Hosts:
    """Two hosts, which outlive launchers: their containers, and the attempts that they were given."""

    exits: list[int | None] = field(default_factory=lambda: [0] * 9)  # of attempts; None: they run until `end`
    attempts: list[Attempt] = field(default_factory=list)
    state: dict[str, ContainerState] = field(default_factory=dict)
    busy: str = ""  # another run that is on the hosts
    withdrawals: int = 0  # of requests that are not used
    hooks: dict[str, list[Callable[[], None]]] = field(default_factory=dict)  # run by a method's next calls; may raise
    calls: list[str] = field(default_factory=list)  # the provider's methods that were called, but observe and describe
    slice_state: str | None = "READY"
    health: str = "HEALTHY"
    created: str = "2026-01-01T00:00:00Z"
    address: str = "10.0.0.1"  # the address of host 0
    silent: set[int] = field(default_factory=set)  # hosts that do not answer
    only_created: set[int] = field(default_factory=set)  # hosts on which containers have not started
    quiet: bool = False  # whether containers have written nothing
    progress: dict[int, tuple[ProgressLine, ...]] = field(default_factory=dict)  # lines that the hosts' processes tell
    stacks: dict[int, str] = field(default_factory=dict)  # output of the script that dumps stacks
    line: str = "a line"  # the log line that containers have written
    log_problem: str = ""  # why hosts tell only how containers do, and none of their lines
    execute: Callable[[Sequence[str]], tuple[int, list[str]]] = lambda command: (0, [])  # its exit code and lines

    def call(self, method: str) -> None:
        """Counts a call, and runs the hook for it."""
        if method not in ("observe", "describe"):
            self.calls.append(method)
        if self.hooks.get(method):
            self.hooks[method].pop(0)()

    def change(self, **state: object) -> Callable[[], None]:
        """Returns a hook that changes the hosts."""
        return lambda: vars(self).update(state)

    def fail(self, method: str, *errors: BaseException) -> None:
        """Makes the next calls of a method raise errors, one after another."""
        self.hooks.setdefault(method, []).extend(Mock(side_effect=error) for error in errors)

    def end(self, exit_code: int) -> None:
        ended = ContainerState("exited", exit_code, finished_at="2026-01-01T00:00:00Z")
        self.state[self.attempts[-1].container] = ended


class FakeProvider:
    """Two hosts in memory; see `launcher.provider.Provider`."""

    capabilities = TPU_VM

    def __init__(self, config: Config, hosts: Hosts) -> None:
        self.config, self.hosts = config, hosts

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def describe(self) -> SliceState | None:
        self.hosts.call("describe")
        (created, address), state = self.identity(), self.hosts.slice_state
        addresses = (address, "10.0.0.2")
        name, health = self.config.slice.name, self.hosts.health
        return state and SliceState(name, state, health, "v4-16", addresses, created=created)

    def identity(self) -> tuple[str, str]:
        return self.hosts.created, self.hosts.address

    @property
    def host_count(self) -> int:
        return self.config.accelerator.hosts

    def withdraw_unused(self) -> None:
        self.hosts.withdrawals += 1

    def known_ready(self) -> bool:
        return False

    def create(self, clock: Clock | None = None) -> None:
        self.hosts.call("create")
        self.hosts.slice_state = "READY"
        (clock or Clock()).sleep(0)

    def delete(self) -> None:
        self.hosts.call("delete")
        self.hosts.slice_state = None

    def start(self, attempt: Attempt, clock: Clock | None = None) -> list[HostReport]:
        self.hosts.call("start")
        if self.hosts.busy:
            return [HostReport(worker, False, "in use", occupied_by=self.hosts.busy) for worker in HOSTS]
        exit_code = self.hosts.exits[len(self.hosts.attempts)]
        self.hosts.attempts.append(attempt)
        self.hosts.state[attempt.container] = ContainerState("running")
        if exit_code is not None:
            self.hosts.end(exit_code)
        self.hosts.call("started")
        return [HostReport(worker, True, attempt.image) for worker in HOSTS]

    def observe(self, worker: int, container: str, since: str | None, *, progress=False, **_: Any) -> Observation:
        self.hosts.call("observe")
        if worker in self.hosts.silent:
            return Observation(worker, None, problem="timed out")
        state = self.hosts.state.get(container, ContainerState("absent"))
        if worker in self.hosts.only_created and state.running:
            state = ContainerState("created")
        if self.hosts.log_problem:
            return Observation(worker, state, problem=self.hosts.log_problem)
        lines = () if self.hosts.quiet else (LogLine("2026-01-01T00:00:00.000000000Z", self.hosts.line),)
        return Observation(worker, state, lines, progress=self.hosts.progress.get(worker, ()) if progress else ())

    def look(self, worker: int, container: str, *, lines: int = 0) -> Observation:
        return Observation(worker, self.hosts.state.get(container, ContainerState("absent")))

    def stop(self, container: str, *, grace, remove: bool, workers: Sequence[int] | None = None) -> list[HostReport]:
        self.hosts.call("stop")
        if remove:
            self.hosts.state.pop(container, None)
        elif container in self.hosts.state and not self.hosts.state[container].ended:
            self.hosts.end(75)
        return [HostReport(worker, worker not in self.hosts.silent, "") for worker in workers or HOSTS]

    def execute(
        self, container: str, command: Sequence[str], workers: Sequence[int], *, seconds, on_line: Callable
    ) -> list[CommandReport]:
        answers = {worker: self.hosts.execute(command) for worker in workers}
        for worker, (_, lines) in answers.items():
            for line in lines:
                on_line(worker, line)
        return [CommandReport(worker, code, 0.0) for worker, (code, _) in answers.items()]

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        return {}

    def stacks(self, container: str, *, native: bool = False) -> dict[int, str]:
        self.hosts.call("stacks")
        return dict(self.hosts.stacks)


class FastClock(Clock):
    """This machine's clock, which jumps over every wait."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped

    def time(self) -> float:
        return time.time() + self.skipped

    def sleep(self, seconds: float) -> None:
        self.skipped += seconds


@dataclass
class Workstation:
    """A folder with a run's file, and the hosts."""

    folder: Path
    hosts: Hosts
    messages: list[str] = field(default_factory=list)
    clock: FastClock = field(default_factory=FastClock)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def config(self, *overrides: str, command: Sequence[str] = (), setting: str = "of the file") -> Config:
        return load_text(self.folder, FILE.replace("SET}", f"{setting}}}"), overrides, command)

    def context(self, **environment: str) -> Context:
        output = Output(self.messages.append, lambda worker, line: None)
        machine = replace(this_machine(), clock=self.clock)
        return Context(self.home, environment, lambda config: FakeProvider(config, self.hosts), output, machine)

    def run(self, config: Config, environment: dict[str, str] | None = None, **options: object) -> Outcome:
        return launch.run(launch.RunRequest(config, **options), self.context(**(environment or {})))  # type: ignore[arg-type]

    def attach(self, config: Config, **environment: str) -> Outcome:
        return launch.attach(launch.RunRequest(config), self.context(**environment))

    @property
    def ledger(self) -> Ledger:
        return find_run(self.home, this_machine(), None)


def detach(work: Workstation, config: Config, environment: dict[str, str] | None = None, **options: object) -> None:
    """Starts a run, and interrupts its launcher when it begins to watch the attempt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.run.launch.supervise", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            work.run(config, environment, **options)


def write_overlay(work: Workstation, text: str) -> str:
    """Writes a folder of code. Returns the option that puts it over /opt/code."""
    (work.folder / "code").mkdir(exist_ok=True)
    (work.folder / "code" / "loop.py").write_text(text)
    return f"{work.folder}/code=/opt/code"


def start_and_lose_sight(work: Workstation) -> None:
    """Starts a run with everything that a command line can add; its launcher is gone, and its attempt runs."""
    work.hosts.exits[0] = None
    env_file = work.folder / "some.env"
    env_file.write_text("FROM_FILE=plain\n")
    settings = ("run.secrets=[HF_TOKEN]", "run.environment={SETTING: of the start}")
    config = work.config(*settings, command=["python", "train.py", "--lr=1e-4"])
    detach(work, config, {"HF_TOKEN": "s3cret"}, env_file=env_file, overlay=write_overlay(work, "of the start\n"))
    write_overlay(work, "changed since\n")
    env_file.unlink()


def test_the_attempt_after_an_attach_is_what_was_started_whatever_the_file_says_now(work: Workstation) -> None:
    start_and_lose_sight(work)
    explain_interrupt(work.config(), work.context())
    assert "detached: what was started goes on" in work.messages[-1]
    work.hosts.end(75)  # its machine asked it to save
    outcome = work.attach(work.config(setting="changed"), HF_TOKEN="s3cret", FROM_FILE="plain")
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    assert any("attempt 1 on 2 hosts (resumes: the last attempt ended with 'saved')" in text for text in work.messages)
    first, second = work.hosts.attempts
    assert replace(second, number=0, host_secret=first.host_secret) == first
    assert second.host_secret != first.host_secret, "a host of the first attempt can't meet those of the second"
    assert second.command == ("python", "train.py", "--lr=1e-4")
    assert second.environment == {"SETTING": "of the start"}
    assert second.secrets == {"HF_TOKEN": "s3cret", "FROM_FILE": "plain"}
    assert second.overlay.target == "/opt/code"
    assert work.hosts.withdrawals == 2, "by `run`, and by the attach"


def test_without_its_secrets_no_attempt_follows_and_the_run_stays_resumable(work: Workstation) -> None:
    start_and_lose_sight(work)
    work.hosts.end(75)
    with pytest.raises(BadInput, match=r"attempt 1 is not started: .* and /.*some\.env\): FROM_FILE") as refused:
        work.attach(work.config(), HF_TOKEN="s3cret")
    assert refused.value.exit_code == Exit.BAD_INPUT
    assert any("FROM_FILE" in message and "no other attempt starts" in message for message in work.messages)
    assert len(work.hosts.attempts) == 1
    assert work.ledger.state.outcome == "saved"
    assert not any(isinstance(event, events.Recovering) for event in work.ledger.events())

    config = work.config("run.environment={SETTING: of the start}", command=["python", "train.py", "--lr=1e-4"])
    outcome = work.run(config, {"HF_TOKEN": "s3cret", "FROM_FILE": "plain"})
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    first, second = work.hosts.attempts
    assert (second.image, second.secrets, second.overlay) == (first.image, first.secrets, first.overlay)


def test_an_env_file_is_for_the_command_and_not_for_the_launcher(work: Workstation) -> None:
    """With PATH=/app/bin in the launcher's own environment, gcloud would not be found."""
    path = work.folder / "some.env"
    path.write_text("PATH=/app/bin\nHOME=/app\n")
    before, seen = dict(os.environ), list[dict[str, str]]()
    work.hosts.hooks["start"] = [lambda: seen.append(dict(os.environ))]
    work.run(work.config(), env_file=path)
    assert [*seen, dict(os.environ)] == [before, before]
    assert work.hosts.attempts[0].secrets == {"PATH": "/app/bin", "HOME": "/app"}


def test_what_is_kept_of_a_failure_masks_its_secrets(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    work.hosts.exits[0] = None
    env_file = work.folder / "some.env"
    env_file.write_text("TOKEN=s3cret-of-the-start\n")
    detach(work, work.config(), env_file=env_file)
    work.hosts.end(1)
    work.hosts.hooks["stop"] = [lambda: env_file.write_text("no value\n")]
    monkeypatch.setattr(FakeProvider, "evidence", lambda *_: {"host-0.txt": "it is s3cret-of-the-start"})
    work.hosts.line = "it was s3cret-of-the-start"
    outcome = work.attach(work.config())
    assert (outcome.verdict.kind, outcome.last_lines) == (Kind.FAILED, ["it was ***"])
    assert "s3cret" not in (work.ledger.folder / "events.jsonl").read_text()
    with tarfile.open(work.ledger.folder / "post-mortem-0.tar.gz") as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("host-0.txt"))
        assert archive.extractfile(name).read() == b"it is ***"


def test_no_file_of_the_runs_folder_holds_a_secret(work: Workstation) -> None:
    start_and_lose_sight(work)
    paths = [path for path in work.home.rglob("*") if path.is_file()]
    assert {"specification.yaml", "run.json", "config.yaml", "events.jsonl"} <= {path.name for path in paths}
    assert not [path for path in paths if b"s3cret" in path.read_bytes() or b"plain" in path.read_bytes()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_run_resumes_an_unfinished_run_with_what_the_command_line_says_now(work: Workstation) -> None:
    work.hosts.exits[0] = 3
    assert work.run(work.config()).verdict.kind is Kind.FAILED
    first = work.ledger.run_id
    outcome = work.run(work.config(setting="changed"))
    assert (outcome.run_id, outcome.attempt, outcome.verdict.kind) == (first, 1, Kind.FINISHED)
    assert work.hosts.attempts[1].environment == {"SETTING": "changed"}
    assert work.run(work.config(), run_id=first).attempt == 2, "it was asked for by its id"
    assert work.run(work.config()).run_id != first, "one that has finished is not resumed"


@pytest.mark.parametrize(
    ("age", "lines", "hosts", "secrets", "overlay", "waits"),
    [
        (60, 1, 2, [], None, False),
        (1300, 0, 2, [], None, True),  # 20 minutes to start, and two to deliver
        (1e5, 0, 2, [], None, False),
        (60, 0, 1, [], None, False),
        (60, 0, 1, ["TOKEN"], None, True),
        (60, 0, 1, [], "/opt/code", True),
    ],
)
def test_a_container_waits_for_secrets_for_a_time_and_writes_no_line_before(
    age: float, lines: int, hosts: int, secrets: list[str], overlay: str | None, waits: bool
) -> None:
    clock = Clock()
    session = Mock(**{"machine.clock": clock, "config.run.start_minutes": 20.0, "provider.host_count": hosts})
    session.specification = Mock(secrets=secrets, overlay=overlay)
    container = ContainerState("running", started_at=format_time(clock.time() - age))
    answer = Observation(0, container, (LogLine("2026-01-01T00:00:00Z", "a line"),) * lines)
    assert _may_lack_secrets(session, answer, container) is waits
    assert not _may_lack_secrets(session, replace(answer, lines=()), replace(container, status="exited"))
    session.provider.capabilities.sends_secrets = False
    assert not _may_lack_secrets(session, answer, container)


@pytest.mark.parametrize(("state", "code"), [("PREEMPTED", Exit.PREEMPTED), ("CREATING", Exit.CONFLICT)])
def test_a_run_starts_only_on_a_slice_that_is_ready(work: Workstation, state: str, code: Exit) -> None:
    work.hosts.slice_state = state
    with pytest.raises(LaunchError, match=f"demo is {state}") as caught:
        require_ready(work.config(), FakeProvider(work.config(), work.hosts))
    assert caught.value.exit_code == code


@pytest.mark.parametrize("saved", [False, True])
def test_an_attempt_that_fails_while_run_watches_it_is_not_started_again(work: Workstation, saved: bool) -> None:
    """Neither the one that `run` has found, nor the one that follows it."""
    work.hosts.exits[:2] = [None, 3]
    detach(work, work.config())
    if saved:
        work.hosts.end(75)
    else:
        work.hosts.hooks["observe"] = [*[lambda: None] * 6, lambda: work.hosts.end(3)]
    outcome = work.run(work.config())
    assert (outcome.attempt, outcome.verdict.kind, len(work.hosts.attempts)) == (saved, Kind.FAILED, 1 + saved)


def test_a_slice_that_another_run_uses_is_asked_once(work: Workstation) -> None:
    work.hosts.busy = "other-run"
    with pytest.raises(LaunchError, match="the slice is in use") as refused:
        work.run(work.config())
    assert (refused.value.exit_code, work.hosts.calls.count("start")) == (Exit.CONFLICT, 1)


def test_a_slice_known_to_be_ready_is_not_described_again(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProvider, "known_ready", lambda provider: True)
    monkeypatch.setattr(FakeProvider, "describe", lambda provider: pytest.fail("its state is known"))
    work.hosts.exits[0] = None
    detach(work, work.config())
    work.hosts.end(0)
    outcome = work.run(work.config())
    assert (outcome.attempt, outcome.verdict.kind) == (0, Kind.FINISHED)


def test_an_attach_takes_no_other_files_and_a_started_run(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in "overlay", "sync":
        with pytest.raises(BadInput, match=f"--{option}: a run that is there keeps the files"):
            launch.attach(launch.RunRequest(work.config(), **{option: "code=/app"}), work.context())
    monkeypatch.setattr(launch, "run_attempts", lambda *_: None)
    work.run(work.config())
    with pytest.raises(BadInput, match="was never started"):
        work.attach(work.config())
    with pytest.raises(BadInput, match="was never started"):
        stop_run(work.config(), work.context(), None, grace=1)
    with work.ledger.supervising():  # by a process that builds its image, for example
        assert stop_run(work.config(), work.context(), None, grace=1) == []
    assert work.ledger.state.stop_requested


@pytest.mark.parametrize("other", ["slice.name=other", "project=q", "zone=europe-west4-b"])
def test_a_run_of_another_slice_is_not_one_of_this(work: Workstation, other: str) -> None:
    detach(work, work.config())
    assert not runs_on_slice(work.config(other), work.home, work.context().machine)
    for of_others in ({"slice_name": "other"}, {"slice_name": "demo", "provider": "gke"}):
        with pytest.raises(BadInput, match="no run was started"):
            find_run(work.home, this_machine(), None, **of_others)


def test_another_command_is_another_run_and_an_unknown_one_is_refused(work: Workstation) -> None:
    work.hosts.exits[0] = 3
    first = work.run(work.config()).run_id
    with pytest.raises(BadInput, match=rf"there is no run 'demo-0' here; known: {first}$"):
        find_run(work.home, this_machine(), "demo-0")
    assert work.run(work.config(command=["other"])).run_id != first
    with pytest.raises(BadInput, match="was started with another configuration or command"):
        work.run(work.config(command=["third"]), run_id=first)


def test_a_secret_that_the_file_names_must_be_there_before_anything_starts(work: Workstation) -> None:
    with pytest.raises(BadInput, match=r"run\.secrets: not in the environment: HF_TOKEN"):
        work.run(work.config("run.secrets=[HF_TOKEN]"))
    assert not list(work.home.glob("runs/*"))


def test_a_kept_overlay_stays_over_its_image_in_recoveries(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(local, "image", lambda config, say: Image(f"image-{next(numbers)}"))
    work.hosts.exits[:3] = [75, 3, 3]
    work.run(work.config(), overlay=write_overlay(work, "of the start\n"))
    assert specification.read(work.ledger.folder).image == "image-0"
    work.run(work.config())
    for new in (False, True):
        work.run(work.config(), overlay=write_overlay(work, "changed since\n"), new=new)
    assert [attempt.image for attempt in work.hosts.attempts] == ["image-0"] * 5
    first, *others = [attempt.overlay.digest for attempt in work.hosts.attempts]
    assert [digest == first for digest in others] == [True, True, False, False]
