"""Checks whether the training step fits on an accelerator: `tpu-launch preflight`, and its results for `up` and `run`.

`tpu-train preflight` of the image compiles the step with the TPU compiler, in a container on this machine. The result
is kept in `.tpu-launch/preflight/`, in a file named by the accelerator and a hash of what the result depends on: the
trainer's sections that shape the step, the manifests of the datasets and the tokenizer, and the image's content, which
includes the trainer's code and the compiler. A damaged file counts as missing.
"""

import contextlib
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
from launcher.home import write_private
from launcher.images import local
from launcher.images.specification import compute_tag
from training import storage
from training.accelerators import accelerator
from training.data.formats.dataset import MANIFEST
from training.distributed.cluster import LIBTPU_FLAGS
from training.storage.hub import is_on_hub

FORMAT = 1
_MARK = '{"preflight"'  # begin of the JSON line that `tpu-train preflight` prints
# Keys on which no program depends.
_NOT_IN_PROGRAMS = ("output", "checkpoint", "export", "rendezvous")
_NOT_IN_STEP = ("steps", "learning_rate", "warmup_steps", "schedule", "log_every", "strict", "prefetch")

_RESULT_KEYS = {"accelerator", "fits", "graphs", "max_batch"}

Say = Callable[[str], None]


def check(
    config: Config, home: Path, names: Sequence[str], *, max_batch: bool, more: Sequence[str], say: Say
) -> list[dict[str, Any]]:
    """Compiles the training step, in a container here, for the accelerators `names` ([]: the configuration's), unless
    `home` has a kept result; makes the image if needed, and keeps new results in `home`. Returns a result for each
    name, as `tpu-train preflight --json` prints it, whether the step fits or not. `max_batch` also searches for the
    largest batch, which a kept result must have then; with `more` arguments of `tpu-train preflight`, results are
    neither kept nor reused. Raises BadInput without a trainer, UnknownAccelerator, LaunchError if the compiler gives no
    answer."""
    if config.trainer is None:
        raise BadInput(
            f"{config.document.name}: has no trainer's sections, and preflight compiles the trainer's step: "
            "only the trainer can be checked"
        )
    accelerators = [accelerator(name).name for name in names] or [config.accelerator.name]
    results: dict[str, dict[str, Any]] = {}
    paths = {name: None if more else _path(config, home, name) for name in accelerators}  # by the files as of now
    for name, path in paths.items():
        kept = _read(path)
        if kept and (kept["max_batch"] or not max_batch):
            results[name] = kept
    if missing := [name for name in paths if name not in results]:
        for result in _compile(config, missing, max_batch=max_batch, more=more, say=say):
            results[result["accelerator"]] = result
            if path := paths[result["accelerator"]]:
                keep(path, result)
    return [results[name] for name in accelerators]


def known(config: Config, home: Path) -> dict[str, Any] | None:
    """Returns the kept result for the configuration's accelerator and step; None without one, without a trainer, or if
    a manifest or the tokenizer can't be read. Hashes the image's files too: raises BadInput without its Dockerfile or
    CA bundle."""
    return None if config.trainer is None else _read(_path(config, home, config.accelerator.name))


def known_elsewhere(config: Config, home: Path) -> dict[str, dict[str, Any]]:
    """Returns the kept results of the configuration's step for other accelerators, by their names. Reads and raises as
    `known`; {} without a trainer or kept results."""
    if config.trainer is None:
        return {}
    names = {path.name.rpartition("-")[0] for path in (home / "preflight").glob("*-*.json")}
    found = {name: _read(_path(config, home, name)) for name in sorted(names - {config.accelerator.name})}
    return {name: result for name, result in found.items() if result}


def leave_out_unfit(config: Config, home: Path, say: Say) -> tuple[Config, tuple[str, ...]]:
    """Returns the configuration without the candidates on which the step does not fit according to kept results, and
    the hashes of the programs compiled for the others, which the containers compare with what they run. A candidate
    without a kept result stays. Tells the user what is left out, or, if the file names no candidates, that the step
    fits. Raises LaunchError (Exit.DOES_NOT_FIT) if it fits on none. Compiles nothing; reads and raises as `known`."""
    places = {candidate.accelerator_type: config.placed(candidate) for candidate in config.all_candidates}
    kept = {name: result for name, place in places.items() if (result := known(place, home))}
    left_out = tuple(name for name, result in kept.items() if not result["fits"])
    if len(left_out) == len(places):
        raise _does_not_fit(config, kept[left_out[0]])
    for name in left_out:
        say(f"preflight: the step does not fit on {name}, which is not asked for")
    fitting = [result for result in kept.values() if result["fits"]]
    if fitting and not config.slice.candidates:
        say(f"preflight: the step fits on {fitting[0]['accelerator']}, as compiled before")
    hashes = dict.fromkeys(graph["hash"] for result in fitting for graph in result["graphs"])
    return replace(config, left_out=left_out), tuple(hashes)


