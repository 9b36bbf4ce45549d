"""A user's command in the live containers of a slice: its lines as they come, and its exit code on every host.

Over open connections, lines arrive while the command runs, and the command ends with its connection: Ctrl-C, a closed
laptop and a broken network leave no process behind. Through gcloud (`run.transport: gcloud`, IAP, or where our own ssh
is refused), lines arrive when the command has ended.

A command is never run twice, because it need not be safe to repeat, as this package's scripts are. gcloud repeats a
script whose connection breaks: the repetition finds the first one's mark on the host and ends the command.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.provider import CommandReport
from launcher.tpu_vm import host_scripts
from launcher.tpu_vm.connections import HostResult, SliceConnections
from launcher.workstation import Workstation

_ANSWER_SECONDS = 20.0  # for a host to connect, and to report the end of a command whose time is over
_AT_ONCE = 64


@dataclass
class Execution:
    """One command in the containers (of one name) of some hosts."""

    connections: SliceConnections
    machine: Workstation
    container: str
    command: Sequence[str]
    seconds: int  # after which it is ended
    on_line: Callable[[int, str], None]  # given the worker and each line, by one thread at a time for each host

    def __post_init__(self) -> None:
        self._mark = f"{host_scripts.EXECUTION_MARK}{self.machine.random.randrange(1 << 64):016x}"
        self._last = re.compile(rf"(.*){self._mark} (exit|failed) (.*)", re.DOTALL)
        self._endings: dict[int, tuple[str, str]] = {}  # by worker: exit and the code, or failed and why

    def run(self, workers: Sequence[int]) -> list[CommandReport]:
        """Runs the command on these hosts at once, through gcloud where ssh is refused, until it has ended on all.
        Returns how each one ended, also if not reached. Raises LaunchError if gcloud gives no addresses."""
        if self.connections.gcloud_only:
            return self._run_through_gcloud(workers)
        pool, script = self.connections.open_pool(), self._script(held=True)

        def follow(worker: int) -> tuple[CommandReport, bool]:
            """Runs the command on one host, and ends it with the connection. Returns how it ended, and if refused."""
            take, timeout = functools.partial(self._take, worker), self.seconds + _ANSWER_SECONDS
            result = pool.follow(worker, script, timeout=timeout, on_line=take)
            return self._report(result), result.refused

        reports = self.machine.threads.map(follow, sorted(workers), at_once=_AT_ONCE)
        refused = [report.worker for report, is_refused in reports if is_refused]
        through_gcloud = {report.worker: report for report in self._run_through_gcloud(refused)} if refused else {}
        return [through_gcloud.get(report.worker, report) for report, _ in reports]

    def _run_through_gcloud(self, workers: Sequence[int]) -> list[CommandReport]:
        """Runs the command by a gcloud call a host; its lines come at its end. If interrupted, ends it on the hosts."""
        script = self._script(held=False)
        try:
            results = self.connections.run_all_through_gcloud(script, workers, timeout=self.seconds)
        except BaseException:  # gcloud and ssh were killed here, and the hosts do not know
            end = host_scripts.end_execution_script(self.container, self._mark)
            self.connections.run_all_through_gcloud(end, workers, timeout=_ANSWER_SECONDS)
            raise
        for result in results:
            for line in result.stdout.splitlines():
                self._take(result.worker, line)
        return [self._report(result) for result in results]

    def _script(self, *, held: bool) -> str:
        """Returns the script for a host; `held`: it ends the command when its standard input ends."""
        return host_scripts.execute_script(self.container, self.command, self._mark, seconds=self.seconds, held=held)

    def _take(self, worker: int, line: str) -> None:
        """Passes on a line of the command, and keeps what its script's last line reports."""
        if worker not in self._endings and (match := self._last.fullmatch(line)):
            before, word, detail = match.groups()  # a last line without its end stands before the mark
            self._endings[worker] = word, detail
            if not before:
                return
            line = before
        self.on_line(worker, line)

    def _report(self, result: HostResult) -> CommandReport:
        """Returns how the command ended on a host, as the script's last line says, or why that line is missing."""
        ended = self.machine.clock.monotonic()
        missing = result.problem or "the connection ended before the command did"
        word, detail = self._endings.get(result.worker, ("failed", missing))
        if word == "failed":
            return CommandReport(result.worker, None, ended, detail)
        return CommandReport(result.worker, int(detail), ended)
