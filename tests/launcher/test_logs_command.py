"""`logs` prints every line of an unwatched run and ends; an attempt that ended delivers its last lines."""

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launcher.config import Config
from launcher.errors import LaunchError
from launcher.provider import ContainerState, LogLine, Observation
from launcher.providers import this_machine
from launcher.run import events, launch, logs
from launcher.run.ledger import Ledger
from launcher.run.logs import read_from
from launcher.run.session import Context, Output, find_run, open_session
from launcher.run.supervise import _Supervision
from tests.launcher.run_files import load_text
from tests.launcher.test_runs import FILE, FakeProvider, Hosts, Workstation, detach

PAGE = 1000  # lines of one observation


def line(number: int) -> LogLine:
    return LogLine(f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.{number:09}Z", f"line {number}")


class WritingHosts(FakeProvider):
    """Two hosts whose containers have written `lines`, a page of which is shown at once."""

    def __init__(self, config: Config, lines: list[LogLine], states: list[ContainerState | LaunchError]) -> None:
        super().__init__(config, Hosts([]))
        self.lines, self.states = lines, states  # of one observation after another; the last one stays

    def observe(self, worker: int, container: str, since: str | None, **_: object) -> Observation:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, LaunchError):
            raise state
        lines = [each for each in self.lines if since is None or each.timestamp >= since]
        return Observation(worker, state, tuple(lines[:PAGE]), more=len(lines) > PAGE)


RUNNING, EXITED = ContainerState("running"), ContainerState("exited", 1, finished_at="2026-01-01T01:00:00Z")


