"""Commands that prepare a run and start nothing on hosts: `plan`, `estimate`, `preflight`, `manifest`, `local`,
`image base`."""

import sys
from dataclasses import asdict

import click

from launcher import costs
from launcher import estimate as estimates
from launcher import plan as plans
from launcher.cli import terminal
from launcher.cli.options import configured, machine
from launcher.config import Config
from launcher.errors import BadInput, Exit
from launcher.gke import manifest as manifests
from launcher.home import home, where
from launcher.images import local as images
from launcher.images.appended import cloud_build_commands, make_base
from launcher.run.progress import describe_limits


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The commands as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def plan(config: Config, as_json: bool, command: tuple[str, ...]) -> None:
    """Print every gcloud and docker command that up, run and down would use, below cost, estimate and time limits as
    comments. Touches nothing. Refuses a file with nothing to run."""
    config.require_something_to_run()
    steps = plans.list_commands(config)
    if as_json:
        terminal.dump([asdict(step) for step in steps])
        return
    click.echo(f"# {costs.line(config)}")
    if known := estimates.line(config, where(), machine()):
        click.echo(f"# {known}")
    for line in describe_limits(config.run.stall_minutes):
        click.echo(f"# {line}")
    click.echo()
    for step in steps:
        click.echo(step.text())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@configured
def estimate(config: Config, as_json: bool) -> None:
    """Estimate hours and dollars of the run on each candidate, from what is known: compiles and rents nothing. Reads
    the datasets' manifests; needs the trainer's sections."""
    items = estimates.estimate(config, home(), machine())
    if as_json:
        terminal.dump({"candidates": [asdict(item) for item in items]})
        return
    terminal.table(list(estimates.COLUMNS), [estimates.row(item) for item in items])
    for line in estimates.notes(items):
        click.echo(line)


@click.command()
@click.option("--accelerator", "accelerators", metavar="TYPE,...", help="v3-8,v4-32,...  [default: the file's]")
@click.option(
    "--max-batch",
    is_flag=True,
    help="Also search for the largest training batch that fits: compiles about six times more.",
)
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@click.option("--vocabulary", type=int, help="Before there is a tokenizer: how many ids it will have.")
@click.option(
    "--sequence-length", metavar="N,...", help="Before there is data: tokens a row; of each bucket, for classification."
)
@click.option("--labels", type=int, help="Before there is data, classification: how many labels.")
@configured
def preflight(
    config: Config,
    accelerators: str | None,
    max_batch: bool,
    as_json: bool,
    vocabulary: int | None,
    sequence_length: str | None,
    labels: int | None,
) -> None:
    """Compile the run's step with the TPU compiler, here, for slices that need not exist: does it fit, and what does it
    cost? Makes the image if needed, and reuses kept results. Exits with 15 unless the step fits on all.

    \b
    tpu-launch preflight -f run.yaml
    tpu-launch preflight -f run.yaml --accelerator v3-8,v4-32 --max-batch
    """
    from launcher.checks import preflight as checks

    stand_ins = {"--vocabulary": vocabulary, "--sequence-length": sequence_length, "--labels": labels}
    more = [part for flag, value in stand_ins.items() if value is not None for part in (flag, str(value))]
    names = [name.strip() for name in (accelerators or "").split(",") if name.strip()]
    results = checks.check(config, home(), names, max_batch=max_batch, more=more, say=terminal.say)
    if as_json:
        terminal.dump({"fits": all(result["fits"] for result in results), "accelerators": results})
    else:
        for line in (line for result in results for line in result["lines"]):
            click.echo(line)
    sys.exit(Exit.OK if all(result["fits"] for result in results) else Exit.DOES_NOT_FIT)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--name", metavar="NAME", help="Of the objects and of the run.  [default: run.name]")
@click.option("--image", metavar="IMAGE", help="REPOSITORY@sha256:...  [default: the file's, built and pushed before]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def manifest(config: Config, name: str | None, image: str | None, command: tuple[str, ...]) -> None:
    """Print the run as Kubernetes objects for GKE, to be read and given to `kubectl apply -f -`. Changes nothing; may
    ask the registry for the image's digest. The objects hold a secret of the hosts, a new one each time.
    """
    config.require_something_to_run()
    secret = machine().random.randbytes(32).hex()
    click.echo(manifests.render(config, secret=secret, name=name, image=image), nl=False)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@configured
def local(config: Config, command: tuple[str, ...]) -> None:
    """Run a command in the run's image, which is made and pushed if needed, on this machine's CPU and in the current
    folder: prepare data, try things out. Needs docker; the command gets your Google credentials and those of
    run.secrets that are set here. Its exit code is ours."""
    sys.exit(images.run(config, command, terminal.say))


@click.group()
def image() -> None:
    """Base images, which machines without a container engine need once."""


@image.command()
@click.option("--cloud-build", is_flag=True, help="Print the commands that make it by Cloud Build, and do nothing.")
@configured
def base(config: Config, cloud_build: bool) -> None:
    """Make the base image and push it to image.repository, unless it is there.

    It holds everything but the code. `run` on a machine without a container engine appends the code to it, in the
    registry. It is rebuilt after an upgrade that changed its packages. Making it needs a container engine, or the
    commands that --cloud-build prints; the file must not name a Dockerfile, a reference or a base.
    """
    if config.image.dockerfile or config.image.reference or config.image.base:
        raise BadInput(
            f"{config.document.name}: image base makes the base of our own image: leave out image.dockerfile, "
            "image.reference and image.base"
        )
    spec = images.image_spec(config)
    if cloud_build:
        click.echo(cloud_build_commands(spec, config.project), nl=False)
        return
    click.echo(make_base(spec, terminal.say))
