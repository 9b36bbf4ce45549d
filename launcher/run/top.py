"""`top`: observes the slice's newest run repeatedly, and draws it as lines of text. It changes nothing.

Each look asks the API and every host once, as `status` does, and reads the lines of progress that were kept since the
last look. `render` and `plot` are pure.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher import costs
from launcher.config import Config
from launcher.provider import Provider
from launcher.run.ledger import Ledger
from launcher.run.session import Context, find_run
from launcher.run.status import HostStatus, read_status
from launcher.tpu_vm import slice_hints
from training.machine import format_time
from training.telemetry.progress_line import TRAINING, ProgressLine, parse

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell, by column and row
_BLANK = 0x2800
_LEFT, _CURVE_ROWS = 9, 8  # columns of the labels left of the curve; rows of the curve
_WIDEST_BAR = 40
_WIDE = 120  # columns from which addresses are shown


@dataclass(frozen=True)
class View:
    """A run at one moment."""

    slice: str
    """The slice and its state, in words."""

    run: str
    """The run, its attempt, and its state, in words."""

    time: str
    progress: ProgressLine | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss by step."""

    hosts: Sequence[HostStatus] = ()
    cost: str = ""
    history: Sequence[str] = ()


def render(view: View, columns: int, rows: int | None = None) -> list[str]:
    """Returns the lines of a frame, none wider than `columns`. Leaves out hosts that do as the others
    where there are more lines than `rows`."""
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
    return [_cut(line, columns) for line in lines + history]


def _usualness(host: HostStatus) -> tuple[bool, int, float]:
    """Returns a key that sorts hosts without progress first, then those that are behind, or long in one place."""
    line = host.progress
    return line is not None, line.step if line else 0, -line.doing_seconds if line else 0.0


def plot(losses: Mapping[int, float], columns: int, rows: int) -> list[str]:
    """Returns the curve of the loss over steps in braille dots, `rows` high, with the extreme values and steps as
    labels; [] without finite values."""
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
    """Returns the lines with the step, the bar and the figures of the training."""
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
    """Returns a row for each host; the last log line takes the rest of the width."""
    is_wide = columns >= _WIDE
    address, more = ["address"] * is_wide, ["device memory", "read"] * is_wide
    table = [["host", *address, "container", "step", "doing", "memory", *more, "last line"]]
    for host in hosts:
        quiet = "" if host.quiet_seconds is None else f"{costs.duration(host.quiet_seconds)} ago"
        address = [host.address] * is_wide
        last = f"{quiet}: {host.last_line}" if quiet else host.last_line
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


def _cut(line: str, columns: int) -> str:
    """Returns the line, shortened to `columns` with "…" at its end if it is longer."""
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


class Top:
    """The looks of one `tpu-launch top`."""

    def __init__(self, config: Config, context: Context, provider: Provider) -> None:
        self._config, self._context, self._provider = config, context, provider
        self._losses: dict[int, float] = {}
        self._offsets: dict[int, int] = {}  # in the kept progress, by attempt
        self._run = ""

    def look(self) -> View:
        """Asks the API and the hosts, and returns the newest run's view. Raises LaunchError if the API fails."""
        now = self._context.machine.clock.time()
        status = read_status(self._config, self._context, self._provider)
        created = status.slice.created if status.slice is not None else ""
        lines = status.lines()
        cost = costs.since(slice_hints.in_current_place(self._config), created, now)
        view = View(slice=lines[0], run=lines[1], time=format_time(now), cost=cost)
        if status.run is None:
            return view
        self._read_losses(find_run(self._context.home, self._context.machine, status.run))
        if status.progress is not None and status.progress.loss is not None:
            self._losses[status.progress.step] = status.progress.loss
        return replace(
            view, progress=status.progress, losses=dict(self._losses), hosts=status.hosts, history=status.history
        )

    def _read_losses(self, ledger: Ledger) -> None:
        """Adds the losses that were kept since the last look; a later attempt's replace an earlier one's."""
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
