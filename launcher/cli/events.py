"""A verb that looks back: `tpu-launch events`."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli import terminal
from launcher.cli.options import configured


@click.command()
@click.option("--run", "run_id", metavar="RUN", help="This run instead of the newest of the slice.")
@click.option("--json", "as_json", is_flag=True, help="One list, every detail.")
@configured
def events(config: Any, run_id: str | None, as_json: bool) -> None:
    """Tell what happened to a run, oldest first: attempts, hosts lost and back, stops, recoveries, ends."""
    from launcher.home import home
    from launcher.run import ledger as ledgers
    from launcher.run import status as look

    found = ledgers.find(home(), run_id, slice_name=config.slice.name, provider=config.provider)
    if as_json:
        terminal.dump(found.events())
        return
    for event in found.events():
        click.echo(look.told(event))
