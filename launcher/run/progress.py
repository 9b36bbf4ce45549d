"""Collects the progress that the hosts of one attempt tell, keeps it for `status` and `top`, and records stragglers."""

from collections.abc import Callable, Mapping

from launcher.run import events
from launcher.run.ledger import Ledger
from launcher.run.stall import ProgressView, update
from launcher.run.stragglers import Watch, own_seconds
from training.telemetry.progress_line import ProgressLine


class HostsProgress:
    """The progress of an attempt."""

    def __init__(self, ledger: Ledger, attempt: int, say: Callable[[str], None]) -> None:
        self._ledger, self._attempt, self._say = ledger, attempt, say
        self.views: dict[int, ProgressView] = {}
        """By worker; only of hosts that report progress."""

        self.stepped = float("-inf")
        """When a host was last seen to do another training step, by the monotonic clock."""

        self._stragglers = Watch()
        self._kept_step = -1  # of the progress that was last kept

    @property
    def lines(self) -> Mapping[int, ProgressLine]:
        """Returns the newest line of each host that reports its progress."""
        return {worker: view.line for worker, view in self.views.items()}

    @property
    def step_seconds(self) -> float | None:
        """Returns the median seconds of the last steps of the first host that tells them; None if none does."""
        return next(filter(None, (view.line.step_seconds for view in self.views.values())), None)

    def moved(self, default: float) -> float:
        """Returns when any host last made progress, by the monotonic clock; `default` before the first line."""
        return max((view.moved for view in self.views.values()), default=default)

    def forgive(self, seconds: float) -> None:
        """Moves all times later by the `seconds` in which this process stood still, so that they do not count."""
        self.views = {worker: view.later(seconds) for worker, view in self.views.items()}
        self.stepped += seconds

    def update(self, worker: int, line: ProgressLine, now: float) -> bool:
        """Takes in a host's newest line and records stragglers; writes the lowest host's to the ledger when its step
        changes. Returns whether it is the host's first line, or its step, phase or count changed."""
        before = self.views.get(worker)
        view = self.views[worker] = update(before, line, now)
        if before is not None and line.step > before.line.step:
            self.stepped = now
        if worker == min(self.views) and line.step != self._kept_step:
            self._kept_step = line.step
            self._ledger.keep_progress(self._attempt, line)
        self._record_stragglers(now)
        return view.moved == now

    def _record_stragglers(self, now: float) -> None:
        """Records and tells a straggler that has begun, and one that has ended; keeps what a step takes each host."""
        lines, window = self.lines, self._stragglers.window
        self._stragglers, begun, ended = self._stragglers.observe(lines, now)
        if window and window is not self._stragglers.window and (seconds := own_seconds(window, lines)):
            self._ledger.keep_hosts(self._attempt, max(line.step for line in lines.values()), seconds)
        if begun is not None:
            number = self._attempt
            found = events.StragglerFound(number, begun.worker, begun.part, round(begun.factor, 2), begun.step)
            self._ledger.note(found, self._say)
            self._say(f"{begun}, since about step {begun.step:,}")
        if ended is not None:
            self._ledger.note(events.StragglerGone(self._attempt, ended.worker, ended.part), self._say)
            self._say(f"host {ended.worker} is as fast as the others again in {ended.part.replace('_', ' ')}")
