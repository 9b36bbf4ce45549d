"""What `top` shows of a run, as lines of text of a given width. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher import costs
from launcher.run.status import HostStatus
from training.telemetry.text import Progress

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille cell: by column, then row
_BLANK = 0x2800
_LEFT, _CURVE_ROWS = 9, 8  # columns of the labels left of the curve, and its rows
_WIDEST_BAR = 40
_WIDE = 120  # columns from which there is room for addresses


@dataclass(frozen=True)
class View:
    """What is known of a run at one moment."""

    slice: str
    """The slice and its state, in words."""

    run: str
    """The run, its attempt, and its state, in words."""

    time: str
    progress: Progress | None = None
    left: str = ""
    """The time that is left, as the trainer says it."""

    losses: Mapping[int, float] = field(default_factory=dict)
    """By step."""

    hosts: Sequence[HostStatus] = ()
    memory: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes in use and of the host, by worker; missing where it is not known."""

    cost: str = ""
    story: Sequence[str] = ()


def render(view: View, columns: int) -> list[str]:
    """The lines of a frame, none wider than `columns`."""
    lines = [_spread(view.run, view.time, columns), view.slice]
    if view.cost:
        lines.append(view.cost)
    lines += ["", *_progress(view, columns), ""]
    if len(view.losses) > 1:
        lines += [*plot(view.losses, columns, _CURVE_ROWS), ""]
    lines += _hosts(view, columns)
    if view.story:
        lines += ["", *view.story]
    return [_cut(line, columns) for line in lines]


def plot(losses: Mapping[int, float], columns: int, rows: int) -> list[str]:
    """The curve of a loss over steps, in braille dots, with the highest and the lowest value and the first and the last
    step. Values that are not finite are left out."""
    points = sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))
    if not points:
        return []
    width = max(1, columns - _LEFT)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = (high / 2 - low / 2) or 1.0  # of halves: the whole may be too large for a float
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
    now = view.progress
    if now is None:
        return ["no step was reported yet"]
    share = now.step / now.steps if now.steps else 0.0
    figures = f"loss {now.loss:.5f}   {now.examples_per_second:,.1f} examples/s"
    if now.data_wait is not None:
        figures += f"   data wait {now.data_wait:.0%}"
    if view.left:
        figures += f"   {view.left} left"
    head = f"step {now.step:,}/{now.steps:,}  {share:4.0%}  "
    width = min(_WIDEST_BAR, columns - len(head))
    filled = round(share * width)
    bar = f"{head}{'█' * filled}{'░' * (width - filled)}"
    both = f"{bar}   {figures}"
    return [both] if len(both) <= columns else [bar, figures]


def _hosts(view: View, columns: int) -> list[str]:
    """A row for each host; the last line takes what is left of the width."""
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
    if bytes_used is None:
        return "?"
    used, total = (amount / 2**30 for amount in bytes_used)
    return f"{used:.1f}/{total:.0f} GiB"


def _spread(left: str, right: str, columns: int) -> str:
    """Both texts on one line, the right one at its end."""
    return f"{left}{right:>{max(len(right) + 2, columns - len(left))}}"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"
