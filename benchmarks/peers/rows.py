"""What a benchmark prints: rows that set ours beside a peer's, as a table or as one JSON object."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, unit: str, ours: float | None, peer_name: str, peer: float | None, goal: str) -> Row:
    """`ours` or `peer` is None where it can't be measured here."""
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
    def shown(value: float | None) -> str:
        return "not here" if value is None else f"{value:,.2f}" if abs(value) >= 10 else f"{value:.4g}"

    lines = [f"{'':56} {'ours':>10} {'peer':>10} {'ratio':>7}  unit, peer, goal"]
    for each in rows:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.3f}"
        lines.append(
            f"{each['name']:56} {shown(each['ours']):>10} {shown(each['peer']):>10} {ratio:>7}  {each['unit']}; {each['peer_name']}; {each['goal']}"
        )
    return "\n".join(lines)


def finish(name: str, rows: list[Row], as_json: bool) -> None:
    """Prints them, and keeps them as .tpu-launch/benchmarks/NAME.json."""
    folder = Path(os.environ.get("TPU_LAUNCH_HOME", ".tpu-launch")) / "benchmarks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = json.dumps({"rows": rows})
    (folder / f"{name}.json").write_text(result)
    print(result if as_json else table(rows))
