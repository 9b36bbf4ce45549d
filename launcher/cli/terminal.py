"""Output on the terminal: few lines on standard error, the hosts' own lines on standard output.

Standard output carries what a script may want (log lines, JSON); everything the launcher says about its own work goes
to standard error. Texts may hold words of hosts: none is read as markup, and no control character reaches a terminal.
"""

import json
import logging
import re
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.provider import LogLine

_begun = time.monotonic()
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters but tab and line feed, those that reverse a line's direction, and halves of characters.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns a text without colours and control characters but tabs and line feeds; in their place are symbols (ESC:
    U+241B) or U+FFFD: a host's line must not move the cursor, set a title or write to the clipboard."""
    plain = _COLOUR.sub("", text)
    return _UNPRINTABLE.sub(lambda match: chr(0x2400 + ord(match[0])) if match[0] < " " else "\ufffd", plain)


def say(text: str, **style: bool) -> None:
    """Prints a line about the launcher's own work, after its seconds so far, on standard error. `style`: of
    click.style."""
    begin = click.style(f"{time.monotonic() - _begun:6.1f}s", dim=True)
    click.echo(f"{begin}  {click.style(printable(text), **style) if style else printable(text)}", err=True)


def show(text: str) -> None:
    """Prints a result on standard output."""
    click.echo(printable(text))


class SayRecords(logging.Handler):
    """Prints log records as lines about the launcher's own work."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), dim=True)


def host_line(worker: int, line: LogLine) -> None:
    """Prints a line of a host's container on standard output, after the host's worker index."""
    click.echo(f"{click.style(f'[{worker}]', fg=_COLOURS[worker % len(_COLOURS)])} {printable(line.text)}")


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def error(text: str) -> None:
    """Prints an error message on standard error."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {printable(text)}", err=True)


def dump(value: Any) -> None:
    """Prints JSON for scripts on standard output."""
    click.echo(json.dumps(value, indent=2))


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a plain table on standard output, without control characters. Folds cells to the width of a terminal;
    otherwise prints a line a row, and folds only what exceeds 1000 characters."""
    grid = Table(box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    # Keep each row on one line in a file or a pipe.
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 1000).print(grid)