@dataclass
class Terminal:
    """A run that was begun, and what `logs` prints of it."""

    folder: Path
    lines: list[LogLine]
    states: list[ContainerState | LaunchError]
    printed: list[tuple[int, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = load_text(self.folder, FILE)
        provider = WritingHosts(self.config, self.lines, self.states)
        output = Output(self.messages.append, lambda worker, shown: self.printed.append((worker, shown.text)))
        self.context = Context(self.folder / "home", {}, lambda config: provider, output, this_machine())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("launcher.run.launch.run_attempts", lambda *_arguments, **_options: None)
            launch.run(launch.RunRequest(self.config), self.context)
        self.ledger.append(events.AttemptBegan(0, image="r/i@sha256:0", command=("train",)))

    @property
    def ledger(self) -> Ledger:
        return find_run(self.folder / "home", this_machine(), None)

    def logs(self, *, follow: bool, seconds: float = 20.0) -> None:
        """Prints the logs. Fails when that has not ended in time."""
        arguments, options = (self.config, self.context, None), {"follow": follow, "host": None}
        command = threading.Thread(target=logs.print_logs, args=arguments, kwargs=options, daemon=True)
        command.start()
        command.join(seconds)
        assert not command.is_alive(), f"`logs` has not ended within {seconds} s"


def everything(count: int) -> list[tuple[int, str]]:
    return [(worker, f"line {number}") for worker in (0, 1) for number in range(count)]


def test_logs_print_all_lines_of_a_backlog_that_exceeds_one_look(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [line(number) for number in range(3000)], [RUNNING])
    terminal.logs(follow=False)
    assert sorted(terminal.printed) == sorted(everything(3000))


def test_following_without_a_supervisor_ends_with_the_containers_and_says_what_is_next(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [line(number) for number in range(2500)], [RUNNING, RUNNING, EXITED])
    terminal.logs(follow=True)
    assert sorted(terminal.printed) == sorted(everything(2500))
    (message,) = terminal.messages
    assert "its containers have ended" in message
    assert "tpu-launch run --attach" in message
    assert terminal.ledger.state.outcome is None  # only a supervisor says how it ended


def test_a_host_that_can_not_be_asked_is_named_once_and_asked_again(tmp_path: Path) -> None:
    away = LaunchError("ssh: connection refused\nand more")
    terminal = Terminal(tmp_path, [line(0)], [away, RUNNING, away, RUNNING, EXITED])
    terminal.logs(follow=True)
    assert sorted(terminal.printed) == sorted(everything(1))
    assert [text for text in terminal.messages if "answer" in text] == [
        "host 0 does not answer: ssh: connection refused",
        "host 0 answers again",
    ]


def test_following_ends_where_one_host_has_ended_and_the_other_does_not_answer(work: Workstation) -> None:
    work.hosts.exits[0] = None
    detach(work, work.config())
    work.hosts.end(1)
    work.hosts.silent = {1}
    logs.print_logs(work.config(), work.context(), None, follow=True, host=None)
    assert "no host that may go on writing has answered for 10 minutes" in work.messages[-1]


def test_hosts_are_silent_only_while_none_answers(tmp_path: Path) -> None:
    away = LaunchError("ssh: connection refused")
    terminal = Terminal(tmp_path, [line(0)], [away, RUNNING, away, away])
    files = {worker: terminal.ledger.log_file(0, worker) for worker in (0, 1)}
    fetcher = logs._Fetcher(open_session(terminal.context, terminal.ledger), 0, files)
    for silent in (False, True):
        answered = fetcher.answered
        fetcher.fetch()
        assert (fetcher.answered == answered) == silent
        answered = fetcher.answered
        with terminal.ledger.supervising():  # as a supervisor does: a fetch that it prevents changes nothing
            fetcher.fetch()
        assert (fetcher.answered == answered) == silent


def test_following_an_attempt_ends_although_the_next_one_has_begun(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [line(0)], [RUNNING])
    history = [events.Ended(0, "host lost"), events.AttemptBegan(1, image="r/i@sha256:0", command=("train",))]
    follower = threading.Timer(1.5, lambda: [terminal.ledger.append(event) for event in history])
    follower.start()
    terminal.logs(follow=True)
    follower.join()
    assert sorted(terminal.printed) == sorted(everything(1))


SHORT_PAGE = 100
LONG = [line(number) for number in range(12 * SHORT_PAGE)]


class LongLogs(FakeProvider):
    """Two hosts with LONG, of which one observation holds a tenth."""

    def __init__(self, config: Config, log_files: list[Path], failures: list[Exception | Observation]) -> None:
        super().__init__(config, Hosts([]))
        self.log_files, self.failures = log_files, failures
        self.held = [0, 0]  # the most lines of a host that were observed and not yet in its file

    def observe(self, worker: int, container: str, since: str | None, **_: object) -> Observation:
        if worker == 0 and self.failures:
            failure = self.failures.pop()
            if isinstance(failure, Exception):
                raise failure
            return failure
        begin = 0 if since is None else next(index for index, each in enumerate(LONG) if each.timestamp >= since)
        kept, _ = read_from(self.log_files[worker], 0)
        self.held[worker] = max(self.held[worker], begin - len(kept))
        state = super().observe(worker, container, since).container
        return Observation(worker, state, tuple(LONG[begin : begin + SHORT_PAGE]), more=begin + SHORT_PAGE < len(LONG))


def fetch_rest(work: Workstation, failures: list[Exception | Observation]) -> LongLogs:
    work.run(work.config())
    ledger = work.ledger
    files = [ledger.folder / f"host-{worker}.log" for worker in range(2)]
    provider = LongLogs(work.config(), files, failures)
    context = replace(work.context(), make_provider=lambda config: provider)
    supervision = _Supervision(open_session(context, ledger), 0)
    for worker, log in supervision.logs.items():
        log.path, log.cursor = files[worker], type(log.cursor)()
    this_machine().threads.map(supervision.fetch_rest, [0, 1], at_once=2)
    return provider


def test_the_rest_of_a_host_that_does_not_answer_for_a_moment_is_not_lost(work: Workstation) -> None:
    provider = fetch_rest(work, [Observation(0, None, problem="no route to host"), KeyError("a defect")])
    assert read_from(provider.log_files[0], 0)[0] == LONG


def test_a_line_that_grows_without_an_end_is_a_sign_of_life(work: Workstation) -> None:
    detach(work, work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    for size, lives in ((1, True), (1, False), (2, True)):
        supervision.last_line = -1.0
        supervision.inbox.put(Observation(0, RUNNING, open={"2026-01-01T00:00:00.000000000Z": size}))
        supervision._receive()
        assert (supervision.last_line > 0) == lives


def test_a_host_whose_rest_can_not_be_had_is_named(work: Workstation) -> None:
    fetch_rest(work, [LaunchError("ssh: timed out")] * 9)
    assert "host 0: its last lines may be missing: ssh: timed out" in work.messages
