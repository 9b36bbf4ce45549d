"""`top`: observes the slice's newest run repeatedly, and draws it as lines of text. It changes nothing.

Each look asks the API and every host once, as `status` does, and reads what was appended to the run's logs since the
last look. `render` and `plot` are pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.provider import Provider, container_name
from launcher.run.ledger import Ledger
from launcher.run.logs import read_from
from launcher.run.runs import find_run
from launcher.run.session import Context
from launcher.run.status import HostStatus, read_status
from launcher.tpu_vm import slice_hints
from training.machine.clock import format_time
from training.telemetry.text import ProgressFigures, parse_progress

_MEMORY_SECONDS = 10  # for a host to report its memory
_MEMINFO = re.compile(r"(MemTotal|MemAvailable): +(\d{1,15}) kB")
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
    progress: ProgressFigures | None = None
    left: str = ""
    """Time left, in the trainer's words."""

    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss by step."""

    hosts: Sequence[HostStatus] = ()
    memory: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes in use and in total, by worker; without workers that did not report."""

    cost: str = ""
    history: Sequence[str] = ()


def render(view: View, columns: int) -> list[str]:
    """Returns the lines of a frame, none wider than `columns`."""
    lines = [_spread(view.run, view.time, columns), view.slice]
    if view.cost:
        lines.append(view.cost)
    lines += ["", *_progress(view, columns), ""]
    if len(view.losses) > 1:
        lines += [*plot(view.losses, columns, _CURVE_ROWS), ""]
    lines += _hosts(view, columns)
    if view.history:
        lines += ["", *view.history]
    return [_cut(line, columns) for line in lines]


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
    share = now.step / now.steps if now.steps else 0.0
    figures = f"loss {now.loss:.5f}   {now.examples_per_second:,.1f} examples/s   data wait {now.data_wait:.0%}"
    if view.left:
        figures += f"   {view.left} left"
    head = f"step {now.step:,}/{now.steps:,}  {share:4.0%}  "
    width = min(_WIDEST_BAR, columns - len(head))
    filled = round(share * width)
    bar = f"{head}{'█' * filled}{'░' * (width - filled)}"
    both = f"{bar}   {figures}"
    return [both] if len(both) <= columns else [bar, figures]


def _hosts(view: View, columns: int) -> list[str]:
    """Returns a row for each host; the last log line takes the rest of the width."""
    table = [["host", *(["address"] if columns >= _WIDE else []), "container", "memory", "last line"]]
    for host in view.hosts:
        quiet = "" if host.quiet_seconds is None else f"{costs.duration(host.quiet_seconds)} ago"
        address = [host.address] if columns >= _WIDE else []
        last = f"{quiet}: {host.last_line}" if quiet else host.last_line
        table.append([str(host.worker), *address, host.container, _memory(view.memory.get(host.worker)), last])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    ]


def _memory(bytes_used: tuple[int, int] | None) -> str:
    """Returns bytes in use and in total as "12.5/188 GiB"; "?" for None."""
    if bytes_used is None:
        return "?"
    used, total = (amount / 2**30 for amount in bytes_used)
    return f"{used:.1f}/{total:.0f} GiB"


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
        self._offsets: dict[int, int] = {}  # in host 0's log, by attempt
        self._run = ""

    def look(self) -> View:
        """Asks the API and the hosts, and returns the newest run's view. Raises LaunchError if the API fails."""
        now = self._context.machine.clock.time()
        status = read_status(self._config, self._context, self._provider)
        created = status.slice.created if status.slice is not None else ""
        lines = status.lines()
        cost = costs.since(slice_hints.in_current_zone(self._config), created, now)
        view = View(slice=lines[0], run=lines[1], time=format_time(now), cost=cost)
        ledger = self._find_run()
        if status.run is None or ledger is None:
            return view
        self._read_losses(ledger)
        if status.progress is not None:
            self._losses[status.progress.step] = status.progress.loss
        running = [host.worker for host in status.hosts if host.container == "running"]
        return replace(
            view,
            progress=status.progress,
            left="" if status.progress is None else status.progress.left,
            losses=dict(self._losses),
            hosts=status.hosts,
            memory=self._read_memory(ledger, running),
            history=status.history,
        )

    def _find_run(self) -> Ledger | None:
        """Returns the newest run of the slice; None if there is none."""
        config, context = self._config, self._context
        try:
            return find_run(context.home, context.machine, None, slice_name=config.slice.name, provider=config.provider)
        except BadInput:
            return None

    def _read_losses(self, ledger: Ledger) -> None:
        """Adds the losses that host 0 has logged since the last look; a later attempt's replace an earlier one's."""
        if ledger.run_id != self._run:
            self._run, self._losses, self._offsets = ledger.run_id, {}, {}
        for attempt in range(ledger.state.attempt + 1):
            path = ledger.log_file(attempt, 0)
            while path.exists():
                lines, self._offsets[attempt] = read_from(path, self._offsets.get(attempt, 0))
                if not lines:
                    break
                for line in lines:
                    if progress := parse_progress(line.text):
                        self._losses[progress.step] = progress.loss

    def _read_memory(self, ledger: Ledger, workers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Runs `cat /proc/meminfo` in these hosts' containers, and returns bytes in use and in total of those that
        answer; {} where that would take a gcloud call for each."""
        run, slice_ = self._config.run, self._config.slice
        if not workers or not self._provider.capabilities.cloud_tpu_node or run.transport == "gcloud" or slice_.iap:
            return {}
        found: dict[int, dict[str, int]] = {worker: {} for worker in workers}

        def take(worker: int, line: str) -> None:
            if match := _MEMINFO.match(line):
                found[worker][match[1]] = int(match[2]) * 1024

        container = container_name(ledger.run_id, ledger.state.attempt)
        try:
            self._provider.execute(container, ["cat", "/proc/meminfo"], workers, seconds=_MEMORY_SECONDS, on_line=take)
        except LaunchError:  # the frame shows that the memory is unknown
            return {}
        return {
            worker: (amounts["MemTotal"] - amounts["MemAvailable"], amounts["MemTotal"])
            for worker, amounts in found.items()
            if len(amounts) == 2
        }
