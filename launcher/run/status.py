"""Looks at a run: `status`, `events` and `top`. They change nothing, on hosts or in the run's folder.

`status` asks the API and every host once. `top` does so repeatedly, reads the lines of progress that were kept since
its last look, and draws them as lines of text. `render` and `plot` are pure.
"""

import contextlib
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.provider import LogLine, Provider, SliceState, container_name
from launcher.run import events
from launcher.run.events import Entry
from launcher.run.ledger import Ledger
from launcher.run.logs import tail
from launcher.run.session import Context, find_on_slice, find_run
from launcher.run.state import Phase
from launcher.run.verdict import describe_exit
from launcher.tpu_vm import slice_hints
from launcher.workstation import Workstation
from training.machine import format_time, parse_time
from training.telemetry.progress_line import TRAINING, ProgressLine, parse, slowest

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell, by column and row
_BLANK = 0x2800
_LEFT, _CURVE_ROWS = 9, 8  # columns of the labels left of the curve; rows of the curve
_WIDEST_BAR = 40
_WIDE = 120  # columns from which addresses are shown
_LAST_LINE_BYTES = 20_000  # of a host's log, for its last line
_RECENT_SECONDS = 60.0  # how far back hosts are asked for lines
_HISTORY_LINES = 8
_SHOWN_CHARACTERS = 500  # of a host's last line
# Events that `status` shows.
_SHOWN = (
    events.Supervised,
    events.Started,
    events.Ended,
    events.RunStopRequested,
    events.Recovering,
    events.Recovered,
    events.HostOutOfReach,
    events.HostBack,
    events.StragglerFound,
    events.StragglerGone,
)


@dataclass(frozen=True)
class HostStatus:
    """A host of a run, as `status` shows it."""

    worker: int
    address: str
    container: str  # its state, or why the host could not be asked
    last_line: str
    quiet_seconds: float | None = None  # between its last line (host's clock) and now (this machine's)
    progress: ProgressLine | None = None  # of its slowest process

    @property
    def age(self) -> str:
        """Returns the age of its last line, in words; "" if it is not known."""
        return "" if self.quiet_seconds is None else f"{costs.duration(self.quiet_seconds)} ago"


@dataclass(frozen=True)
class Status:
    """A slice, its newest run, and its hosts, as `status` shows them."""

    slice_name: str
    slice: SliceState | None
    run: str | None
    attempt: int | None  # the newest; None before the first
    outcome: str | None
    history: list[str]
    hosts: list[HostStatus]
    progress: ProgressLine | None = None  # of the first host that tells it

    def lines(self) -> list[str]:
        """Returns the slice, the run, its progress and its history in lines for the user, without the hosts."""
        if self.slice is None:
            lines = [f"slice {self.slice_name}: does not exist"]
        else:
            detail = f" ({self.slice.detail})" if self.slice.detail else ""
            hosts = f"{len(self.slice.hosts)} hosts"
            lines = [f"slice {self.slice_name}: {self.slice.state}, {self.slice.accelerator_type}, {hosts}{detail}"]
        if self.run is None:
            return [*lines, "no run was started from this folder yet"]
        newest = f"attempt {self.attempt}, {self.outcome or 'running'}"
        lines.append(f"run {self.run}: {'never started' if self.attempt is None else newest}")
        if self.progress is not None:
            lines.append(f"  {describe_progress(self.progress)}")
        return [*lines, *(f"  {line}" for line in self.history)]

    def rows(self) -> list[list[str]]:
        """Returns a row for each host: worker, address, container, age of the last line, the line."""
        return [[str(host.worker), host.address, host.container, host.age, host.last_line] for host in self.hosts]


