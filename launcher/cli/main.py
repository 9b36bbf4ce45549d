"""`tpu-launch`: verbs that parse, call and render. No logic lives here.

Every verb takes `-f FILE`, `--set key=value` and `--emulated`. Errors are one message and a documented exit code
(launcher.errors.Exit).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher import installation
from launcher.cli import terminal
from launcher.cli.groups import Verbs
from launcher.cli.options import configured as _configured
from launcher.errors import Exit, LaunchError
from training.errors import TrainError

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.provider import Provider


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"{context.find_root().info_name}, version {installation.version()}")
        context.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--emulated", is_flag=True, help="Use the emulated slice of this machine instead of Google Cloud.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Print every local command (gcloud, docker, ssh, kubectl) and how it ended."
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and the commit that it was built from.",
)
@click.pass_context
def cli(context: click.Context, emulated: bool, verbose: bool) -> None:
    """Train on every host of a Cloud TPU slice, from one YAML file.

    \b
    tpu-launch up   -f run.yaml        create the slice, wait until all hosts answer
    tpu-launch run  -f run.yaml        build the image, start it on every host, watch
    tpu-launch down -f run.yaml        delete the slice, wait until it is gone
    """
    context.obj = emulated
    if verbose:
        terminal.show_log()


def _provider(config: Config) -> Provider:
    from launcher.providers import make_provider

    return make_provider(config, terminal.say)


_dry_run = click.option("--dry-run", is_flag=True, help="Print the commands, as `plan` does, and do nothing.")


def _show(config: Config, verb: str) -> None:
    from launcher.plan import steps

    for step in steps(config):
        if step.verb == verb:
            click.echo(step.text())


def _with_extras(config: Config, env_file: Path | None, overlay: str | None) -> Config:
    """The configuration with what only the command line says."""
    if overlay is not None:
        from launcher.run.overlay import read

        read(overlay)  # what is wrong with it is said now
        config = replace(config, overlay=overlay)
    if env_file is None:
        return config
    from launcher.run import env_file as reader

    values = reader.read(env_file)
    os.environ.update(values)  # where secrets come from
    names = [*config.run.secrets, *(name for name in values if name not in config.run.secrets)]
    return replace(config, run=config.run.model_copy(update={"secrets": names}))


def _home() -> Path:
    from launcher.home import home

    return home()


@cli.command()
@click.option(
    "--max-cost",
    type=click.FloatRange(0, min_open=True),
    metavar="DOLLARS",
    help="Refuse a slice that costs more an hour.",
)
@click.option("--no-preflight", is_flag=True, help="Go on although preflight found before that the step does not fit.")
@_dry_run
@_configured
def up(config: Config, max_cost: float | None, dry_run: bool, no_preflight: bool) -> None:
    """Create the slice and wait until every host answers. Idempotent: goes on waiting for a slice that is on its
    way."""
    from launcher.checks import inputs, preflight

    if max_cost is not None:
        config = replace(config, slice=config.slice.model_copy(update={"max_cost_per_hour": max_cost}))
    if dry_run:
        _show(config, "up")
        return
    inputs.buckets(config)
    if not no_preflight:
        preflight.require(config, _home(), terminal.say)
    provider = _provider(config)
    try:
        provider.create()
    except KeyboardInterrupt:
        if config.slice.queued is None:  # else the queue's own words were said
            terminal.say(
                "interrupted: Google may go on creating it. `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
            )
        raise
    terminal.say(
        f"slice {config.slice.name} is READY: {config.accelerator.hosts} hosts, {config.accelerator.devices} devices"
    )


@cli.command(context_settings={"ignore_unknown_options": True})
@click.option("--run", "run_id", metavar="RUN", help="Resume this run instead of the newest unfinished one.")
@click.option("--new", is_flag=True, help="Start a new run even if an unfinished one could be resumed.")
@click.option("--attach", is_flag=True, help="Go on watching a run that is already there; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print how the run ended as JSON on standard output, last.")
@click.option("--no-preflight", is_flag=True, help="Go on although preflight found before that the step does not fit.")
@click.option(
    "--env-file", type=click.Path(path_type=Path), help="NAME=VALUE lines for the command; they travel as secrets do."
)
@click.option(
    "--overlay", metavar="FOLDER=TARGET", help="Files over those of the image that ran last, without a build."
)
@_dry_run
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@_configured
def run(
    config: Config,
    run_id: str | None,
    new: bool,
    attach: bool,
    as_json: bool,
    env_file: Path | None,
    overlay: str | None,
    dry_run: bool,
    no_preflight: bool,
    command: tuple[str, ...],
) -> None:
    """Start the container on every host and watch it to its end; resumes an unfinished run.

    \b
    tpu-launch run -f run.yaml                      the trainer, as the file says
    tpu-launch run -f run.yaml -- python train.py   any command of the image
    """
    from launcher.checks import inputs, preflight
    from launcher.images import local
    from launcher.run import launch
    from launcher.run.supervise import explain

    config = _with_extras(config, env_file, overlay)
    if dry_run:
        _show(config, "run")
        return
    if not attach:
        config.require_something_to_run()
        inputs.buckets(config)
        inputs.data(config)
        if not no_preflight:
            config = preflight.require(config, _home(), terminal.say)
    provider = _provider(config)
    try:
        if attach:
            outcome = launch.attach(config, provider, _home(), run_id, say=terminal.say, emit=terminal.host_line)
        else:
            local.check(config)
            provider.connect()
            outcome = launch.run(
                config,
                provider,
                _home(),
                lambda: (launch.last_image(config, _home()) if overlay else None) or local.image(config, terminal.say),
                run_id=run_id,
                new=new,
                say=terminal.say,
                emit=terminal.host_line,
            )
    except KeyboardInterrupt:
        if launch.under_way(config, _home()):
            terminal.say(
                "detached: what was started goes on. `tpu-launch run --attach` watches it again, `tpu-launch stop` stops it"
            )
        else:
            terminal.say("interrupted: nothing of it is running. `tpu-launch run` again starts it or goes on with it")
        raise
    finally:
        provider.close()
    for line in explain(outcome.verdict):
        terminal.say(f"run {outcome.run_id}, attempt {outcome.attempt}: {line}")
    if outcome.last_lines and outcome.verdict.cause is not None:
        terminal.say(f"the last lines of host {outcome.verdict.cause.worker}:")
        for line in outcome.last_lines:
            terminal.say(f"  {line}")
    if as_json:
        verdict = outcome.verdict
        cause = None if verdict.cause is None else asdict(verdict.cause)
        terminal.dump(
            {
                "run": outcome.run_id,
                "attempt": outcome.attempt,
                "outcome": verdict.kind.value,
                "cause": cause,
                "symptoms": list(verdict.symptoms),
                "last_lines": outcome.last_lines,
            }
        )
    sys.exit(outcome.verdict.kind.exit_code)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@_configured
def status(config: Config, as_json: bool) -> None:
    """Show the slice, its newest run, and what each host is doing."""
    from launcher import costs
    from launcher.run import status as look
    from launcher.tpu_vm import placement

    provider = _provider(config)
    try:
        shown = look.status(config, provider, _home())
    finally:
        provider.close()
    created = shown.slice.created if shown.slice is not None else ""
    if as_json:
        terminal.dump(
            {**shown.as_json(), "cost": costs.of_slice(placement.in_current_zone(config), created, time.time())}
        )
    else:
        for line in shown.lines():
            click.echo(line)
        if told := costs.since(placement.in_current_zone(config), created, time.time()):
            click.echo(told)
        if shown.hosts:
            terminal.table(["host", "address", "container", "last line", ""], shown.rows())


@cli.command()
@click.option("--run", "run_id", metavar="RUN", help="This run instead of the newest of the slice.")
@click.option("-f", "--follow", "follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--host", "host", type=int, help="Only this host.")
@click.argument("named", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@functools.partial(_configured, file_flags=("--file",))
def logs(config: Config, run_id: str | None, follow: bool, host: int | None) -> None:
    """Print the lines of all hosts, each once. `-f` follows here: the YAML file is FILE, or --file FILE."""
    from launcher.run import status as look

    provider = _provider(config)
    try:
        look.logs(
            config, provider, _home(), run_id, follow=follow, host=host, emit=terminal.host_line, say=terminal.say
        )
    finally:
        provider.close()


@cli.command()
@click.option("--run", "run_id", metavar="RUN", help="This run instead of the newest of the slice.")
@click.option(
    "--grace", type=click.IntRange(1, 600), help="Seconds between SIGTERM and SIGKILL.  [default: run.stop_seconds]"
)
@_configured
def stop(config: Config, run_id: str | None, grace: int | None) -> None:
    """Stop the run's containers on every host: the trainer saves and can be resumed."""
    from launcher.run import launch

    provider = _provider(config)
    try:
        reports = launch.stop(config, provider, _home(), run_id, grace=grace, say=terminal.say)
    finally:
        provider.close()
    wrong = [report for report in reports if not report.ok]
    for report in wrong:
        terminal.error(f"host {report.worker}: {report.detail}")
    if wrong:
        sys.exit(Exit.CLOUD_ERROR)
    terminal.say("stopped on all hosts")


