"""Draws the picture of a rehearsal in README: make rehearsal 2>&1 | python -m tools.terminal_picture FILE.svg

Reads the output of a terminal and draws it as SVG, with the commands highlighted, without the lines of image builds
and of `--help`; long lines are cut. The picture uses no font from the network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 118
_COMMAND = re.compile(r" *[\d.]+s  \$ ")
# Image builds, the help text of the image's check, gloo's greetings, the summary's JSON.
_LEFT_OUT = re.compile(
    r"image builds trust| building | built |\[\S+ (\d|\d/\d)\] |\[Gloo\]|summary: \{|^ {9}( *$|[UOC ] *\S+.*)"
)
_KEPT = re.compile(r"^ {9} +[\d.]+s  (?!building|built| )|^ {9}\[\d\] (?!\[Gloo\]|summary)")
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def picture(lines: Iterable[str], title: str = "make rehearsal") -> str:
    """Returns the lines as an SVG document."""
    console = Console(record=True, width=_COLUMNS, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text("$ make rehearsal", style="bold green"))
    for line in shown(lines):
        console.print(_styled(line))
    svg = console.export_svg(title=title, unique_id="rehearsal")
    return _FONT_FACE.sub("", svg)


def shown(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the picture, cut to its width."""
    folder = str(Path.cwd())
    for line in lines:
        text = line.rstrip("\n").replace(folder, "~/tpu-launch")
        if text.startswith("real\t"):  # bash's `time`
            return
        if _KEPT.match(text) or not _LEFT_OUT.search(text):
            yield text if len(text) <= _COLUMNS else text[: _COLUMNS - 1] + "…"


def _styled(line: str) -> Text:
    if _COMMAND.match(line):
        return Text(line, style="bold cyan")
    if not line.startswith(" "):
        return Text(line, style="bold")
    host = re.match(r" +\[\d\]", line)
    text = Text(line)
    if host:
        text.stylize("magenta" if host[0].endswith("[1]") else "green", 0, host.end())
    return text


def main(arguments: list[str]) -> int:
    """Reads standard input, writes the picture. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: terminal_picture FILE.svg < OUTPUT", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(picture(sys.stdin), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
