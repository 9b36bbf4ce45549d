"""Verbs that look over all slices of a project: `tpu-launch list` and `tpu-launch gc`."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from launcher import costs, shell
from launcher.cli import terminal
from launcher.cli.options import configured

_DELETE_SECONDS = 900.0


def _zones(config: Any, everywhere: bool) -> list[str]:
    return ["-"] if everywhere else config.zones


everywhere_option = click.option(
    "--all-zones", "everywhere", is_flag=True, help="All zones of the project, not only those of the file."
)


@click.command("list")
@everywhere_option
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def list_(config: Any, everywhere: bool, as_json: bool) -> None:
    """List the project's slices that tpu-launch made: state, owner, run, age, cost so far, expiry."""
    from launcher.tpu_vm import inventory

    found = inventory.list_owned(config.project, _zones(config, everywhere))
    now = time.time()
    if as_json:
        terminal.dump([each.as_json(now) for each in found])
    elif found:
        terminal.table(inventory.COLUMNS, [each.row(now) for each in found])
        terminal.say(f"costs: list prices of {costs.AS_OF}, counted since creation")
    else:
        terminal.say(
            f"no slices of tpu-launch in project {config.project}, {'any zone' if everywhere else ', '.join(config.zones)}"
        )


@click.command()
@everywhere_option
@click.option("--all-owners", is_flag=True, help="Other people's leftovers too.")
@click.option("--yes", is_flag=True, help="Delete them; without it they are only listed.")
@click.option("--json", "as_json", is_flag=True, help="What was found, for scripts.")
@configured
def gc(config: Any, everywhere: bool, all_owners: bool, yes: bool, as_json: bool) -> None:
    """Delete leftovers of tpu-launch: slices past their expiry, preempted, suspended or failed ones. Never touches
    anything else.

    \b
    tpu-launch gc                   list your own
    tpu-launch gc --yes             delete them
    tpu-launch gc --all-owners --all-zones --yes    as a nightly job
    """
    from launcher.errors import LaunchError
    from launcher.tpu_vm import gcloud, inventory, slices

    now = time.time()
    owner = None if all_owners else slices.owner()
    found = inventory.find_leftovers(inventory.list_owned(config.project, _zones(config, everywhere)), now, owner=owner)
    if as_json:
        terminal.dump([each.as_json(now) for each in found])
    if not found:
        terminal.say("nothing to remove")
    failed: LaunchError | None = None
    for each in found:
        terminal.say(
            f"{each.kind} {each.name} in {each.zone} ({each.accelerator_type}, owner {each.owner}) {each.why_leftover(now)}"
        )
        command = inventory.delete_command(config.project, each)
        if not yes:
            terminal.say(f"  {shell.quote(command)}")
            continue
        try:
            gcloud.call(command, timeout=_DELETE_SECONDS)
            terminal.say(f"  deleted {each.name}")
        except gcloud.NotFound:
            terminal.say(f"  {each.name} is gone already")
        except LaunchError as error:  # the others are still deleted
            terminal.error(f"{each.name}: {error}")
            failed = error
    if failed is not None:
        sys.exit(failed.exit_code)
    if found and not yes:
        terminal.say("nothing was deleted: `tpu-launch gc --yes` deletes what is listed")
