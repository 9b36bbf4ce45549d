"""Draws charts as SVG: curves, a bar of shares, a confusion matrix, a heat map. Pure functions from numbers to text.

The SVG fetches nothing and contains no script. Colours are CSS variables for light and dark backgrounds: `STYLE`
defines them, once in a page, or inside a chart that is a file of its own (`standalone`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
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
POINTS = 800  # of a curve: more are indistinguishable at its width


def standalone(svg: str) -> str:
    """Returns a chart with its colours and a background, as the content of an SVG file."""
    head, rest = svg.split(">", 1)
    background = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<style>{STYLE}</style>\n{background}{rest}\n'


def line_chart(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draws curves of (step, value) by name, thinned to POINTS values, without values that are not finite, with a dot
    at each value of a curve of at most 40; an empty chart says that nothing was recorded. Returns an SVG element."""
    width, height, left, right, top, bottom = 560, 240, 64, 16, 34, 30  # and the margins of the plot area
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    kept = {name: downsample(points, POINTS) for name, points in finite.items() if points}
    if not kept:
        return _empty_chart(title, width)
    steps, values = zip(*(point for points in kept.values() for point in points), strict=True)
    x_ticks, y_ticks = axis_ticks(min(steps), max(steps), 6, whole=True), axis_ticks(min(values), max(values), 5)

    def place(x: float, y: float) -> tuple[float, float]:
        """Returns the pixels of a point. The ticks span the plot area."""
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (width - left - right)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (height - top - bottom)
        return left + across, height - bottom - up

    parts = [_text_element(left, 18, title, weight=600)]
    for value in y_ticks:
        _, y = place(x_ticks[0], value)
        ends = f'x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="var(--rule)"/>')
        parts.append(_text_element(left - 8, y + 4, format_number(value), "faint", anchor="end"))
    for value in x_ticks:
        x, _ = place(value, y_ticks[0])
        parts.append(_text_element(x, height - 10, format_number(value), "faint", anchor="middle"))
    for index, (name, points) in enumerate(kept.items()):
        places, colour = [place(*point) for point in points], COLOURS[index % len(COLOURS)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"'
        parts.append(f'<polyline points="{corners}" {stroke}/>')
        if len(places) <= 40:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in places]
        if len(kept) > 1:
            legend = width - right - 110 * (len(kept) - index)
            parts.append(f'<rect x="{legend}" y="9" width="10" height="10" fill="{colour}"/>')
            parts.append(_text_element(legend + 15, 18, name))
    return _svg_document(title, width, height, parts)


