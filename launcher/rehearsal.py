"""`tpu-launch rehearsal`: a whole run on an emulated slice, by the commands that a user would type.

Each step is a command line, printed before it runs. The slice and the emulator are removed at the end, also after a
failure. A rehearsal has a home of its own (`.tpu-launch/rehearsal`), so that slices emulated by hand are left alone;
summary.json there holds the summary that is printed last.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import shell
from launcher.config import Config, load
from launcher.emulator import control
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home, write_private
from launcher.providers import this_machine
from launcher.run.session import find_run
from training import storage
from training.accelerators import Api

_STEP_SECONDS = 1800.0  # of any one step; a first image build is the longest
_SEQUENCE_LENGTH = 64
_VOCABULARY = 2000
_TRAINER_KEYS = (
    "hosts",
    "devices",
    "steps",
    "first_loss",
    "last_loss",
    "eval_perplexity",
    "examples_per_second",
    "checkpoint",
    "committed_step",
)


@dataclass(frozen=True)
class Screen:
    """Shows the rehearsal to the user."""

    say: Callable[[str], None]  # a line about the rehearsal itself
    command: Callable[[str], None]  # a command line that is about to run
    line: Callable[[str], None]  # a line that a command printed


def list_steps(config: Config, path: Path, overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the commands between `emulator start` and `emulator stop`, each after the phase that its seconds count
    for: create the slice, build the image, make tokenizer and dataset of Python's help, run. Raises BadInput unless the
    file trains mlm, with data and output in one bucket, in the folders FOLDER/train and FOLDER/evaluation."""
    if config.trainer is None:
        raise BadInput(
            f"{path}: a rehearsal trains: the file needs the trainer's sections (task, model, data, train, output)"
        )
    if config.trainer.task != "mlm":
        raise BadInput(
            f"{config.document.place(('task',))}: task: a rehearsal has data for mlm, not {config.trainer.task!r}"
        )
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
    file = _file(path, overrides)
    local = ["--emulated", "local", *file, "--", "tpu-train"]
    text = ["--corpus", "builtin:pydoc"]
    shards = ["shards", *text, "--tokenizer", data.tokenizer, "--sequence-length", str(_SEQUENCE_LENGTH)]
    return [
        ("slice", ["--emulated", "up", *file]),
        ("image", [*local, "--help"]),
        ("data", [*local, "tokenizer", *text, "--vocabulary", str(_VOCABULARY), "--out", data.tokenizer]),
        ("data", [*local, *shards, "--out", corpus]),
        ("run", ["--emulated", "run", "--new", *file]),
    ]


def _file(path: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the options that name the run's file and its changes: -f PATH --set KEY=VALUE ..."""
    return ["-f", str(path), *(word for override in overrides for word in ("--set", override))]


def rehearse(path: Path, overrides: Sequence[str], screen: Screen) -> dict[str, Any]:
    """Runs all steps on an emulator of its own, in a zone that has the accelerator; writes summary.json and returns its
    content. Removes slice and emulator in any case. Raises LaunchError with the exit code of a failed step."""
    config = load(path, overrides)
    zones = config.accelerator.zones(Api.CLOUD_TPU)
    if config.zone not in zones:
        screen.say(f"{config.zone} has no {config.slice.accelerator_type}; the rehearsal is in {zones[0]}")
        overrides = [*overrides, f"zone={zones[0]}"]
        config = load(path, overrides)
    planned = list_steps(config, path, overrides)
    assert config.trainer is not None
    bucket = storage.split_remote(config.trainer.output)[0]
    folder = home() / "rehearsal"
    folder.mkdir(mode=0o700, exist_ok=True)
    environment = {"TPU_LAUNCH_HOME": str(folder)}
    seconds: dict[str, float] = {}
    begun = time.monotonic()

    def step(phase: str, arguments: Sequence[str]) -> None:
        seconds[phase] = seconds.get(phase, 0.0) + _run(arguments, environment, screen)

    try:
        step("emulator", ["emulator", "start", "--bucket", bucket])
        for phase, arguments in planned:
            step(phase, arguments)
        result = _trainer_summary(config, folder)
        step("down", ["--emulated", "down", *_file(path, overrides)])
    finally:
        control.stop(folder / "emulator")
        screen.say("the emulator and everything it started are gone")
    seconds["total"] = time.monotonic() - begun
    summary = {
        **{key: result[key] for key in _TRAINER_KEYS},
        "accelerator_type": config.slice.accelerator_type,
        "seconds": {phase: round(value, 1) for phase, value in seconds.items()},
        "training_seconds": result.get("seconds", {}),
    }
    write_private(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def lines(summary: dict[str, Any]) -> list[str]:
    """Returns the summary as lines for the user."""
    phases = ", ".join(f"{phase} {value:.0f} s" for phase, value in summary["seconds"].items())
    inside = ", ".join(f"{phase} {value:.1f} s" for phase, value in summary["training_seconds"].items())
    devices = [f"devices              {summary['devices']} (virtual TPU)"]
    return [
        f"hosts                {summary['hosts']} ({summary['accelerator_type']}, emulated)",
        *(devices if summary["devices"] > summary["hosts"] else []),
        f"steps                {summary['steps']}",
        f"loss                 {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}",
        f"evaluation           perplexity {summary['eval_perplexity']:.2f}",
        f"speed                {summary['examples_per_second']:.1f} examples/s",
        f"committed checkpoint {summary['checkpoint']} (step {summary['committed_step']})",
        f"seconds              {phases}",
        f"  of the training    {inside}",
    ]


def _run(arguments: Sequence[str], environment: dict[str, str], screen: Screen) -> float:
    """Runs one `tpu-launch` command as a user would, shows its output, and returns its seconds. Raises LaunchError."""
    screen.command(shell.quote(["tpu-launch", *arguments]))
    begun = time.monotonic()
    result = shell.stream(
        [sys.executable, "-m", "launcher.cli", *arguments], screen.line, timeout=_STEP_SECONDS, env=environment
    )
    if not result.ok:
        code = result.returncode
        raise LaunchError(
            f"the rehearsal stopped: `tpu-launch {shell.quote(arguments)}` ended with {code}; its lines are above",
            exit_code=Exit(code) if code in set(Exit) else Exit.CLOUD_ERROR,
        )
    return time.monotonic() - begun


def _trainer_summary(config: Config, folder: Path) -> dict[str, Any]:
    """Reads the newest run's summary from the bucket; sets the emulator's variables in os.environ meanwhile."""
    assert config.trainer is not None
    run_id = find_run(folder / control.SUBFOLDER, this_machine(), None).run_id
    with shell.environment(control.environment(folder / "emulator")):
        url = storage.join(config.trainer.output, run_id, "summary.json")
        summary: dict[str, Any] = json.loads(storage.read(url))
    return summary
