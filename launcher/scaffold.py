"""`tpu-launch init`: writes a first file, valid and commented. Never overwrites a file.

`text` makes the file's content from answers; `write` loads it with the real checks before the file gets its name.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from launcher.config import load
from launcher.errors import BadInput
from training.accelerators import Accelerator, UnknownAccelerator, accelerator

_PLAIN = re.compile(r"[A-Za-z]([A-Za-z0-9._/:-]*[A-Za-z0-9])?")
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]{0,60}[a-z0-9]")
_NO_TRAINER = (
    "# No trainer sections: give the command, `tpu-launch run -- python train.py`. "
    "With `init --bucket` the trainer's are written too."
)
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


def known(accelerator_type: str) -> Accelerator:
    """Returns the accelerator of that name. Raises BadInput that lists the existing types."""
    try:
        return accelerator(accelerator_type)
    except UnknownAccelerator as error:
        raise BadInput(str(error)) from None


def text(answers: Answers) -> str:
    """Returns the file's content. Raises BadInput for an unknown accelerator or an invalid project id."""
    slice_type = known(answers.accelerator_type)
    if not _PROJECT.fullmatch(answers.project):
        raise BadInput(f"{answers.project!r} can't be a project id: lower-case letters, digits and hyphens")
    lines = [
        "# What to run, and where. Checked by `tpu-launch plan`, `tpu-launch doctor` says what this machine lacks.",
        "",
        f"project: {_scalar(answers.project)} # Google Cloud project",
        f"zone: {_scalar(answers.zone)} # {slice_type.name} slices are in {', '.join(slice_type.zones())}",
        "slice:",
        f"  name: {_scalar(answers.name)} # name of the TPU node",
        f"  accelerator_type: {slice_type.name} # {_counts(slice_type)}",
        f"  capacity: {answers.capacity} # on-demand, spot (cheap, can be taken away), reserved",
        "  expires_hours: 48 # after so long `tpu-launch gc` removes it, if you forgot",
        "  # max_cost_per_hour: 30 # dollars; what costs more is not created",
        "image:",
        _repository(answers),
        "  # code: src # a folder of yours, for the image's working directory",
        "run:",
        "  stop_seconds: 30 # between SIGTERM and SIGKILL: time to save",
        "  # command: [python, train.py] # your own program instead of the trainer below",
        "",
    ]
    return "\n".join([*lines, *(_trainer(answers.bucket, slice_type) if answers.bucket else [_NO_TRAINER])]) + "\n"


def _repository(answers: Answers) -> str:
    """Returns the line of `image.repository`: the answer, or null with a comment that shows the form of a name."""
    if answers.repository:
        return f"  repository: {_scalar(answers.repository)} # where the image is pushed; hosts run it by digest"
    example = f"REGION-docker.pkg.dev/{answers.project}/REPOSITORY/NAME"
    return f"  repository: null # for real slices: {example}; emulated ones need none"


def _counts(slice_type: Accelerator) -> str:
    """Returns the slice's size in words: "2 hosts, 8 devices"."""
    hosts = "1 host" if slice_type.hosts == 1 else f"{slice_type.hosts} hosts"
    return f"{hosts}, {slice_type.devices} devices"


def _trainer(bucket: str, slice_type: Accelerator) -> list[str]:
    """Returns the lines of the trainer's sections, with data and output in the bucket (a name without gs://)."""
    return [
        "# From here on: what `tpu-train` reads on every host.",
        "seed: 1",
        "task: mlm # masked language modelling, from scratch",
        "model: {name: bert-base} # bert-tiny to bert-large, roberta-base, or {path: folder}",
        "data: # written by `tpu-launch local -- tpu-train tokenizer ...` and `... shards ...`",
        f"  tokenizer: {_scalar(f'gs://{bucket}/tokenizer')}",
        f"  train: {_scalar(f'gs://{bucket}/data/train')}",
        f"  evaluation: {_scalar(f'gs://{bucket}/data/evaluation')}",
        "train:",
        "  steps: 10000",
        f"  global_batch_size: {32 * slice_type.devices} # over all hosts and devices",
        "  learning_rate: 1.0e-4",
        "  warmup_steps: 1000",
        "evaluation: {every: 1000} # steps",
        "checkpoint: {every_steps: 500, keep_last: 2}",
        f"output: {_scalar(f'gs://{bucket}/runs')} # checkpoints, metrics, summary: below <output>/<run id>",
    ]


def _scalar(value: str) -> str:
    """Formats a string as YAML, without quotes where that is safe."""
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and ": " not in value
    return value if plain else json.dumps(value, ensure_ascii=False)


def write(path: Path, answers: Answers) -> None:
    """Writes the file in one step, after loading it with the real checks. Raises BadInput when the file exists or can't
    be written, or an answer makes it invalid; then nothing is written."""
    if path.exists() or path.is_symlink():
        raise BadInput(f"{path} exists and is not overwritten: choose another name with --file, or remove it")
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
        temporary.unlink(missing_ok=True)
