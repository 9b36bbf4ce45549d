"""Claims about fetching what hosts wrote last, when an attempt has ended: all of it, a page at a time, also from a host
that did not answer for a moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.config import Config
from launcher.errors import LaunchError
from launcher.provider import LogLine, Observation
from launcher.run.logs import read_from
from launcher.run.session import open_session
from launcher.run.specification import SecretSource
from launcher.run.supervise import _Supervision
from tests.launcher.test_runs import FakeProvider, Hosts, Workstation, work

__all__ = ["work"]

PAGE, PAGES = 100, 12


def line(number: int) -> LogLine:
    return LogLine(f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.{number:09}Z", f"line {number}")


LINES = [line(number) for number in range(PAGE * PAGES)]


class LongLogs(FakeProvider):
    """Two hosts with more lines than one observation holds."""

    def __init__(self, config: Config, log_files: list[Path], failures: list[Exception | Observation]) -> None:
        super().__init__(config, Hosts([]))
        self.log_files, self.failures = log_files, failures
        self.held = [0, 0]
        """The most lines of a host that were observed and not yet in its file."""

    def observe(self, worker: int, container: str, since: str | None, *, patience: float = 0.0) -> Observation:
        if worker == 0 and self.failures:
            failure = self.failures.pop()
            if isinstance(failure, Exception):
                raise failure
            return failure
        begin = 0 if since is None else next(index for index, each in enumerate(LINES) if each.timestamp >= since)
        kept, _ = read_from(self.log_files[worker], 0)
        self.held[worker] = max(self.held[worker], begin - len(kept))
        state = super().observe(worker, container, since).container
        return Observation(worker, state, tuple(LINES[begin : begin + PAGE]), more=begin + PAGE < len(LINES))


def fetch(work: Workstation, failures: list[Exception | Observation]) -> LongLogs:
    work.run(work.config())
    ledger = work.ledger
    files = [ledger.folder / f"host-{worker}.log" for worker in range(2)]
    provider = LongLogs(work.config(), files, failures)
    context = replace(work.context(), make_provider=lambda config: provider)
    supervision = _Supervision(open_session(context, ledger, SecretSource({}, {})), 0)
    for worker, log in supervision.logs.items():
        log.path, log.cursor = files[worker], type(log.cursor)()
    supervision.fetch_rest([0, 1])
    return provider


def test_of_a_huge_rest_one_page_a_host_is_held(work: Workstation) -> None:
    provider = fetch(work, [])
    assert [read_from(path, 0)[0] for path in provider.log_files] == [LINES, LINES]
    assert max(provider.held) <= 1


def test_the_rest_of_a_host_that_does_not_answer_for_a_moment_is_not_lost(work: Workstation) -> None:
    provider = fetch(work, [Observation(0, None, problem="no route to host"), LaunchError("ssh: timed out")])
    assert read_from(provider.log_files[0], 0)[0] == LINES


def test_a_host_whose_rest_can_not_be_had_is_named(work: Workstation) -> None:
    fetch(work, [LaunchError("ssh: timed out")] * 9)
    assert "host 0: its last lines may be missing: ssh: timed out" in work.messages