def read_status(config: Config, context: Context, provider: Provider, run_id: str | None = None) -> Status:
    """Asks the API, and each host once if the run (the newest without `run_id`) has an open attempt and the slice is
    READY. Returns the slice, that run's state, progress and history (none without any run), and a status for each host
    asked. Raises LaunchError if the API fails, BadInput for an unknown `run_id` or a run of another version."""
    slice_state = provider.describe()
    try:
        ledger = find_on_slice(config, context, run_id)
    except BadInput:
        if run_id is not None:
            raise
        return Status(config.slice.name, slice_state, None, None, None, [], [])
    state, hosts = ledger.state, list[HostStatus]()
    if slice_state is not None and slice_state.state == "DELETED" and state.phase is Phase.STARTING:
        slice_state = replace(slice_state, state="READY")  # its JobSet is not made yet
    if slice_state is not None and slice_state.ready and state.phase.is_open:
        hosts = _look_at_hosts(provider, ledger, slice_state.hosts, context.machine)
    progress = next((host.progress for host in hosts if host.progress), ledger.newest_progress(state.attempt))
    number, history = None if state.phase is Phase.NEW else state.attempt, recent_history(ledger)
    return Status(config.slice.name, slice_state, ledger.run_id, number, state.outcome, history, hosts, progress)


def recent_history(ledger: Ledger) -> list[str]:
    """Returns the last eight events that `status` shows, one line each. Raises BadInput as `Ledger.entries`."""
    return [describe_event(entry) for entry in ledger.entries() if isinstance(entry.event, _SHOWN)][-_HISTORY_LINES:]


def describe_event(entry: Entry) -> str:
    """Returns one event of a run's ledger as a line for the user."""
    event = entry.event
    name, host = event.kind, getattr(event, "host", None)
    if host is not None:
        name = name.replace("host", f"host {host}", 1) if name.startswith("host") else f"{name} on host {host}"
    details = _describe_details(event)
    cause = event.cause if isinstance(event, events.Ended) else None
    where = f"host {cause.worker}: {cause.what}" if cause is not None and cause.worker >= 0 else None
    return f"{entry.time} attempt {event.attempt}: " + ": ".join(part for part in (name, details, where) if part)


def _describe_details(event: events.RunEvent) -> str:
    """Returns a Recovered or StragglerFound event's figures, or the first of outcome, problem, reason, path and holder
    that an event has; "" without any."""
    if isinstance(event, events.Recovered):
        seconds = event.seconds
        parts = ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
        return f"in {sum(seconds.values()):.1f} s: {parts}"
    if isinstance(event, events.StragglerFound):
        return f"{event.factor:.1f} times the others' time in {event.part} since step {event.step:,}"
    texts = (getattr(event, name, "") for name in ("outcome", "problem", "reason", "path", "holder"))
    return str(next(filter(None, texts), ""))


def _look_at_hosts(
    provider: Provider, ledger: Ledger, addresses: Sequence[str], machine: Workstation
) -> list[HostStatus]:
    """Asks all hosts at once about the newest attempt. Returns the container and progress of each, and its newest line
    of the last minute, or else of its kept log, with the line's age; at most 500 characters of the line."""
    number, since = ledger.state.attempt, format_time(machine.clock.time() - _RECENT_SECONDS)
    container = container_name(ledger.run_id, number)

    def look(worker: int) -> HostStatus:
        observation = provider.observe(worker, container, since, progress=True)
        lines: Sequence[LogLine] = observation.lines
        if observation.more:  # it ends before the newest line
            with contextlib.suppress(LaunchError):
                lines = provider.look(worker, container, lines=1).lines or lines
        kept = ledger.log_file(number, worker)
        if not lines and kept.exists():
            lines = tail(kept, _LAST_LINE_BYTES)
        last = lines[-1] if lines else LogLine("", "")
        written = parse_time(last.timestamp)
        quiet = None if written is None else max(0.0, round(machine.clock.time() - written, 1))
        text = last.text.rstrip("\r").rpartition("\r")[2][:_SHOWN_CHARACTERS]  # a progress bar's newest state
        state = f"not reachable: {observation.problem}"
        if (found := observation.container) is not None:
            state = describe_exit(found) if found.ended else found.status
        return HostStatus(worker, addresses[worker], state, text, quiet, slowest(observation.progress))

    return machine.threads.map(look, range(len(addresses)), at_once=64)


