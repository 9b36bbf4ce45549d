"""Prints the results of a benchmark: rows with our figure beside a peer's, as a table or as one JSON object."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, unit: str, ours: float | None, peer_name: str, peer: float | None, goal: str) -> Row:
    """Returns a row of the table.

    Args:
        name: of the measurement.
        unit: of both numbers.
        ours: None where it can't be measured here.
        peer_name: of the peer.
        peer: its number; None where it can't be measured here.
        goal: for ours, or for the ratio.
    """
    ratio = ours / peer if ours is not None and peer else None
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer_name": peer_name,
        "peer": peer,
        "ratio": ratio,
        "goal": goal,
    }


def table(rows: list[Row]) -> str:
    """Returns the rows as aligned text."""
    lines = [f"{'':56} {'ours':>10} {'peer':>10} {'ratio':>7}  unit, peer, goal"]
    for item in rows:
        ratio = "" if item["ratio"] is None else f"{item['ratio']:.3f}"
        numbers = f"{_format_number(item['ours']):>10} {_format_number(item['peer']):>10} {ratio:>7}"
        lines.append(f"{item['name']:56} {numbers}  {item['unit']}; {item['peer_name']}; {item['goal']}")
    return "\n".join(lines)


def _format_number(value: float | None) -> str:
    if value is None:
        return "not here"
    return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.4g}"


def finish(name: str, rows: list[Row], as_json: bool) -> None:
    """Prints the rows, and keeps them as .tpu-launch/benchmarks/NAME.json."""
    folder = Path(os.environ.get("TPU_LAUNCH_HOME", ".tpu-launch")) / "benchmarks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = json.dumps({"rows": rows})
    (folder / f"{name}.json").write_text(result)
    print(result if as_json else table(rows))
