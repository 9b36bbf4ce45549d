"""Commands on slices: `doctor`, `capacity`, `up`, `down`, and over all slices of a project `list` and `gc`."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import asdict, replace

import click

from launcher import costs
from launcher.cli import terminal
from launcher.cli.options import configured, dry_run_option, machine, open_provider, run_context, show_plan
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home
from launcher.providers import PROVIDERS
from launcher.tpu_vm import candidates, inventory, slice_hints, slices
from launcher.tpu_vm.requests import RequestRecord, median_seconds_to_grant
from training import storage
from training.machine import format_time

_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}
_REQUESTS_SHOWN = 30  # the newest

any_owner_option = click.option(
    "--any-owner", is_flag=True, help="Allow a slice that another user, or another program, made."
)


def _require_finite(_context: click.Context, _option: click.Parameter, amount: float | None) -> float | None:
    """Returns the amount. Raises click.BadParameter for NaN and infinity, which would limit nothing."""
    if amount is not None and not math.isfinite(amount):
        raise click.BadParameter(f"{amount} is not an amount of dollars")
    return amount


@click.command()
@click.option(
    "--devices",
    is_flag=True,
    help="Check the devices of all hosts of the slice instead, in the image; 16 if a check fails.",
)
@click.option("--json", "as_json", is_flag=True, help="The rows as JSON.")
@configured
def doctor(config: Config, devices: bool, as_json: bool) -> None:
    """Check everything that a run needs, and print the command that fixes what is missing. Changes nothing, but makes
    the launcher's folder; exits with 0 or 2.

    With --devices every host of a READY slice instead runs `tpu-train check-devices` once, in a container that is
    removed, after the run's image is made and pushed if needed: the number of devices, their memory, a bfloat16 matrix
    product, a sum over all devices of the slice, the hosts' clocks and disks, the speed of the output bucket. Exits
    with 0, 16 if a check fails, 23 if a run is on the slice, or the code of an error.
    """
    from launcher.checks.doctor import examine

    if devices:
        _show_devices(config, as_json)
        return
    findings = examine(config)
    if as_json:
        rows = [(each.where, each.severity, each.message, each.fix) for each in findings]
        terminal.dump([dict(zip(("check", "verdict", "detail", "fix"), row, strict=True)) for row in rows])
    else:
        for finding in findings:
            severity = click.style(finding.severity, fg=_COLOURS[finding.severity])
            _print_finding(f"{severity}  {finding.where}", finding.message, finding.fix)
    if any(finding.fatal for finding in findings):
        sys.exit(Exit.BAD_INPUT)


def _print_finding(where: str, message: str, fix: str) -> None:
    """Prints a finding, and its fix, if any, on a line of its own."""
    click.echo(f"{where}: {terminal.printable(message)}")
    if fix:
        click.echo(f"      fix: {fix}")


def _show_devices(config: Config, as_json: bool) -> None:
    """Checks devices in a container on each host of a READY slice without a run, whose image is made if needed; prints
    a row a host and the findings, or JSON. Ends the process with Exit.DEVICES if a check fails; raises as
    `check_devices`, for a slice with a run too."""
    from launcher.device_check import COLUMNS, check_devices

    results = check_devices(config, run_context())
    if as_json:
        terminal.dump([result.as_json() for result in results])
    else:
        terminal.table(COLUMNS, [result.row() for result in results])
        for result in results:
            for problem in result.problems:
                _print_finding(f"host {result.worker}", problem.message, problem.fix)
    if not all(result.ok for result in results):
        sys.exit(Exit.DEVICES)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def capacity(config: Config, as_json: bool) -> None:
    """Show the slice's candidates with prices, and its newest 30 requests of all machines. With --json, show all
    requests and no candidates."""
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
            for request in record[-_REQUESTS_SHOWN:]
        ]
        terminal.table(["request", "asked", "candidate", "what became of it"], lines)


@click.command()
@click.option(
    "--max-cost", type=click.FloatRange(0, min_open=True), callback=_require_finite, metavar="DOLLARS",
    help="Refuse a slice that costs more an hour.",
)  # fmt: skip
@click.option(
    "--no-preflight", is_flag=True, help="Create the slice although preflight found that the step does not fit."
)
@any_owner_option
@click.option("--check-devices", is_flag=True, help="Then check the devices of all hosts, as `doctor --devices` does.")
@dry_run_option
@configured
def up(
    config: Config, max_cost: float | None, dry_run: bool, no_preflight: bool, any_owner: bool, check_devices: bool
) -> None:
    """Create the slice and wait until every host answers. Idempotent: waits for a slice that is being created, also by
    another `up`; starts a stopped one; waits for one that is being deleted, and recreates it. First checks that the
    buckets exist, and leaves out types on which, by a kept preflight, the step does not fit; refuses if none is left.
    On GKE creates nothing, and warns if the cluster has too few nodes."""
    from launcher.checks import inputs, preflight

    config = _for_owners(config, any_owner)
    if max_cost is not None:
        config = replace(config, slice=config.slice.model_copy(update={"max_cost_per_hour": max_cost}))
    if dry_run:
        show_plan(config, "up")
        return
    inputs.buckets(config, terminal.say)
    if not no_preflight:
        config, _ = preflight.leave_out_unfit(config, home(), terminal.say)
    provider = open_provider(config)
    if provider.capabilities.cloud_tpu_node:
        candidates.check_owner(config, provider.describe, machine().owner)
    provider.create()
    size = slice_hints.in_current_place(config).accelerator
    of = f" of a {size.name}" if config.slice.candidates else ""
    state = "is READY" if provider.capabilities.cloud_tpu_node else "gets the cluster's nodes when a run starts"
    terminal.say(f"slice {config.slice.name} {state}: {size.hosts} hosts, {size.devices} devices{of}")
    if check_devices:
        provider.close()
        _show_devices(config, as_json=False)


@click.command()
@any_owner_option
@dry_run_option
@configured
def down(config: Config, any_owner: bool, dry_run: bool) -> None:
    """Delete the slice and wait until it is gone. Stops its runs first; the runs' folders and checkpoints stay.

    Handles each zone by itself. The exit code is that of the first zone that failed; 23 if the slice of that name is
    not yours.
    """
    from launcher.run.stop import delete_slice

    config = _for_owners(config, any_owner)
    if dry_run:
        show_plan(config, "down")
        return
    try:
        delete_slice(config, run_context())
    except KeyboardInterrupt:
        terminal.say("interrupted: run `tpu-launch down` again; what was not deleted yet is billed")
        raise
    terminal.say(f"slice {config.slice.name} is gone")


def _for_owners(config: Config, any_owner: bool) -> Config:
    """Returns the configuration with this `any_owner`. Raises BadInput if it is True and the provider has no owners."""
    if any_owner and not PROVIDERS[config.provider].cloud_tpu_node:
        raise BadInput(f"--any-owner: provider {config.provider} does not look at owners")
    return replace(config, any_owner=any_owner)


def _zones(config: Config, everywhere: bool) -> list[str]:
    """Returns the zones to list: those of the file, or "-", which stands for all zones of the project."""
    return ["-"] if everywhere else list(dict.fromkeys(candidate.zone for candidate in config.candidates))


everywhere_option = click.option(
    "--all-zones", "everywhere", is_flag=True, help="All zones of the project, not only those of the file."
)


@click.command("list")
@click.argument("folder", metavar="[gs://bucket/runs]", required=False)
@everywhere_option
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def list_(config: Config, folder: str | None, everywhere: bool, as_json: bool) -> None:
    """List the project's slices that tpu-launch made, of all users: state, owner, run, age, cost so far, expiry. With a
    folder of runs, list these: where each stands, who supervises it. Fails, at the end, for a zone that can't be
    listed."""
    if folder:
        from launcher.cli.supervise import list_runs_of

        list_runs_of(folder, as_json=as_json)
        return
    listing = inventory.list_owned(config.project, _zones(config, everywhere), machine())
    now = machine().clock.time()
    if as_json:
        terminal.dump([item.as_json(now) for item in listing.slices])
    elif listing.slices:
        terminal.table(inventory.COLUMNS, [item.row(now) for item in listing.slices])
        terminal.say(f"costs: list prices of {costs.AS_OF}, counted since creation")
    elif not listing.failures:
        zones = "any zone" if everywhere else ", ".join(_zones(config, False))
        terminal.say(f"no slices of tpu-launch in project {config.project}, {zones}")
    if failures := _show_failures(listing):
        sys.exit(failures[0].exit_code)


@click.command()
@everywhere_option
@click.option("--all-owners", is_flag=True, help="Also leftovers of other users.")
@click.option("--yes", is_flag=True, help="Delete them; without --yes they are only listed.")
@click.option("--json", "as_json", is_flag=True, help="What was found, for scripts.")
@configured
def gc(config: Config, everywhere: bool, all_owners: bool, yes: bool, as_json: bool) -> None:
    """Delete leftovers of tpu-launch: slices past their expiry, preempted, suspended or failed ones. Only lists them
    without --yes. Never touches anything else, nor slices of other users without --all-owners.

    \b
    tpu-launch gc                   list your own
    tpu-launch gc --yes             delete them
    tpu-launch gc --all-owners --all-zones --yes    as a nightly job
    """
    listing = inventory.list_owned(config.project, _zones(config, everywhere), machine())
    now = machine().clock.time()
    leftovers = inventory.find_leftovers(listing.slices, now, owner=None if all_owners else machine().owner)
    if as_json:
        terminal.dump([item.as_json(now) for item in leftovers])
    if not leftovers and not listing.failures:
        terminal.say("nothing to remove")
    failures = _show_failures(listing)
    for item in leftovers:
        kind = f"{item.kind} {item.name} in {item.zone} ({item.accelerator_type}, owner {item.owner or 'unknown'})"
        terminal.say(f"{kind} {item.why_leftover(now)}")
        if not yes:
            terminal.say(f"  {shlex.join(inventory.delete_command(config.project, item))}")
            continue
        try:
            if not all_owners and (reason := slices.why_not_ours(item.labels, machine().owner, deletion=True)):
                raise slices.NotOurs(f"left alone: {reason}; --all-owners deletes it nevertheless")
            terminal.say(f"  {item.name}: {inventory.remove(config.project, item, terminal.say, machine())}")
        except LaunchError as error:  # go on with the others
            terminal.error(f"{item.name}: {error}")
            failures.append(error)
    if failures:
        sys.exit(failures[0].exit_code)
    if leftovers and not yes:
        terminal.say("nothing was deleted: `tpu-launch gc --yes` deletes what is listed")


def _show_failures(listing: inventory.Listing) -> list[LaunchError]:
    """Prints which zones could not be listed, and why; returns the errors."""
    for zone, error in listing.failures.items():
        terminal.error(f"{'all zones' if zone == '-' else zone} could not be listed: {error}")
    return list(listing.failures.values())
