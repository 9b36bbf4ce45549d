"""Will the step fit? `tpu-launch preflight`, what it found before, and what `up` and `run` make of that.

The image's own `tpu-train preflight` compiles the step with the TPU compiler, in a container here. What it says is kept
below `.tpu-launch/preflight/`, a file for each accelerator and question: its name is a hash of everything that the
answer depends on (the trainer's sections that shape the step, the manifests of the datasets and the tokenizer, the
accelerator, and the image's content, which includes the trainer's code and the compiler). A file is written whole or
not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.images import build as images
from launcher.images import local
from launcher.run.launch import CHECKED
from training import storage
from training.accelerators import UnknownAccelerator, accelerator
from training.data.formats.dataset import MANIFEST
from training.storage.hub import is_on_hub

FORMAT = 1
_MARK = '{"preflight"'  # what the JSON line of `tpu-train preflight` begins with
# What the trainer reads and no program depends on.
_NOT_IN_PROGRAMS = ("output", "checkpoint", "export", "rendezvous")
_NOT_IN_STEP = ("steps", "learning_rate", "warmup_steps", "schedule", "log_every", "strict", "prefetch")

Say = Callable[[str], None]


def check(
    config: Config, home: Path, names: Sequence[str], *, max_batch: bool, more: Sequence[str], say: Say
) -> list[dict[str, Any]]:
    """The results for these accelerators (the file's, when none is named), compiled here unless they are known. Raises
    BadInput, LaunchError."""
    if config.trainer is None:
        raise BadInput(
            f"{config.document.name}: has no trainer's sections, and preflight compiles the trainer's step: only the trainer can be checked"
        )
    try:
        wanted = [accelerator(name).name for name in names] or [config.accelerator.name]
    except UnknownAccelerator as error:
        raise BadInput(str(error)) from None
    found: dict[str, dict[str, Any]] = {}
    for name in wanted:
        path = None if more else _path(config, home, name)
        known = _read(path) if path else None
        if known and (known["result"]["max_batch"] or not max_batch):
            found[name] = known["result"]
    missing = [name for name in wanted if name not in found]
    if missing:
        for result in _compile(config, missing, max_batch=max_batch, more=more, say=say):
            found[result["accelerator"]] = result
            if not more and (path := _path(config, home, result["accelerator"])):
                _write(path, result)
    return [found[name] for name in wanted]


def known(config: Config, home: Path) -> dict[str, Any] | None:
    """The result for the file's accelerator, if this very step was compiled before."""
    if config.trainer is None:
        return None
    path = _path(config, home, config.accelerator.name)
    kept = _read(path) if path else None
    return kept["result"] if kept else None


def require(config: Config, home: Path, say: Say) -> Config:
    """What `up` and `run` do with what is known. Raises LaunchError for a step that does not fit; returns the
    configuration, whose containers are told which programs were checked."""
    result = known(config, home)
    if result is None:
        return config
    if not result["fits"]:
        reasons = "\n".join(f"  {each['graph']}: {each['reason']}" for each in result["graphs"] if not each["fits"])
        raise LaunchError(
            f"{config.document.name} does not fit on {result['accelerator']}, as preflight found:\n{reasons}\n"
            "  nothing was created or started; lower train.global_batch_size (`tpu-launch preflight --max-batch` says how far), raise "
            "train.gradient_accumulation, or go on regardless with --no-preflight",
            exit_code=Exit.DOES_NOT_FIT,
        )
    say(f"preflight: the step was compiled for {result['accelerator']} before, and fits")
    graphs = ",".join(dict.fromkeys(each["hash"] for each in result["graphs"]))
    environment = {**config.run.environment, CHECKED: graphs}
    return replace(config, run=config.run.model_copy(update={"environment": environment}))


def _no_answer(code: int) -> LaunchError:
    """What the container's exit code tells of a preflight that did not end by itself."""
    defect = (
        "a defect of libtpu that shows now and then near the end of the memory: run it again, or try another batch size"
    )
    why = {
        128
        + signal.SIGKILL: "it was killed, most likely because this machine's memory ran out: compiling bert-large takes up to 10 GB",
        128 + signal.SIGSEGV: f"the TPU compiler crashed (SIGSEGV), {defect}",
        128 + signal.SIGABRT: f"the TPU compiler gave up (SIGABRT), {defect}",
    }.get(code, f"it ended with exit code {code}")
    exit_code = {int(Exit.BAD_INPUT): Exit.BAD_INPUT, 3: Exit.DOES_NOT_FIT}.get(code, Exit.APPLICATION_FAILED)
    return LaunchError(f"preflight gave no answer: {why}; its last lines are above", exit_code=exit_code)


def _compile(
    config: Config, names: Sequence[str], *, max_batch: bool, more: Sequence[str], say: Say
) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="preflight-") as file:
        file.write(config.document.dump())
        file.flush()
        os.chmod(file.name, 0o644)  # the container may have another user
        inside = "/etc/tpu-launch/config.yaml"
        command = [
            "tpu-train",
            "preflight",
            inside,
            "--accelerator",
            ",".join(names),
            "--json",
            *(["--max-batch"] if max_batch else []),
            *more,
        ]
        answers: list[str] = []
        code = local.run(
            config,
            command,
            say,
            lambda line: answers.append(line) if line.startswith(_MARK) else say(line),
            reference=local.unpublished(config, say),
            mounts={Path(file.name): inside},
        )
    if not answers:
        raise _no_answer(code)
    results: list[dict[str, Any]] = json.loads(answers[-1])["accelerators"]
    return results


# --- what is kept


def _path(config: Config, home: Path, name: str) -> Path | None:
    """Where the answer is kept; None when what it depends on can't be read now."""
    assert config.trainer is not None
    trainer = {key: value for key, value in config.trainer.canonical().items() if key not in _NOT_IN_PROGRAMS}
    trainer["train"] = {key: value for key, value in trainer["train"].items() if key not in _NOT_IN_STEP}
    trainer["evaluation"] = trainer["evaluation"]["batch_size"]
    data = config.trainer.data
    tokenizer = [] if is_on_hub(data.tokenizer) else [storage.join(data.tokenizer, "tokenizer.json")]
    urls = [*tokenizer, *(storage.join(url, MANIFEST) for url in (data.train, data.evaluation) if url)]
    try:
        contents = [hashlib.sha256(storage.read(url)).hexdigest() for url in urls]
    except storage.StorageError:
        return None
    image = config.image.reference or images.tag(local.spec(config), {})
    question = json.dumps([FORMAT, trainer, contents, name, image], sort_keys=True)
    return home / "preflight" / f"{name}-{hashlib.sha256(question.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return None  # not ours, or from a time before this format
    return found if found.get("format") == FORMAT else None


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(json.dumps({"format": FORMAT, "result": result}, indent=1) + "\n")
    scratch.replace(path)
