"""Writes the results of `make benchmark` into docs/benchmarks.md, a section each.

Reads .tpu-launch/benchmarks/NAME.json. Sections of benchmarks without a result here stay as they are, so the page
can be renewed one benchmark at a time.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".tpu-launch" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
INTRODUCTION = """\
# Benchmarks

Each table is made by the command above it, on a machine of two cores and 24 GB without a TPU, and written here by
`make benchmark-page`. Machines differ and are noisy: compare ratios, not seconds. A ratio is ours over the peer's,
measured in the same run on the same machine. [Limits](limits.md) lists what needs a TPU.
"""


def main() -> int:
    sections = read_sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for path in sorted(RESULTS.glob("*.json")):
        sections[path.stem] = render(path)
    if not sections:
        print(f"{RESULTS} has no results: run `make benchmark NAME=x` first", file=sys.stderr)
        return 2
    PAGE.write_text("\n".join([INTRODUCTION, *(sections[name] for name in sorted(sections))]), encoding="utf-8")
    return 0


def read_sections(page: str) -> dict[str, str]:
    """Returns the page's sections by the name of their benchmark, each with its heading."""
    texts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {text.split("\n", 1)[0].strip(): f"## {text.rstrip()}\n" for text in texts}


def render(path: Path) -> str:
    """Returns the section of one benchmark: what it measures, its command, its rows, and the day."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    lines = [f"## {path.stem}", "", describe(path.stem), "", "```console", command(path.stem), "```", ""]
    lines += ["| | ours | peer | ratio | unit | peer is | goal |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        numbers = [show(row[key]) for key in ("ours", "peer", "ratio")]
        cells = [row["name"], *numbers, row["unit"], row["peer_name"], row["goal"]]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    day = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    return "\n".join([*lines, "", f"Measured on {day}.", ""])


def describe(name: str) -> str:
    """Returns the first paragraph of the benchmark's docstring, on one line."""
    source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    return " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())


def command(name: str) -> str:
    for backend in ("tensorflow", "torch-tpu"):
        if name.endswith(suffix := f"_{backend.replace('-', '_')}"):
            return f'$ make benchmark NAME={name.removesuffix(suffix)} ARGS="--backend {backend}"'
    return f"$ make benchmark NAME={name}"


def show(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