def describe_progress(line: ProgressLine) -> str:
    """Returns step, phase, loss and rate of a line, as far as it tells them."""
    parts = [f"step {line.step:,}/{line.steps:,}" if line.steps else f"step {line.step:,}", line.phase]
    parts.append("" if line.loss is None else f"loss {line.loss:.5f}")
    parts.append(f"{line.examples_per_second:,.1f} examples/s" if line.examples_per_second else "")
    return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class View:
    """A run at one moment."""

    slice: str  # the slice and its state, in words
    run: str  # the run, its attempt, and its state, in words
    time: str
    progress: ProgressLine | None = None
    losses: Mapping[int, float] = field(default_factory=dict)  # loss by step
    hosts: Sequence[HostStatus] = ()
    cost: str = ""
    history: Sequence[str] = ()


def render(view: View, columns: int, rows: int | None = None) -> list[str]:
    """Returns the lines of `top`, none wider than `columns`. If they are more than `rows` (None: no limit), shows only
    the hosts that fit, at least one: first those without progress, behind or slow. Says how many are left out. May
    still return more than `rows`."""
    lines = [_spread(view.run, view.time, columns), view.slice]
    if view.cost:
        lines.append(view.cost)
    lines += ["", *_progress(view, columns), ""]
    if len(view.losses) > 1:
        lines += [*plot(view.losses, columns, _CURVE_ROWS), ""]
    newest = textwrap.wrap(view.history[-1], columns, subsequent_indent="  ") if view.history else []  # may be long
    history = ["", *view.history[:-1], *newest] if view.history else []
    room = len(view.hosts) if rows is None else max(1, rows - len(lines) - len(history) - 2)  # beside two lines
    hosts = sorted(sorted(view.hosts, key=_usualness)[:room], key=lambda host: host.worker)
    lines += _hosts(hosts, columns) if hosts else []
    if left := len(view.hosts) - len(hosts):
        lines.append(f"and {left} more")
    return [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in lines + history]


def _usualness(host: HostStatus) -> tuple[bool, int, float]:
    """Returns a key that sorts hosts without progress first, then those that are behind, or long in one place."""
    line = host.progress
    return line is not None, line.step if line else 0, -line.doing_seconds if line else 0.0


def plot(losses: Mapping[int, float], columns: int, rows: int) -> list[str]:
    """Returns the loss over steps in braille dots, `rows` lines high (2 or more), `columns` wide with the extremes as
    labels, between a title and a line of the first and last step; [] if no loss is finite."""
    points = sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))
    if not points:
        return []
    width = max(1, columns - _LEFT)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = (high / 2 - low / 2) or 1.0  # halve before subtracting: the span may overflow a float
    first, last = points[0][0], points[-1][0]
    cells = [[_BLANK] * width for _ in range(rows)]
    for step, loss in points:
        x = round((step - first) / max(1, last - first) * (width * 2 - 1))
        y = round((high / 2 - loss / 2) / span * (rows * 4 - 1))
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    labels = [f"{high:.4g}", *[""] * (rows - 2), f"{low:.4g}"]
    lines = [
        f"{label:>{_LEFT - 2}} │{''.join(map(chr, row))}".rstrip(chr(_BLANK))
        for label, row in zip(labels, cells, strict=True)
    ]
    return [f"{'loss':>{_LEFT - 2}}", *lines, _spread(f"{'step':>{_LEFT - 2}}  {first:,}", f"{last:,}", columns)]


def _progress(view: View, columns: int) -> list[str]:
    """Returns the step, the bar and the figures of the training in one or two lines, or says that there are none."""
    now = view.progress
    if now is None:
        return ["no step was reported yet"]
    if not now.steps:
        return [f"step {now.step:,}"]
    share = now.step / now.steps
    figures = f"{now.examples_per_second:,.1f} examples/s   data wait {now.data_wait:.0%}"
    figures = figures if now.loss is None else f"loss {now.loss:.5f}   {figures}"
    if now.left:
        figures += f"   {now.left} left"
    head = f"step {now.step:,}/{now.steps:,}  {share:4.0%}  "
    width = min(_WIDEST_BAR, columns - len(head))
    filled = round(share * width)
    bar = f"{head}{'█' * filled}{'░' * (width - filled)}"
    both = f"{bar}   {figures}"
    return [both] if len(both) <= columns else [bar, figures]