def _does_not_fit(config: Config, result: dict[str, Any]) -> LaunchError:
    """Returns the error for a kept result by which the step does not fit, with its reasons."""
    reasons = "\n".join(f"  {graph['graph']}: {graph['reason']}" for graph in result["graphs"] if not graph["fits"])
    return LaunchError(
        f"{config.document.name} does not fit on {result['accelerator']}, as preflight found:\n{reasons}\n"
        "  nothing was created or started; lower train.global_batch_size (`tpu-launch preflight --max-batch` says "
        "how far), raise train.gradient_accumulation, or go on regardless with --no-preflight",
        exit_code=Exit.DOES_NOT_FIT,
    )


def _no_answer(exit_code: int) -> LaunchError:
    """Returns the error for a container that ended with this code and without a result: the likely reason, and as exit
    code DOES_NOT_FIT for 3, BAD_INPUT for 2, else APPLICATION_FAILED."""
    advice = "run it again, or try another batch size"
    defect = f"a defect of libtpu that shows occasionally when memory runs short: {advice}"
    memory = "most likely because this machine's memory ran out: compiling bert-large takes up to 10 GB"
    reasons = {
        128 + signal.SIGKILL: f"it was killed, {memory}",
        128 + signal.SIGSEGV: f"the TPU compiler crashed (SIGSEGV), {defect}",
        128 + signal.SIGABRT: f"the TPU compiler gave up (SIGABRT), {defect}",
    }
    reason = reasons.get(exit_code, f"it ended with exit code {exit_code}")
    exits = {int(Exit.BAD_INPUT): Exit.BAD_INPUT, 3: Exit.DOES_NOT_FIT}
    return LaunchError(
        f"preflight gave no answer: {reason}; its last lines are above",
        exit_code=exits.get(exit_code, Exit.APPLICATION_FAILED),
    )


def _compile(
    config: Config, names: Sequence[str], *, max_batch: bool, more: Sequence[str], say: Say
) -> list[dict[str, Any]]:
    """Runs `tpu-train preflight` in a container here, after building the image if needed, and returns a result for each
    accelerator type; `say` gets its other lines. Raises LaunchError if the container prints no result."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="preflight-") as file:
        file.write(config.document.dump())
        file.flush()
        os.chmod(file.name, 0o644)  # the container may have another user
        inside = "/etc/tpu-launch/config.yaml"
        options = ["--json", *["--max-batch"] * max_batch, *more]
        command = ["tpu-train", "preflight", inside, "--accelerator", ",".join(names), *options]
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


# -- results that are kept -----------------------------------------------------------------------------------------


def _path(config: Config, home: Path, name: str) -> Path | None:
    """Returns where the result for an accelerator is kept; None when a manifest or the tokenizer can't be read. Hashes
    the image's files too: raises BadInput without its Dockerfile or CA bundle."""
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
    image = config.image.reference or compute_tag(local.image_spec(config), {})
    flags = config.run.environment.get(LIBTPU_FLAGS, "")
    base = [config.image.base] if config.image.base else []  # which has the compiler
    question = json.dumps([FORMAT, trainer, contents, name, image, flags, *base], sort_keys=True)
    return home / "preflight" / f"{name}-{hashlib.sha256(question.encode()).hexdigest()[:16]}.json"


def _read(path: Path | None) -> dict[str, Any] | None:
    """Returns the result that `keep` wrote; None without a path, or if it is missing, damaged or of another format."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(path.read_text()) if path else None
        if isinstance(document, dict) and document.get("format") == FORMAT:
            result = document.get("result")
            return result if isinstance(result, dict) and result.keys() >= _RESULT_KEYS else None
    return None


def keep(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, with its format, where later checks read it."""
    write_private(path, json.dumps({"format": FORMAT, "result": result}, indent=1) + "\n")
