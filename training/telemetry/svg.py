"""Pictures as SVG: curves, a bar of shares, a confusion matrix. Pure functions from numbers to text; nothing is fetched
and nothing runs in them.

Colours are CSS variables, so that one picture is right on light and on dark paper: `STYLE` defines them, in a page
once, in a picture that stands alone inside it (`standalone`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root {
  --paper: #ffffff; --ink: #1c1f24; --faint: #6b7280; --rule: #d9dce1;
  --a: #2463c7; --b: #c2570c; --c: #25803f; --d: #8a4fbf; --e: #b0891a; --f: #5b6675;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181c; --ink: #e6e8eb; --faint: #9aa2ad; --rule: #343941;
    --a: #7cacf8; --b: #f0a163; --c: #79cf92; --d: #c79bf0; --e: #e0c163; --f: #a9b3c0;
  }
}
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .faint { fill: var(--faint); }
"""
COLOURS = tuple(f"var(--{letter})" for letter in "abcdef")
POINTS = 800  # of a curve: more can't be told apart


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class ConfusedPair:
    """Examples of one class that were taken for another."""

    true: str
    predicted: str
    count: int
    of: int  # examples of the class


def standalone(svg: str) -> str:
    """A picture as a file of its own."""
    head, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="var(--paper)"/>{rest}\n'