def _hosts(hosts: Sequence[HostStatus], columns: int) -> list[str]:
    """Returns a header and a row for each host, the last log line at its end, uncut: `columns` only decides whether
    addresses, device memory and bytes read are shown."""
    is_wide = columns >= _WIDE
    address, more = ["address"] * is_wide, ["device memory", "read"] * is_wide
    table = [["host", *address, "container", "step", "doing", "memory", *more, "last line"]]
    for host in hosts:
        address = [host.address] * is_wide
        last = f"{host.age}: {host.last_line}" if host.age else host.last_line
        line = host.progress
        told = ["?", "", "?"] + ["?", "?"] * is_wide
        if line is not None:
            told = [f"{line.step:,}", _doing(line), _memory(line.memory_used, line.memory_total)]
            devices = _memory(line.device_memory_used, line.device_memory_total)
            told += [devices, f"{line.bytes_read / 2**30:.1f} GiB" if line.bytes_read else "?"] * is_wide
        table.append([str(host.worker), *address, host.container, *told, last])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    ]


def _doing(line: ProgressLine) -> str:
    """Returns the phase or, if a part of a training step takes long, that part and for how long."""
    slow = line.phase == TRAINING and line.doing_seconds > max(10.0, 3 * line.step_seconds)
    return f"{line.doing} {costs.duration(line.doing_seconds)}" if slow else line.phase


def _memory(used: int, total: int) -> str:
    """Returns bytes in use and in total as "12.5/188 GiB"; "?" where they are not told."""
    return f"{used / 2**30:.1f}/{total / 2**30:.0f} GiB" if total else "?"


def _spread(left: str, right: str, columns: int) -> str:
    """Returns both texts on one line, the right one at the end of the columns, two blanks apart at least."""
    return f"{left}{right:>{max(len(right) + 2, columns - len(left))}}"


class Top:
    """The looks of one `tpu-launch top`."""

    def __init__(self, config: Config, context: Context, provider: Provider) -> None:
        self._config, self._context, self._provider = config, context, provider
        self._losses: dict[int, float] = {}
        self._offsets: dict[int, int] = {}  # in the kept progress, by attempt
        self._run = ""

    def look(self) -> View:
        """Asks the API and the hosts, and returns the newest run's view; without any run, only the slice's. Raises
        LaunchError if the API fails, BadInput for a run of another version."""
        now = self._context.machine.clock.time()
        status = read_status(self._config, self._context, self._provider)
        created = status.slice.created if status.slice is not None else ""
        lines = status.lines()
        cost = costs.since(slice_hints.in_current_place(self._config), created, now)
        if status.run is None:
            return View(lines[0], lines[1], format_time(now), cost=cost)
        self._read_losses(find_run(self._context.home, self._context.machine, status.run))
        losses, hosts, history = self._losses, status.hosts, status.history
        if status.progress is not None and status.progress.loss is not None:
            losses[status.progress.step] = status.progress.loss
        return View(lines[0], lines[1], format_time(now), status.progress, dict(losses), hosts, cost, history)

    def _read_losses(self, ledger: Ledger) -> None:
        """Adds the losses kept since the last look; a later attempt's loss of a step replaces an earlier one's. Drops
        the losses of another run."""
        if ledger.run_id != self._run:
            self._run, self._losses, self._offsets = ledger.run_id, {}, {}
        for attempt in range(ledger.state.attempt + 1):
            path = ledger.progress_file(attempt)
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self._offsets.get(attempt, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[attempt] = self._offsets.get(attempt, 0) + len(whole) + len(newline)
            for line in filter(None, map(parse, whole.decode(errors="replace").splitlines())):
                if line.loss is not None:
                    self._losses[line.step] = line.loss
