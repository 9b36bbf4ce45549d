"""Commands that set up a workstation: `init` writes a first file, `completion` prints a shell's completion script."""

import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from launcher import scaffold, shell
from launcher.cli import terminal
from launcher.cli.options import DEFAULT_FILE, file_option
from launcher.errors import BadInput

_COMPLETION_VARIABLE = "_TPU_LAUNCH_COMPLETE"  # click's name for the program tpu-launch


@click.command()
@file_option("The file to write.", DEFAULT_FILE)
@click.option("--project", help="Google Cloud project.")
@click.option("--accelerator-type", help="v2-8 ... v6e-256.")
@click.option("--zone", help="Where the slice is created.  [default: the first with that accelerator]")
@click.option("--name", help="Name of the TPU node.  [default: the file's folder]")
@click.option(
    "--capacity",
    type=click.Choice(["on-demand", "spot", "reserved"]),
    default="on-demand",
    show_default=True,
    help="spot: cheap, and can be taken away at any time.",
)
@click.option("--bucket", help="Data and checkpoints: writes the trainer's sections too.")
@click.option("--repository", help="REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME: where the image is pushed.")
def init(
    path: Path,
    project: str | None,
    accelerator_type: str | None,
    zone: str | None,
    name: str | None,
    capacity: str,
    bucket: str | None,
    repository: str | None,
) -> None:
    """Write a first file, commented and valid; asks on a terminal for what flags do not say. Never overwrites.

    \b
    tpu-launch init
    tpu-launch init -f bert.yaml --project my-project --accelerator-type v4-16 --bucket my-bucket
    """
    if path.exists():
        raise BadInput(f"{path} exists and is not overwritten: choose another name with --file, or remove it")
    project = project or _ask("--project", "Google Cloud project")
    accelerator = scaffold.known(accelerator_type or _ask("--accelerator-type", "Accelerator type", "v4-8"))
    zone = zone or _ask("--zone", "Zone", accelerator.zones()[0], optional=True)
    name = name or _ask("--name", "Name of the slice", _slice_name(path), optional=True)
    if bucket is None:
        bucket = _ask("--bucket", "Bucket for data and checkpoints (empty: none)", "", optional=True)
    bucket = bucket.removeprefix("gs://").rstrip("/")
    scaffold.write(path, scaffold.Answers(project, accelerator.name, zone, name, capacity, bucket or None, repository))
    terminal.say(f"wrote {path}; next: {shell.quote(['tpu-launch', 'doctor', '-f', str(path)])}")


def _ask(flag: str, question: str, default: str | None = None, *, optional: bool = False) -> str:
    """Returns the user's answer; without a terminal, an optional one's default, else raises BadInput with the flag."""
    if sys.stdin.isatty():
        return str(click.prompt(question, default=default, err=True)).strip()
    if default is not None and optional:
        return default
    raise BadInput(f"there is no terminal to ask on: give {flag}")


def _slice_name(path: Path) -> str:
    """Returns the name of the file's folder as a valid name of a slice; "slice" if nothing is left of it."""
    letters = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in path.absolute().parent.name.lower()
    )
    return letters.strip("-0123456789")[:40].rstrip("-") or "slice"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash    add to ~/.bashrc:     eval "$(tpu-launch completion bash)"
    zsh     add to ~/.zshrc:      eval "$(tpu-launch completion zsh)"
    fish    run once:             tpu-launch completion fish > ~/.config/fish/completions/tpu-launch.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    try:
        click.echo(complete(context.find_root().command, {}, "tpu-launch", _COMPLETION_VARIABLE).source())
    except RuntimeError as error:  # click asks bash for its version
        raise BadInput(f"completion for {shell}: {error}") from None
