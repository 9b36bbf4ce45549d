"""Commands that set up a workstation: `init` writes a first file, `completion` prints a shell's completion script.

`text` makes the file's content from first_*.yaml and answers; `write` loads it with the real checks before the file
gets its name.
"""

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template

import click
from click.shell_completion import get_completion_class

from launcher.cli import terminal
from launcher.cli.options import DEFAULT_FILE, file_option
from launcher.config import load
from launcher.errors import BadInput
from training.accelerators import accelerator

_COMPLETION_VARIABLE = "_TPU_LAUNCH_COMPLETE"  # click's name for the program tpu-launch
_PLAIN = re.compile(r"[A-Za-z]([A-Za-z0-9._/:-]*[A-Za-z0-9])?")
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]{0,60}[a-z0-9]")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Answers:
    """The values of the file that have no default."""

    project: str
    accelerator_type: str
    zone: str
    name: str
    capacity: str
    bucket: str | None = None  # without gs://; None: the file describes a slice only
    repository: str | None = None


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
    """Write a first file, commented and valid; asks on a terminal for what flags do not say. Without a terminal
    --project and --accelerator-type are needed. Never overwrites.

    \b
    tpu-launch init
    tpu-launch init -f bert.yaml --project my-project --accelerator-type v4-16 --bucket my-bucket
    """
    _require_new(path)
    project = project or _ask("--project", "Google Cloud project")
    slice_type = accelerator(accelerator_type or _ask("--accelerator-type", "Accelerator type", "v4-8"))
    zone = zone or _ask("--zone", "Zone", slice_type.zones()[0], optional=True)
    letters = re.sub("[^a-z0-9]", "-", path.absolute().parent.name.lower()).strip("-0123456789")  # of its folder
    name = name or _ask("--name", "Name of the slice", letters[:40].rstrip("-") or "slice", optional=True)
    if bucket is None:
        bucket = _ask("--bucket", "Bucket for data and checkpoints (empty: none)", "", optional=True)
    bucket = bucket.removeprefix("gs://").rstrip("/")
    write(path, Answers(project, slice_type.name, zone, name, capacity, bucket or None, repository))
    terminal.say(f"wrote {path}; next: {shlex.join(['tpu-launch', 'doctor', '-f', str(path)])}")


def _require_new(path: Path) -> None:
    """Raises BadInput if the file exists, or is a symbolic link to none."""
    if os.path.lexists(path):
        raise BadInput(f"{path} exists and is not overwritten: choose another name with --file, or remove it")


def _ask(flag: str, question: str, default: str | None = None, *, optional: bool = False) -> str:
    """Asks on the terminal, where Enter means `default` (None: asks again), and returns the answer. Without a terminal,
    returns the default if there is one and it is `optional`, else raises BadInput, which names `flag`."""
    if sys.stdin.isatty():
        return str(click.prompt(question, default=default, err=True)).strip()
    if default is not None and optional:
        return default
    raise BadInput(f"there is no terminal to ask on: give {flag}")


_NO_TRAINER = """\
# No trainer sections: give the command, `tpu-launch run -- python train.py`. \
With `init --bucket` the trainer's are written too.
"""


def text(answers: Answers) -> str:
    """Returns the file's content, with the trainer's sections only if there is a bucket. Raises UnknownAccelerator, and
    BadInput for an impossible project id; `write` checks the other answers."""
    slice_type = accelerator(answers.accelerator_type)
    if not _PROJECT.fullmatch(answers.project):
        raise BadInput(f"{answers.project!r} can't be a project id: lower-case letters, digits and hyphens")
    values = {key: _scalar(value) for key, value in asdict(answers).items() if value is not None}
    pushed = f"{values.get('repository')} # where the image is pushed; hosts run it by digest"
    example = f"REGION-docker.pkg.dev/{answers.project}/REPOSITORY/NAME"
    none = f"null # for real slices: {example}; emulated ones need none"
    values["repository"] = pushed if answers.repository else none
    hosts = f"{slice_type.hosts} host{'s'[: slice_type.hosts > 1]}"
    values |= {"zones": ", ".join(slice_type.zones()), "hosts": hosts, "devices": str(slice_type.devices)}
    beginning = _fill("first_slice.yaml", values)
    if answers.bucket is None:
        return beginning + _NO_TRAINER
    folders = {"tokenizer": "tokenizer", "train": "data/train", "evaluation": "data/evaluation", "runs": "runs"}
    urls = {key: _scalar(f"gs://{answers.bucket}/{folder}") for key, folder in folders.items()}
    return beginning + _fill("first_trainer.yaml", {"batch": str(32 * slice_type.devices), **urls})


def _fill(name: str, values: dict[str, str]) -> str:
    """Returns a file of this folder with `values` in the places of their $names."""
    return Template((resources.files(__package__) / name).read_text(encoding="utf-8")).substitute(values)


def _scalar(value: str) -> str:
    """Formats a string as YAML, without quotes where that is safe."""
    return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else json.dumps(value, ensure_ascii=False)


def write(path: Path, answers: Answers) -> None:
    """Writes the file in one step, after loading it with the real checks. Raises BadInput when the file exists or can't
    be written, or an answer makes it invalid; then nothing is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text(answers), encoding="utf-8")
        try:
            load(temporary)
        except BadInput as error:
            raise BadInput(str(error).replace(str(temporary), str(path)) + "\nnothing was written") from None
        os.link(temporary, path)  # fails when another process wrote it meanwhile
    except FileExistsError:
        raise BadInput(f"{path} exists and is not overwritten") from None
    except OSError as error:
        raise BadInput(f"{path}: can't be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # a path that can't be written can't be removed either
            temporary.unlink()


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
