"""Output on the terminal: few lines on standard error, the hosts' own lines on standard output.

Standard output carries what a script may want (log lines, JSON); everything the launcher says about its own work goes
to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from launcher.provider import LogLine

_begun = time.monotonic()


def say(text: str) -> None:
    """Prints a line about the launcher's own work on standard error, with the seconds since it began."""
    click.echo(f"{click.style(f'{time.monotonic() - _begun:6.1f}s', dim=True)}  {text}", err=True)


class _SayRecords(logging.Handler):
    """Prints log records as lines about the launcher's own work."""

    def emit(self, record: logging.LogRecord) -> None:
        say(click.style(record.getMessage(), dim=True))


def show_log() -> None:
    """Prints the launcher's log from now on: every local command, and how it ended."""
    logger = logging.getLogger("launcher")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_SayRecords())


def host_line(worker: int, line: LogLine) -> None:
    """Prints a line of a host's container on standard output, after the host's worker index."""
    click.echo(f"{click.style(f'[{worker}]', fg=_COLOURS[worker % len(_COLOURS)])} {line.text}")


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def error(text: str) -> None:
    """Prints an error message on standard error."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)


def dump(value: Any) -> None:
    """Prints JSON for scripts on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a plain table on standard output."""
    grid = Table(box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    # Keep each row on one line in a file or a pipe.
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 1000).print(grid)
