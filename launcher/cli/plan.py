"""Commands that prepare a run and start nothing on hosts: `plan`, `manifest`, `local`, `image base`."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from launcher import costs
from launcher import plan as plans
from launcher.cli import terminal
from launcher.cli.options import configured, machine
from launcher.config import Config
from launcher.errors import BadInput
from launcher.gke import manifest as manifests
from launcher.images import base as bases
from launcher.images import local as images


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The commands as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def plan(config: Config, as_json: bool, command: tuple[str, ...]) -> None:
    """Print every gcloud and docker command that up, run and down would use. Touches nothing."""
    config.require_something_to_run()
    steps = plans.list_commands(config)
    if as_json:
        terminal.dump([asdict(step) for step in steps])
        return
    click.echo(f"# {costs.line(config)}\n")
    for step in steps:
        click.echo(step.text())


@click.command(context_settings={"ignore_unknown_options": True})
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
@configured
def manifest(config: Config, kind: str, name: str | None, image: str | None, command: tuple[str, ...]) -> None:
    """Print the run as Kubernetes objects for GKE, to be read and given to `kubectl apply -f -`. Touches nothing."""
    config.require_something_to_run()
    secret = machine().random.randbytes(32).hex()
    click.echo(manifests.render(config, secret=secret, kind=kind, name=name, image=image), nl=False)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@configured
def local(config: Config, command: tuple[str, ...]) -> None:
    """Run a command in the run's image on this machine, on its CPU: prepare data, try things out."""
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
    registry. It is rebuilt after an upgrade that changed its packages.
    """
    if config.image.dockerfile or config.image.reference or config.image.base:
        raise BadInput(
            f"{config.document.name}: image base makes the base of our own image: leave out image.dockerfile, "
            "image.reference and image.base"
        )
    spec = images.image_spec(config)
    if cloud_build:
        click.echo(bases.cloud_build_commands(spec, config.project), nl=False)
        return
    click.echo(bases.make(spec, terminal.say))