@cli.command()
@_dry_run
@_configured
def down(config: Config, dry_run: bool) -> None:
    """Delete the slice and wait until it is gone. The runs' folders and what they saved stay."""
    if dry_run:
        _show(config, "down")
        return
    provider = _provider(config)
    try:
        provider.delete()
    except KeyboardInterrupt:
        terminal.say("interrupted: a deletion that Google was asked for goes on; `tpu-launch down` again waits for it")
        raise
    terminal.say(f"slice {config.slice.name} is gone")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="The commands as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@_configured
def plan(config: Config, as_json: bool, command: tuple[str, ...]) -> None:
    """Print every gcloud and docker command that up, run and down would use. Touches nothing."""
    from launcher import costs
    from launcher.plan import steps

    config.require_something_to_run()
    found = steps(config)
    if as_json:
        terminal.dump([asdict(step) for step in found])
    else:
        click.echo(f"# {costs.line(config)}\n")
        for step in found:
            click.echo(step.text())


@cli.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--kind",
    type=click.Choice(["jobset", "job"]),
    default="jobset",
    show_default=True,
    help="job: a cluster without JobSet.",
)
@click.option("--name", metavar="NAME", help="Of the objects and of the run.  [default: run.name]")
@click.option("--image", metavar="IMAGE", help="REPOSITORY@sha256:...  [default: the file's, built and pushed before]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@_configured
def manifest(config: Config, kind: str, name: str | None, image: str | None, command: tuple[str, ...]) -> None:
    """Print the run as Kubernetes objects for GKE, to be read and given to `kubectl apply -f -`. Touches nothing."""
    from launcher.gke import standalone

    config.require_something_to_run()
    click.echo(standalone.manifest(config, kind=kind, name=name, image=image), nl=False)


@cli.command("local", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@_configured
def local_(config: Config, command: tuple[str, ...]) -> None:
    """Run a command in the run's image on this machine, on its CPU: prepare data, try things out."""
    from launcher.images import local

    sys.exit(local.run(config, command, terminal.say))


def main() -> None:
    """The console script. Turns every error into one message and its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(cli(standalone_mode=False))
    except click.exceptions.Abort:
        _end(Exit.DETACHED)
    except KeyboardInterrupt:
        _end(Exit.DETACHED)
    except click.ClickException as error:
        terminal.error(error.format_message())
        _end(Exit.BAD_INPUT)
    except LaunchError as error:
        terminal.error(str(error))
        _end(error.exit_code)
    except TrainError as error:
        terminal.error(str(error))
        _end(Exit.BAD_INPUT if error.exit_code == 2 else Exit.CLOUD_ERROR)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to say, and nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(Exit.OK)


def _interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM is handled as Ctrl-C: local children are ended, what runs on hosts goes on."""
    raise KeyboardInterrupt


def _end(code: Exit) -> None:
    """Leaves at once: look threads that wait for a host must not hold a person up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