def share_bar(title: str, amounts: Sequence[tuple[str, float]], *, width: int) -> str:
    """Draws a bar of `width` pixels, divided by the amounts (seconds), with a legend; an empty chart if all are 0.
    Returns an SVG element."""
    total = sum(amount for _, amount in amounts)
    if total <= 0:
        return _empty_chart(title, width)
    parts, x = [_text_element(0, 18, title, weight=600)], 0.0
    for index, (name, amount) in enumerate(amounts):
        share, duration = amount / total, format_duration(amount)
        paint = f'fill="{COLOURS[index % len(COLOURS)]}" opacity="{1 - 0.45 * (index // len(COLOURS))}"'
        place = f'x="{x:.1f}" y="28" width="{max(0.0, share * width):.1f}" height="22"'
        parts.append(f"<rect {place} {paint}><title>{escape(name)} {duration}</title></rect>")
        row, column = divmod(index, 3)
        legend_x, legend_y = column * width / 3, 72 + 20 * row
        parts.append(f'<rect x="{legend_x:.1f}" y="{legend_y - 9}" width="10" height="10" {paint}/>')
        parts.append(_text_element(legend_x + 15, legend_y, f"{name} {duration} ({share:.0%})"))
        x += share * width
    return _svg_document(title, width, 72 + 20 * ((len(amounts) - 1) // 3) + 12, parts)


def confusion_matrix(labels: Sequence[str], counts: Sequence[Sequence[float]], top: int = 10) -> str:
    """Draws true classes downwards, predicted ones across, darker for a larger share of a row, with the count if a cell
    has room (up to 26 labels), and below them the `top` most confused pairs. `counts`: by (true, predicted) class.
    Returns an SVG element."""
    cell = max(8, min(36, 640 // len(labels)))
    font = max(7, min(12, cell - 1))
    margin, side = 14 + round(max(map(len, labels)) * font * 0.56), cell * len(labels)
    width, below = margin + max(side, 420) + 12, margin + side + 28
    parts, pairs = [], []  # of pairs: (- count, true class, predicted class, text)
    for true, (name, row) in enumerate(zip(labels, counts, strict=True)):
        y = margin + true * cell
        parts.append(_text_element(margin - 6, y + cell / 2 + font / 3, name, anchor="end", size=font))
        turned = f'transform="translate({margin + true * cell + cell / 2 + font / 3:.1f} {margin - 6}) rotate(-90)"'
        parts.append(f'<text {turned} style="font-size: {font}px">{escape(name)}</text>')
        for predicted, count in enumerate(row):
            if count > 0:
                title = f"{name} taken for {labels[predicted]}: {round(count)} of {round(sum(row))}"
                x, share = margin + predicted * cell, count / sum(row)
                paint = f'fill="var(--{"a" if true == predicted else "b"})" opacity="{0.3 + 0.7 * share:.2f}"'
                about = f"<title>{escape(title)}</title>"
                parts.append(f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" {paint}>{about}</rect>')
                if cell >= 24:
                    ink = f"fill: var(--{'paper' if share > 0.5 else 'ink'}); font-size: 11px"
                    centre = f'x="{x + 0.5 * cell}" y="{y + cell / 2 + 4}" text-anchor="middle"'
                    parts.append(f'<text {centre} style="{ink}">{round(count)}</text>')
                if true != predicted:
                    pairs.append((-round(count), name, labels[predicted], title))
    parts.append(f'<rect x="{margin}" y="{margin}" width="{side}" height="{side}" fill="none" stroke="var(--rule)"/>')
    parts.append(_text_element(margin, below - 10, "down: the true class; across: what it was taken for", "faint"))
    shown = [text for _, _, _, text in sorted(pairs)[:top]]
    for index, text in enumerate(shown):
        parts.append(_text_element(margin, below + 10 + 17 * index, text))
    return _svg_document("Confusion matrix", width, below + 10 + 17 * len(shown), parts)


def heat_map(title: str, steps: Sequence[int], rows: Mapping[str, Sequence[float | None]]) -> str:
    """Draws a row of cells for each name, a cell a step: the larger the value (seconds), the stronger its colour, which
    is full from two medians on (one long step hides no others), but not below 1.5 times the least. None: no cell. An
    empty chart if no row has a value. Returns an SVG element. Raises ValueError unless rows are as long as `steps`."""
    values = [value for row in rows.values() for value in row if value is not None]
    if not values:
        return _empty_chart(title, 560)
    low, high = min(values), max(values)
    full = max(1.5 * low, min(high, 2 * statistics.median(values)))
    left, top, height = 20 + 7 * max(map(len, rows)), 34, max(8, min(22, 640 // len(rows)))
    width = max(2, min(24, 1000 // len(steps)), 200 // len(steps))  # both numbers of steps fit below
    heading = f"{title}: {low:.3g} to {high:.3g} s{f' (full colour: {full:.3g} s)' if full < high else ''}"
    parts = [_text_element(left, 18, heading, weight=600)]
    for index, (name, row) in enumerate(rows.items()):
        y = top + index * height
        if index % math.ceil(14 / height) == 0:
            parts.append(_text_element(left - 8, y + height / 2 + 4, name, "faint", anchor="end"))
        for column, (step, value) in enumerate(zip(steps, row, strict=True)):
            if value is not None:
                place = f'x="{left + column * width}" y="{y}" width="{width}" height="{height}"'
                paint = f'fill="var(--b)" opacity="{0.08 + 0.92 * min(1.0, (value - low) / ((full - low) or 1)):.2f}"'
                about = escape(f"{name}, step {step:,}: {value:.3g} s")
                parts.append(f"<rect {place} {paint}><title>{about}</title></rect>")
    right, bottom = left + width * len(steps), top + height * len(rows)
    parts.append(_text_element(left, bottom + 18, f"step {steps[0]:,}", "faint"))
    parts.append(_text_element(right, bottom + 18, f"{steps[-1]:,}", "faint", anchor="end"))
    return _svg_document(title, max(right + 16, 660), bottom + 28, parts)


def downsample(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Returns all points if there are at most `most`, else the lowest and the highest of each of most / 2 stretches."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def axis_ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Returns evenly spaced round numbers (integers if `whole`) that cover `low` to `high`, in about `about` steps:
    often fewer, at times one more. Covers some space on both sides of ends that are equal to nine digits."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def format_number(value: float) -> str:
    """Returns a short form: "12k" for 12000, "2e7" for 20 million. Rounds to 3 digits from 1e7 on and below 0.001, else
    to 6."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def format_duration(amount: float) -> str:
    """Returns seconds as for example "2 h 05 min" (whole minutes, rounded down), "3 min 20 s", "4.2 s"."""
    if round(amount, 1) < 60:
        return f"{amount:.1f} s"
    minutes, seconds = divmod(round(amount), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _empty_chart(title: str, width: float) -> str:
    return _svg_document(title, width, 60, [_text_element(12, 34, f"{title}: nothing was recorded", "faint")])


def _svg_document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Returns an SVG element of `parts`. `title` is its label for screen readers, and is not drawn."""
    attributes = f'role="img" aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>' + "".join(parts) + "</svg>"


def _text_element(
    x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", weight: int = 400, size: int = 12
) -> str:
    """Draws text at (x, y), escaped. `kind` is its CSS class; `anchor`: its "start", "middle" or "end" is at x."""
    style = "".join([f"font-weight: {weight};" if weight != 400 else "", f"font-size: {size}px;" if size != 12 else ""])
    extra = "".join(f' {name}="{value}"' for name, value in (("class", kind), ("style", style)) if value)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
