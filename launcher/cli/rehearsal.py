"""`tpu-launch rehearsal`: a whole run on an emulated slice, by the commands that a user would type.

Each step is a command line, printed before it runs. The slice and the emulator are removed at the end, also after a
failure. A rehearsal has a home of its own (`.tpu-launch/rehearsal`), so that slices emulated by hand are left alone;
summary.json there holds the summary that is printed last.
"""

import json
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launcher import installation, shell
from launcher.cli import terminal
from launcher.cli.options import file_option, machine, set_option
from launcher.config import Config, load
from launcher.emulator import control
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home, write_private
from launcher.run.session import find_run
from training import storage
from training.accelerators import Api

_STEP_SECONDS = 1800.0  # of any one step; a first image build is the longest
_TRAINER_KEYS = (
    *("hosts", "devices", "steps", "first_loss", "last_loss", "eval_perplexity", "examples_per_second"),
    *("checkpoint", "committed_step"),
)


@click.command()
@file_option("The run's YAML file.  [default: examples/rehearsal.yaml, which is installed with tpu-launch]")
@set_option("slice.accelerator_type=v4-32")
def rehearsal(path: Path | None, overrides: tuple[str, ...]) -> None:
    """Rehearse a whole run on an emulated slice of this machine: up, prepare data, train, down. Prints each command,
    its lines and a summary; removes slice and emulator at the end."""
    summary = _rehearse(path or installation.example("rehearsal.yaml"), overrides)
    phases = ", ".join(f"{phase} {value:.0f} s" for phase, value in summary["seconds"].items())
    inside = ", ".join(f"{phase} {value:.1f} s" for phase, value in summary["training_seconds"].items())
    click.echo("")
    click.echo(f"hosts                {summary['hosts']} ({summary['accelerator_type']}, emulated)")
    if summary["devices"] > summary["hosts"]:
        click.echo(f"devices              {summary['devices']} (virtual TPU)")
    click.echo(f"steps                {summary['steps']}")
    losses = ["nan" if loss is None else f"{loss:.4f}" for loss in (summary["first_loss"], summary["last_loss"])]
    click.echo(f"loss                 {' -> '.join(losses)}")
    if summary["eval_perplexity"] is not None:
        click.echo(f"evaluation           perplexity {summary['eval_perplexity']:.2f}")
    click.echo(f"speed                {summary['examples_per_second']:.1f} examples/s")
    click.echo(f"committed checkpoint {summary['checkpoint']} (step {summary['committed_step']})")
    click.echo(f"seconds              {phases}")
    click.echo(f"  of the training    {inside}")


def _rehearse(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs all steps on an emulator of its own, in a zone that has the accelerator; then removes slice and emulator in
    any case. Writes summary.json in the rehearsal's home and returns its content. Raises LaunchError with the exit code
    of a failed step, BadInput for a file that can't be rehearsed."""
    config = load(path, overrides)
    zones = config.accelerator.zones(Api.CLOUD_TPU)
    if config.zone not in zones:
        terminal.say(f"{config.zone} has no {config.slice.accelerator_type}; the rehearsal is in {zones[0]}")
        overrides = [*overrides, f"zone={zones[0]}"]
        config = load(path, overrides)
    file = ["-f", str(path), *(word for override in overrides for word in ("--set", override))]
    planned = _list_steps(config, path, file)
    assert config.trainer is not None
    bucket = storage.split_remote(config.trainer.output)[0]
    folder = home() / "rehearsal"
    folder.mkdir(mode=0o700, exist_ok=True)
    seconds = defaultdict[str, float](float)  # by phase
    begun = time.monotonic()
    try:
        for phase, arguments in [("emulator", ["emulator", "start", "--bucket", bucket]), *planned]:
            seconds[phase] += _run(arguments, folder)
        run_id = find_run(folder / control.SUBFOLDER, machine(), None).run_id
        with shell.environment(control.environment(folder / "emulator")):
            result = json.loads(storage.read(storage.join(config.trainer.output, run_id, "summary.json")))
        seconds["down"] += _run(["--emulated", "down", *file], folder)
    finally:
        control.stop(folder / "emulator")
        terminal.say("the emulator and everything it started are gone")
    seconds["total"] = time.monotonic() - begun
    summary = {
        **{key: result.get(key) for key in _TRAINER_KEYS},
        "accelerator_type": config.slice.accelerator_type,
        "seconds": {phase: round(value, 1) for phase, value in seconds.items()},
        "training_seconds": result.get("seconds", {}),
    }
    write_private(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _list_steps(config: Config, path: Path, file: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the commands between `emulator start` and `down`, each after the phase that its seconds count for: create
    the slice, build the image, make tokenizer and dataset of Python's help, run. `file`: the words that name the file
    and its changes. Raises BadInput unless the file trains mlm, with data and output in one bucket, in the folders
    FOLDER/train and FOLDER/evaluation."""
    if config.trainer is None:
        raise BadInput(
            f"{path}: a rehearsal trains: the file needs the trainer's sections (task, model, data, train, output)"
        )
    if config.trainer.task != "mlm":
        raise BadInput(f"{config.document.locate('task')}: a rehearsal has data for mlm, not {config.trainer.task!r}")
    data = config.trainer.data
    urls = [config.trainer.output, data.train, data.tokenizer, data.evaluation or data.train]
    buckets = {storage.split_remote(url)[0] for url in urls if storage.is_remote(url)}
    if len(buckets) != 1:
        raise BadInput(
            f"{path}: a rehearsal streams from one bucket: data.train, data.evaluation, data.tokenizer and output "
            "must be in the same gs:// bucket"
        )
    corpus = data.train.removesuffix("/train")
    if not data.train.endswith("/train") or data.evaluation not in (None, f"{corpus}/evaluation"):
        raise BadInput(
            f"{path}: a rehearsal writes its data to FOLDER/train and FOLDER/evaluation: "
            "data.train and data.evaluation must be named so"
        )
    local = ["--emulated", "local", *file, "--", "tpu-train"]
    text = ["--corpus", "builtin:pydoc"]
    shards = ["shards", *text, "--tokenizer", data.tokenizer, "--sequence-length", "64"]
    return [
        ("slice", ["--emulated", "up", *file]),
        ("image", [*local, "--help"]),
        ("data", [*local, "tokenizer", *text, "--vocabulary", "2000", "--out", data.tokenizer]),
        ("data", [*local, *shards, "--out", corpus]),
        ("run", ["--emulated", "run", "--new", *file]),
    ]


def _run(arguments: Sequence[str], folder: Path) -> float:
    """Prints a `tpu-launch` command, then its output, with the home `folder`; returns its seconds. Raises LaunchError
    with its exit code if that is not 0 (CLOUD_ERROR for an unknown one), CommandTimeout after half an hour."""
    text = shlex.join(["tpu-launch", *arguments])
    terminal.say(f"$ {text}", bold=True)
    begun = time.monotonic()
    result = shell.stream(
        [sys.executable, "-m", "launcher.cli", *arguments],
        lambda line: click.echo(f"         {line}", err=True),
        timeout=_STEP_SECONDS,
        env={"TPU_LAUNCH_HOME": str(folder)},
    )
    if not result.ok:
        code = result.returncode
        raise LaunchError(
            f"the rehearsal stopped: `{text}` ended with {code}; its lines are above",
            exit_code=Exit(code) if code in set(Exit) else Exit.CLOUD_ERROR,
        )
    return time.monotonic() - begun
