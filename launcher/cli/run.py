"""Commands on a run: `run`, `stop`, `status`, `logs`, `events`."""

import contextlib
import functools
import sys
from dataclasses import asdict
from pathlib import Path

import click

from launcher import costs
from launcher.cli import terminal
from launcher.cli.options import configured, dry_run_option, machine, open_provider, run_context, run_option, show_plan
from launcher.config import Config
from launcher.errors import Exit
from launcher.home import home
from launcher.run import launch
from launcher.run import status as statuses
from launcher.run.logs import print_logs
from launcher.run.session import Outcome, find_run
from launcher.run.stop import explain_interrupt, stop_run
from launcher.run.verdict import explain
from launcher.tpu_vm import slice_hints


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--run",
    "run_id",
    metavar="RUN",
    help="Resume this run (its id, or gs://bucket/runs/ID) instead of the newest unfinished one.",
)
@click.option("--new", is_flag=True, help="Start a new run even if an unfinished one could be resumed.")
@click.option("--attach", is_flag=True, help="Watch a run that was started before; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print how the run ended as JSON on standard output, last.")
@click.option("--no-preflight", is_flag=True, help="Start although preflight found that the step does not fit.")
@click.option(
    "--env-file",
    type=click.Path(path_type=Path),
    help="NAME=VALUE lines for the command; sent to hosts as secrets are.",
)
@click.option(
    "--overlay", metavar="FOLDER=TARGET", help="Lay files over those of the image that ran last, without a build."
)
@click.option(
    "--sync", metavar="FOLDER[=TARGET]", help="Restart the command with the folder's changed files, without a build."
)
@dry_run_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def run(
    config: Config,
    run_id: str | None,
    new: bool,
    attach: bool,
    as_json: bool,
    env_file: Path | None,
    overlay: str | None,
    sync: str | None,
    dry_run: bool,
    no_preflight: bool,
    command: tuple[str, ...],
) -> None:
    """Start the container on every host of a READY slice and watch it to its end; resumes an unfinished run. Ctrl-C
    detaches: the run goes on. The exit code says how the last attempt ended.

    \b
    tpu-launch run -f run.yaml                      the trainer, as the file says
    tpu-launch run -f run.yaml -- python train.py   any command of the image
    """
    request = launch.RunRequest(
        config, run_id=run_id, new=new, env_file=env_file, overlay=overlay, sync=sync, preflight=not no_preflight
    )
    if dry_run:
        launch.read_extras(request, run_context())  # which may refuse them
        show_plan(config, "run")
        return
    try:
        outcome = (launch.attach if attach else launch.run)(request, run_context())
    except KeyboardInterrupt:
        explain_interrupt(config, run_context())
        raise
    show_outcome(outcome, as_json)
    sys.exit(outcome.verdict.kind.exit_code)


def show_outcome(outcome: Outcome, as_json: bool) -> None:
    """Prints on standard error how the run ended: its verdict, the last lines of the first cause. With `as_json` prints
    all of it as JSON on standard output too."""
    verdict = outcome.verdict
    for line in explain(verdict):
        terminal.say(f"run {outcome.run_id}, attempt {outcome.attempt}: {line}")
    if outcome.last_lines and verdict.cause is not None:
        terminal.say(f"the last lines of host {verdict.cause.worker}:")
        for line in outcome.last_lines:
            terminal.say(f"  {line}")
    if as_json:
        cause = None if verdict.cause is None else asdict(verdict.cause)
        values = {"run": outcome.run_id, "attempt": outcome.attempt, "outcome": verdict.kind.value, "cause": cause}
        terminal.dump({**values, "symptoms": list(verdict.symptoms), "last_lines": outcome.last_lines})


@click.command()
@run_option
@click.option(
    "--grace", type=click.IntRange(1, 600), help="Seconds between SIGTERM and SIGKILL.  [default: run.stop_seconds]"
)
@configured
def stop(config: Config, run_id: str | None, grace: int | None) -> None:
    """Stop the run's containers on every host and wait for their end: the trainer saves. No attempt follows until `run`
    resumes it, whichever process supervises the run."""
    reports = stop_run(config, run_context(), run_id, grace=grace)
    failed = [report for report in reports if not report.ok]
    for report in failed:
        terminal.error(f"host {report.worker}: {report.detail}")
    if failed:
        sys.exit(Exit.CLOUD_ERROR)
    if reports:
        terminal.say("stopped on all hosts")


@click.command()
@run_option
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def status(config: Config, run_id: str | None, as_json: bool) -> None:
    """Show the slice, its newest run, and what each host is doing."""
    with contextlib.closing(open_provider(config)) as provider:
        shown = statuses.read_status(config, run_context(), provider, run_id)
    created = shown.slice.created if shown.slice is not None else ""
    placed = slice_hints.in_current_place(config)
    if as_json:
        terminal.dump({**asdict(shown), "cost": costs.of_slice(placed, created, machine().clock.time())})
        return
    for line in shown.lines():
        terminal.show(line)
    if cost := costs.since(placed, created, machine().clock.time()):
        terminal.show(cost)
    if shown.hosts:
        terminal.table(["host", "address", "container", "last line", ""], shown.rows())


@click.command()
@run_option
@click.option("-f", "--follow", "follow", is_flag=True, help="Follow until the run has ended.")
@click.option("--host", "host", type=int, help="Only this host.")
@click.argument("named", metavar="[FILE]", type=click.Path(), required=False)
@functools.partial(configured, file_flags=("--file",))
def logs(config: Config, run_id: str | None, follow: bool, host: int | None) -> None:
    """Print the lines of all hosts in the run's newest attempt, each once. Here -f means follow: the YAML file is FILE,
    or --file FILE."""
    print_logs(config, run_context(), run_id, follow=follow, host=host)


@click.command()
@run_option
@click.option("--json", "as_json", is_flag=True, help="One list, every detail.")
@configured
def events(config: Config, run_id: str | None, as_json: bool) -> None:
    """Print the events of a run, oldest first: attempts, hosts lost and back, stops, recoveries, ends; other machines'
    too, if the run's bucket answers."""
    ledger = find_run(home(), machine(), run_id, slice_name=config.slice.name, provider=config.provider)
    if as_json:
        terminal.dump([entry.document() for entry in ledger.entries()])
        return
    for entry in ledger.entries():
        terminal.show(statuses.describe_event(entry))
