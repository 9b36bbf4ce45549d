"""`tpu-launch doctor`: shows what a run needs and lacks."""

from __future__ import annotations

import sys

import click

from launcher.checks import doctor as doctors
from launcher.cli import terminal
from launcher.cli.options import configured
from launcher.config import Config
from launcher.errors import Exit

_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The rows as JSON.")
@configured
def doctor(config: Config, as_json: bool) -> None:
    """Look at everything that a run needs, and print the command that mends what is missing. Changes nothing; 0 or
    2."""
    rows = doctors.examine(config)
    if as_json:
        terminal.dump([row.as_json() for row in rows])
    else:
        for row in rows:
            click.echo(f"{click.style(row.verdict.value, fg=_COLOURS[row.verdict.value])}  {row.check}: {row.detail}")
            if row.fix:
                click.echo(f"      to mend it: {row.fix}")
    if doctors.failed(rows):
        sys.exit(Exit.BAD_INPUT)
