"""`logs` prints every line of an unwatched run and ends; an attempt that ended delivers its last lines."""

from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest

from launcher.errors import LaunchError
from launcher.provider import ContainerState, LogLine, Observation
from launcher.providers import this_machine
from launcher.run import events, logs
from launcher.run.logs import read_from
from launcher.run.session import Context, open_session
from launcher.run.supervise import _Supervision
from tests.launcher.test_runs import FakeProvider, Workstation, detach

pytestmark = pytest.mark.timeout(60)  # a command that goes on without end
RUNNING, EXITED = ContainerState("running"), ContainerState("exited", 1, finished_at="2026-01-01T01:00:00Z")
AWAY = LaunchError("ssh: connection refused\nand more")
Answer = ContainerState | Observation | Exception


def write_lines(count: int) -> list[LogLine]:
    times = (f"2026-01-01T00:{n // 60 % 60:02}:{n % 60:02}.{n:09}Z" for n in range(count))
    return [LogLine(time, f"line {number}") for number, time in enumerate(times)]


@dataclass
class WritingHosts(FakeProvider):
    """The hosts, whose containers have written lines, a page of which is shown at once."""

    work: Workstation
    lines: list[LogLine]
    answers: list[Answer]  # to one look after another; the last one stays
    page: int

    def __post_init__(self) -> None:
        super().__init__(self.work.config(), self.work.hosts)

    def observe(self, worker: int, container: str, since: str | None, **_: object) -> Observation:
        self.hosts.call("observe")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Observation):
            return answer
        lines = [each for each in self.lines if since is None or each.timestamp >= since]
        return Observation(worker, answer, tuple(lines[: self.page]), more=len(lines) > self.page)


def lose_sight(work: Workstation, count: int, *answers: Answer, page: int = 1000) -> Context:
    """Starts a run that no process supervises. Returns the context of a command that finds `count` lines."""
    detach(work, work.config())
    work.messages.clear()
    provider = WritingHosts(work, write_lines(count), list(answers), page)
    return replace(work.context(), make_provider=lambda config: provider)


def print_logs(work: Workstation, count: int, *answers: Answer, follow: bool = True) -> None:
    """Prints the logs of such a run: all lines of both hosts, in any order."""
    context, printed = lose_sight(work, count, *answers), list[tuple[int, str]]()
    output = replace(context.output, emit=lambda worker, line: printed.append((worker, line.text)))
    logs.print_logs(work.config(), replace(context, output=output), None, follow=follow, host=None)
    assert sorted(printed) == sorted((worker, f"line {number}") for worker in (0, 1) for number in range(count))


def test_logs_print_all_lines_of_a_backlog_that_exceeds_one_look(work: Workstation) -> None:
    print_logs(work, 3000, RUNNING, follow=False)


def test_following_without_a_supervisor_ends_with_the_containers_and_says_what_is_next(work: Workstation) -> None:
    print_logs(work, 2500, RUNNING, RUNNING, EXITED)
    (message,) = work.messages
    assert "its containers have ended" in message
    assert "tpu-launch run --attach" in message
    assert work.ledger.state.outcome is None  # only a supervisor says how it ended


def test_a_host_that_can_not_be_asked_is_named_once_and_asked_again(work: Workstation) -> None:
    print_logs(work, 1, AWAY, RUNNING, AWAY, RUNNING, EXITED)
    told = ["host 0 does not answer: ssh: connection refused", "host 0 answers again"]
    assert [text for text in work.messages if "answer" in text] == told


def test_following_ends_where_one_host_has_ended_and_the_other_does_not_answer(work: Workstation) -> None:
    work.hosts.exits[0] = None
    detach(work, work.config())
    work.hosts.end(1)
    work.hosts.silent = {1}
    logs.print_logs(work.config(), work.context(), None, follow=True, host=None)
    assert "no host that may go on writing has answered for 10 minutes" in work.messages[-1]


def test_hosts_are_silent_only_while_none_answers(work: Workstation) -> None:
    context = lose_sight(work, 1, AWAY, RUNNING, AWAY, AWAY)
    files = {worker: work.ledger.log_file(0, worker) for worker in (0, 1)}
    fetcher = logs._Fetcher(open_session(context, work.ledger), 0, files)
    for silent in (False, True):
        answered = fetcher.answered
        fetcher.fetch()
        assert (fetcher.answered == answered) == silent
        answered = fetcher.answered
        with work.ledger.supervising():  # as a supervisor does: a fetch that it prevents changes nothing
            fetcher.fetch()
        assert (fetcher.answered == answered) == silent


def test_following_an_attempt_ends_although_the_next_one_has_begun(work: Workstation) -> None:
    def go_on() -> None:
        for event in events.Ended(0, "host lost"), events.AttemptBegan(1, image="i", command=("train",)):
            work.ledger.append(event)

    work.hosts.hooks["observe"] = [*[lambda: None] * 6, go_on]
    print_logs(work, 1, RUNNING)
    assert work.ledger.state.attempt == 1


def fetch_rest(work: Workstation, *answers: Answer) -> logs.AttemptLogs:
    attempt_logs = logs.AttemptLogs(open_session(lose_sight(work, 1200, *answers, page=100), work.ledger), 0)
    this_machine().threads.map(attempt_logs.fetch_rest, [0, 1], at_once=2)
    return attempt_logs


def test_the_rest_of_a_host_that_does_not_answer_for_a_moment_is_not_lost(work: Workstation) -> None:
    attempt_logs = fetch_rest(work, Observation(0, None, problem="no route to host"), KeyError("a defect"), EXITED)
    for log in attempt_logs.hosts.values():
        assert read_from(log.path, 0)[0] == write_lines(1200)


@pytest.mark.parametrize("answer", [AWAY, EXITED])
def test_hosts_whose_rest_is_lost_are_named(work: Workstation, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr("launcher.run.logs._LAST_SECONDS", -1.0)  # after which only a huge log's end is read
    monkeypatch.setattr(FakeProvider, "look", Mock(side_effect=AWAY))
    fetch_rest(work, answer)
    lost = "its last lines may be missing: ssh: connection refused"
    assert {f"host {worker}: {lost}" for worker in (0, 1)} <= {*work.messages}


def test_a_line_that_grows_without_an_end_is_a_sign_of_life(work: Workstation) -> None:
    detach(work, work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    for size, lives in ((1, True), (1, False), (2, True)):
        supervision.last_line = -1.0
        supervision.inbox.put(Observation(0, RUNNING, open={"2026-01-01T00:00:00.000000000Z": size}))
        supervision._receive()
        assert (supervision.last_line > 0) == lives
