"""Commands on the runs of a bucket's folder: `supervise`, and `list gs://bucket/runs`."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher import supervisor_manifest
from launcher.cli import terminal
from launcher.cli.options import emulation, machine
from launcher.cli.run import show_outcome
from launcher.errors import BadInput, LaunchError
from launcher.home import home
from launcher.images import build
from launcher.images.repositories import parse_reference
from launcher.images.specification import launcher_spec
from launcher.providers import make_provider, require_programs
from launcher.run import supervisor
from launcher.run.bucket import RunBucket
from launcher.run.ledger import Ledger
from launcher.run.session import Context, Output, import_run
from launcher.run.state import Phase
from launcher.workstation import Owner
from training import storage


@click.command()
@click.option(
    "--manifest",
    "kind",
    type=click.Choice(supervisor_manifest.KINDS),
    help="Print a shell script that deploys a supervisor there, with the rights that it needs. Does not run it.",
)
@click.option(
    "--image",
    metavar="IMAGE",
    help="With --manifest: REPOSITORY@sha256:..., or a repository to which the image is built and pushed first.",
)
@click.option("--project", help="With --manifest: the project of the supervisor and of the slices.")
@click.option(
    "--zone", default="us-central1-a", help="With --manifest: the VM's zone; the Cloud Run job is in its region."
)
@click.argument("url", metavar="gs://bucket/runs[/ID]")
@click.pass_context
def supervise(
    context: click.Context, url: str, kind: str | None, image: str | None, project: str | None, zone: str
) -> None:
    """Take over every unfinished run of a folder that no process supervises: watch it, recover it by its own budgets.
    Works until Ctrl-C or SIGTERM; the runs continue then, and another supervisor can take them over. With --manifest
    only prints a script, after making and pushing --image unless it has a digest.

    \b
    tpu-launch supervise gs://bucket/runs       all runs, each in a process of its own
    tpu-launch supervise gs://bucket/runs/ID    one run, to its end
    tpu-launch supervise --manifest vm --project my-project --image us-docker.pkg.dev/my-project/images/launcher \\
        gs://bucket/runs | sh                   all runs, on a small VM
    """
    url = url.rstrip("/")
    if kind is not None:
        if image is None or project is None:
            raise BadInput("--manifest needs --image and --project: the script names both")
        if "@" not in image:
            if parse_reference(image).tag:
                raise BadInput(f"--image {image}: leave out the tag: the image is pushed under one of its own")
            image = build.ensure_image(launcher_spec(image), terminal.say).reference
        spec = supervisor_manifest.SupervisorSpec(url, image, project, zone)
        click.echo(supervisor_manifest.render(kind, spec), nl=False)
        return
    if image is not None or project is not None:
        raise BadInput("--image and --project belong to --manifest: without it, this machine supervises the runs")
    _require_bucket(url)
    with emulation(bool(context.find_root().obj)):
        if not RunBucket.of_run(url).has_run():
            supervisor.Supervisor(url, _context(None), require_programs).watch()
            return
        ledger = import_run(home(), machine(), url)
        require_programs(ledger.record.provider)  # before its lease is taken from a supervisor that has them
        outcome = supervisor.take_over(ledger, _context(ledger))
        if outcome is not None:
            show_outcome(outcome, as_json=False)
            sys.exit(outcome.verdict.kind.exit_code)
        terminal.say(f"run {ledger.run_id}: nothing is left to do: {_describe(ledger)}")


def _require_bucket(url: str) -> None:
    """Raises BadInput for a URL that is not gs://."""
    if not storage.is_remote(url):
        raise BadInput(f"{url}: name the folder of the runs in their bucket, gs://bucket/runs")


def _context(ledger: Ledger | None) -> Context:
    """Returns this process's context: slices are created and deleted under the name of the run's user (None: this
    process's), and hosts' lines go to the run's folder only. Creates the launcher's folder if missing."""
    own = machine()
    if ledger is not None and ledger.record.user:
        owner = Owner(ledger.record.user, ledger.record.account)
        own = replace(own, find_owner=lambda: owner)

    output = Output(terminal.say, lambda worker, line: None)
    return Context(home(), os.environ, lambda config: make_provider(config, terminal.say, own), output, own)


def list_runs_of(folder: str, *, as_json: bool) -> None:
    """Prints each run of a bucket's folder with its state, or why it can't be read, and the machine that supervises it,
    as a table or JSON; skips folders without a run. Raises BadInput if `folder` is not gs://, LaunchError for a silent
    bucket."""
    _require_bucket(folder)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = [_row(storage.join(folder, name), Path(scratch)) for name in storage.folders(folder)]
        except storage.StorageError as error:
            raise LaunchError(f"{folder} can't be read: {error}") from None
    found = [row for row in rows if row is not None]
    if as_json:
        terminal.dump(found)
    elif found:
        terminal.table(
            list(found[0]), [["" if value is None else str(value) for value in row.values()] for row in found]
        )
    else:
        terminal.say(f"no run in {folder} keeps its ledger there")


def _row(url: str, scratch: Path) -> dict[str, Any] | None:
    """Imports a run into `scratch` and returns its row of `list_runs_of` by column, "attempt" being None before the
    first, "supervised by" "" without a live lease, "state" why if the run can't be read; None for a folder without a
    run. Raises StorageError for a silent bucket, OSError for a file here."""
    if not RunBucket.of_run(url).has_run():
        return None
    row = {"run": storage.name_of(url), "slice": "", "attempt": None, "state": "", "supervised by": ""}
    try:
        ledger = import_run(scratch, machine(), url, overlays=False)
        assert ledger.bucket is not None
        lease = ledger.bucket.read_lease()
        return {
            **row,
            "slice": ledger.record.slice,
            "attempt": None if ledger.state.phase is Phase.NEW else ledger.state.attempt,
            "state": _describe(ledger),
            "supervised by": lease.holder.partition(":")[0] if lease is not None and lease.is_live else "",
        }
    except (LaunchError, storage.StorageError, ValueError, LookupError, TypeError) as error:
        # A run that was copied, is damaged, or is of another version must not hide the others.
        return {**row, "state": f"can't be read: {error}".partition("\n")[0]}


def _describe(ledger: Ledger) -> str:
    """Returns where a run stands: "recovering after preempted", "never started", its last outcome, or its phase."""
    state = ledger.state
    if state.recovering is not None:
        return f"recovering after {state.recovering.after}"
    return "never started" if state.phase is Phase.NEW else state.outcome or state.phase.value