def line_chart(title: str, shown: Sequence[Curve], *, width: int = 560, height: int = 240) -> str:
    """Values over steps. What is not finite is left out."""
    kept = [(curve.name, downsample([(x, y) for x, y in curve.points if math.isfinite(y)], POINTS)) for curve in shown]
    kept = [(name, points) for name, points in kept if points]
    every = [point for _, points in kept for point in points]
    if not every:
        return _svg(title, width, 60, [_text(12, 34, f"{title}: nothing was recorded", "faint")])
    left, right, top, bottom = 64, 16, 34, 30
    x_ticks = axis_ticks(min(x for x, _ in every), max(x for x, _ in every), 6, whole=True)
    y_ticks = axis_ticks(min(y for _, y in every), max(y for _, y in every), 5)
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (width - left - right), height - bottom - (y - y0) / (y1 - y0) * (
            height - top - bottom
        )

    parts = [_text(left, 18, title, weight=600)]
    for value in y_ticks:
        _, y = place(x0, value)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--rule)"/>')
        parts.append(_text(left - 8, y + 4, format_number(value), "faint", anchor="end"))
    for value in x_ticks:
        x, _ = place(value, y0)
        parts.append(_text(x, height - 10, format_number(value), "faint", anchor="middle"))
    for index, (name, points) in enumerate(kept):
        colour = COLOURS[index % len(COLOURS)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>'
        )
        if len(points) <= 40:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>'
                for x, y in (place(*point) for point in points)
            ]
        if len(kept) > 1:
            x = width - right - 110 * (len(kept) - index)
            parts.append(f'<rect x="{x}" y="9" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(x + 15, 18, name))
    return _svg(title, width, height, parts)


def share_bar(title: str, amounts: Sequence[tuple[str, float]], *, width: int = 560) -> str:
    """One bar, divided as the amounts are, with a legend: amounts in seconds."""
    total = sum(amount for _, amount in amounts)
    if total <= 0:
        return _svg(title, width, 60, [_text(12, 34, f"{title}: nothing was recorded", "faint")])
    parts, x = [_text(0, 18, title, weight=600)], 0.0
    for index, (name, amount) in enumerate(amounts):
        share, colour = amount / total, COLOURS[index % len(COLOURS)]
        opacity = 1 - 0.45 * (index // len(COLOURS))
        parts.append(
            f'<rect x="{x:.1f}" y="28" width="{max(0.0, share * width):.1f}" height="22" fill="{colour}" opacity="{opacity}"><title>{escape(name)} '
            f"{format_duration(amount)}</title></rect>"
        )
        row, column = divmod(index, 3)
        lx, ly = column * width / 3, 72 + 20 * row
        parts.append(f'<rect x="{lx:.1f}" y="{ly - 9}" width="10" height="10" fill="{colour}" opacity="{opacity}"/>')
        parts.append(_text(lx + 15, ly, f"{name} {format_duration(amount)} ({share:.0%})"))
        x += share * width
    return _svg(title, width, 72 + 20 * ((len(amounts) - 1) // 3) + 12, parts)


def most_confused_pairs(labels: Sequence[str], counts: Sequence[Sequence[float]], top: int = 10) -> list[ConfusedPair]:
    """The largest numbers beside the diagonal, largest first."""
    found = [
        ConfusedPair(labels[true], labels[predicted], round(count), round(sum(row)))
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count > 0
    ]
    return sorted(found, key=lambda each: (-each.count, each.true, each.predicted))[:top]


def confusion_matrix(labels: Sequence[str], counts: Sequence[Sequence[float]], top: int = 10) -> str:
    """True classes downwards, predicted ones across; the darker, the larger the share of its row. Below: the most
    confused pairs."""
    cell = max(8, min(36, 640 // len(labels)))
    longest = max(map(len, labels))
    font = max(7, min(12, cell - 1))
    margin, side = 14 + round(longest * font * 0.56), cell * len(labels)
    pairs = most_confused_pairs(labels, counts, top)
    width, below = margin + max(side, 420) + 12, margin + side + 28
    parts = []
    for true, (name, row) in enumerate(zip(labels, counts, strict=True)):
        y, total = margin + true * cell, sum(row)
        parts.append(_text(margin - 6, y + cell / 2 + font / 3, name, anchor="end", size=font))
        x = margin + true * cell + cell / 2 + font / 3
        parts.append(
            f'<text transform="translate({x:.1f} {margin - 6}) rotate(-90)" style="font-size: {font}px">{escape(name)}</text>'
        )
        for predicted, count in enumerate(row):
            if count <= 0:
                continue
            share, colour = count / total, "var(--a)" if true == predicted else "var(--b)"
            told = f"{name} taken for {labels[predicted]}: {round(count)} of {round(total)}"
            parts.append(
                f'<rect x="{margin + predicted * cell}" y="{y}" width="{cell}" height="{cell}" fill="{colour}" opacity="{0.3 + 0.7 * share:.2f}">'
                f"<title>{escape(told)}</title></rect>"
            )
            if cell >= 24:
                place = f'x="{margin + (predicted + 0.5) * cell}" y="{y + cell / 2 + 4}" text-anchor="middle"'
                ink = "var(--paper)" if share > 0.5 else "var(--ink)"
                parts.append(f'<text {place} style="fill: {ink}; font-size: 11px">{round(count)}</text>')
    parts.append(f'<rect x="{margin}" y="{margin}" width="{side}" height="{side}" fill="none" stroke="var(--rule)"/>')
    parts.append(_text(margin, below - 10, "down: the true class; across: what it was taken for", "faint"))
    for index, pair in enumerate(pairs):
        parts.append(
            _text(margin, below + 10 + 17 * index, f"{pair.true} taken for {pair.predicted}: {pair.count} of {pair.of}")
        )
    return _svg("Confusion matrix", width, below + 10 + 17 * len(pairs), parts)


def downsample(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points that look the same: of each stretch its lowest and highest, so that no spike is
    lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        kept += sorted({min(stretch, key=lambda each: each[1]), max(stretch, key=lambda each: each[1])})
    return kept


def axis_ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers from at most `low` to at least `high`: two or more."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def format_number(value: float) -> str:
    """Short: 12000 is 12k."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def format_duration(amount: float) -> str:
    """For example "2 h 05 min", "3 min 20 s", "4.2 s"."""
    if amount < 60:
        return f"{amount:.1f} s"
    whole = round(amount)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
    return head + "".join(parts) + "</svg>"


def _text(
    x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", weight: int = 400, size: int = 12
) -> str:
    style = "".join([f"font-weight: {weight};" if weight != 400 else "", f"font-size: {size}px;" if size != 12 else ""])
    extra = "".join(f' {name}="{value}"' for name, value in (("class", kind), ("style", style)) if value)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
