"""Commands about what may be rented: `capacity`, `estimate`."""

from dataclasses import asdict

import click

from launcher import costs
from launcher.cli import terminal
from launcher.cli.options import configured, machine
from launcher.config import Config
from launcher.home import home
from launcher.tpu_vm.requests import RequestRecord, median_seconds_to_grant
from training import storage
from training.machine import format_time

_SHOWN = 30  # requests, the newest


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def capacity(config: Config, as_json: bool) -> None:
    """Show the slice's candidates, when each was asked for, and what became of it."""
    shared = RequestRecord(config)
    try:
        shared.pull()
    except storage.StorageError as error:
        terminal.say(f"requests of other machines are not shown: {error}")
    record = shared.read()
    if as_json:
        terminal.dump([asdict(request) for request in record])
        return
    rows = []
    for candidate in config.candidates:
        price = costs.per_hour(candidate.accelerator_type, candidate.zone, candidate.capacity)
        asked = [request for request in record if request.candidate == candidate]
        seconds = median_seconds_to_grant(asked)
        waited = f"median {costs.duration(seconds)}" if seconds is not None else "never granted here"
        dollars = "unknown" if price is None else f"${price:.2f}"
        rows.append([candidate.accelerator_type, candidate.capacity, candidate.zone, dollars, str(len(asked)), waited])
    terminal.table(["type", "capacity", "zone", "an hour", "asked", "granted after"], rows)
    if record:
        click.echo("")
        lines = [
            [f"{request.number}", format_time(request.asked), f"{request.candidate}", request.describe()]
            for request in record[-_SHOWN:]
        ]
        terminal.table(["request", "asked", "candidate", "what became of it"], lines)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def estimate(config: Config, as_json: bool) -> None:
    """Estimate hours and dollars of the run on each candidate, from what is known: compiles and rents nothing."""
    from launcher import estimate as estimates

    items = estimates.estimate(config, home(), machine())
    if as_json:
        terminal.dump({"candidates": [asdict(item) for item in items]})
        return
    terminal.table(list(estimates.COLUMNS), [estimates.row(item) for item in items])
    for line in estimates.notes(items):
        click.echo(line)
