"""A user's command in the live containers of a slice: its lines as they come, and its exit code on every host.

Over open connections, lines arrive while the command runs, and the command ends with its connection: Ctrl-C, a closed
laptop and a broken network leave no process behind. Through gcloud (`run.transport: gcloud`, IAP, or where our own ssh
is refused), lines arrive when the command has ended.

A command is never run twice, because it need not be safe to repeat, as this package's scripts are. gcloud repeats a
script whose connection breaks: the repetition finds the first one's mark on the host and ends the command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from launcher.provider import CommandReport
from launcher.tpu_vm import host_scripts
from launcher.tpu_vm.connections import HostResult, SliceConnections
from launcher.workstation import Workstation

_ANSWER_SECONDS = 20.0  # for a host to connect, and to report the end of a command whose time is over
_AT_ONCE = 64

OnLine = Callable[[int, str], None]


class Execution:
    """One command in the containers of some hosts.

    Args:
        container: The container's name, the same on every host.
        seconds: Time limit of the command.
        on_line: Is given the worker index and each line, by one thread at a time for each host.
    """

    def __init__(
        self,
        connections: SliceConnections,
        machine: Workstation,
        container: str,
        command: Sequence[str],
        *,
        seconds: float,
        on_line: OnLine,
    ) -> None:
        self._connections, self._machine = connections, machine
        self._container, self._command, self._seconds = container, command, math.ceil(seconds)
        self._on_line = on_line
        self._mark = f"{host_scripts.EXECUTION_MARK}{machine.random.randrange(1 << 64):016x}"
        self._last = re.compile(rf"(.*){self._mark} (exit|failed) (.*)", re.DOTALL)

    def run(self, workers: Sequence[int]) -> list[CommandReport]:
        """Runs the command on these hosts at once, through gcloud where ssh is refused. Returns how each one ended."""
        if self._connections.gcloud_only:
            return self._run_through_gcloud(workers)
        pool = self._connections.open_pool()
        reports = self._machine.threads.map(
            lambda worker: self._follow(worker, pool.follow), sorted(workers), at_once=_AT_ONCE
        )
        refused = [report.worker for report, result in reports if result.refused]
        through_gcloud = {report.worker: report for report in self._run_through_gcloud(refused)} if refused else {}
        return [through_gcloud.get(report.worker, report) for report, _ in reports]

    def _follow(self, worker: int, follow: Callable[..., HostResult]) -> tuple[CommandReport, HostResult]:
        """Runs the command on one host by `follow`, and ends it with the connection. Returns report and result."""
        lines = _Lines(worker, self._on_line, self._last)
        script = self._script(held=True)
        result = follow(worker, script, timeout=self._seconds + _ANSWER_SECONDS, on_line=lines.take)
        return self._report(worker, lines, result), result

    def _run_through_gcloud(self, workers: Sequence[int]) -> list[CommandReport]:
        """Runs the command by a gcloud call a host; its lines come at its end. If interrupted, ends it on the hosts."""
        script = self._script(held=False)
        try:
            results = self._connections.run_all_through_gcloud(script, workers, timeout=self._seconds)
        except BaseException:  # gcloud and ssh were killed here, and the hosts do not know
            end = host_scripts.end_execution_script(self._container, self._mark)
            self._connections.run_all_through_gcloud(end, workers, timeout=_ANSWER_SECONDS)
            raise
        reports = []
        for result in results:
            lines = _Lines(result.worker, self._on_line, self._last)
            for line in result.stdout.splitlines():
                lines.take(line)
            reports.append(self._report(result.worker, lines, result))
        return reports

    def _script(self, *, held: bool) -> str:
        """Returns the script for a host; `held`: it ends the command when its standard input ends."""
        return host_scripts.execute_script(self._container, self._command, self._mark, seconds=self._seconds, held=held)

    def _report(self, worker: int, lines: _Lines, result: HostResult) -> CommandReport:
        """Returns how the command ended on a host, as the script's last line says, or why that line is missing."""
        ended = self._machine.clock.monotonic()
        if lines.ending is None:
            problem = result.problem or "the connection ended before the command did"
            return CommandReport(worker, None, ended, problem)
        word, detail = lines.ending
        if word == "failed":
            return CommandReport(worker, None, ended, detail)
        return CommandReport(worker, int(detail), ended)


class _Lines:
    """Splits one host's output into the command's lines and the last line, which reports its end."""

    def __init__(self, worker: int, on_line: OnLine, last: re.Pattern[str]) -> None:
        self._worker, self._on_line, self._last = worker, on_line, last
        self.ending: tuple[str, str] | None = None

    def take(self, line: str) -> None:
        """Passes on a line of the command; keeps what its script's last line reports (exit or failed) in `ending`."""
        if self.ending is None and (match := self._last.fullmatch(line)):
            before, word, detail = match.groups()  # a last line without its end stands before the mark
            self.ending = word, detail
            if not before:
                return
            line = before
        self._on_line(self._worker, line)
