"""The line of progress that a program keeps in a file on each host, and that the launcher reads: one JSON object.

Any program may write it, without this package (docs/guide/hangs.md): `TPU_LAUNCH_PROGRESS_FILE` names the file, which
always holds the newest line. Only "step" is required. The launcher reads it every 5 seconds, and never prose. One of
several processes of a host adds its rank: FILE.<rank>.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FILE_VARIABLE = "TPU_LAUNCH_PROGRESS_FILE"
FILE = "/dev/shm/tpu-launch-progress"
"""Of every container. In memory: a full disk does not hide a hang."""

LONGEST_LINE = 4000  # bytes
_LONGEST_TEXT, _MOST_PARTS = 200, 20
_LARGEST = 1e15

START, COMPILE, TRAINING, EVALUATION, SAVE, END = "start", "compile", "training", "evaluation", "save", "end"
"""Phases, each with a limit of its own."""


@dataclass(frozen=True)
class ProgressLine:
    """The progress of one process. Everything but the step may be missing."""

    step: int  # steps done
    steps: int = 0  # of the whole run
    phase: str = ""  # one of the phases above; "" from a program that does not tell
    doing: str = ""  # the part of the phase: "data_wait", "dispatch", "result" (waits for devices and other hosts), ...
    doing_seconds: float = 0.0  # for how long, when the line was written
    count: int = 0  # grows with progress inside a phase: batches of an evaluation, for example
    limit: float = 0.0  # seconds without progress that are normal in this phase
    time: float = 0.0  # Unix seconds of the host when the line was written
    step_seconds: float = 0.0  # median of the last steps
    save_seconds: float = 0.0  # of the longest save so far
    seconds: Mapping[str, float] = field(default_factory=dict)  # in each part of all steps of this attempt
    memory_used: int = 0  # bytes of the host
    memory_total: int = 0
    program: str = ""  # a fingerprint of the program and its settings: equal on all hosts
    loss: float | None = None
    examples_per_second: float = 0.0
    data_wait: float = 0.0  # share of the steps' time that was spent waiting for batches
    left: str = ""  # time left, as `format_remaining` formats it
    rank: int = 0  # of several processes on a host
    device_memory_used: int = 0  # bytes of one device; the others of a host hold as much
    device_memory_total: int = 0
    bytes_read: int = 0  # from files and buckets, by this attempt's process


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    item: {"int": int, "str": str, "Mapping[str, float]": dict}.get(kind, (int, float))
    for item, kind in ((name, str(kind)) for name, kind in ProgressLine.__annotations__.items())
}


def encode(line: ProgressLine) -> str:
    """Returns one line of JSON, without a loss that is not finite, and fields (but step) that are 0, empty or None."""
    values = {name: value for name, value in asdict(line).items() if value or name == "step"}
    if line.loss is not None and not math.isfinite(line.loss):
        del values["loss"]
    return json.dumps(values)


def parse(text: str) -> ProgressLine | None:
    """Returns the line in `text`; None if it is too long, or no JSON object with a step. Leaves out fields of another
    type, numbers that are not finite, and unknown fields; cuts texts. Never raises: any program may have written it."""
    if len(text) > LONGEST_LINE:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    values = {name: clean for name, value in document.items() if (clean := _clean(name, value)) is not None}
    return ProgressLine(**values) if "step" in values else None


def _clean(name: str, value: Any) -> Any:
    """Returns a field's value, long texts and mappings cut; None for an unknown field, another type, or a number that
    is not finite or is huge."""
    kind = _KINDS.get(name)
    if kind is None or not isinstance(value, kind) or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return "".join(character for character in value[:_LONGEST_TEXT] if character.isprintable())
    if isinstance(value, dict):
        parts = list(value.items())[:_MOST_PARTS]
        return {key[:40]: float(number) for key, number in parts if _is_sane(number)}
    return value if _is_sane(value) else None


def _is_sane(number: Any) -> bool:
    """Returns whether a value is a number, not a bool, with an absolute value below _LARGEST."""
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < _LARGEST


def write(path: str, line: ProgressLine) -> None:
    """Replaces the file's line at once, so that readers never see half of it. Raises OSError."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(encode(line) + "\n")
    os.replace(f"{path}.new", path)


def slowest(lines: Sequence[ProgressLine]) -> ProgressLine | None:
    """Returns the line of the process that is behind the others of its host; None without lines."""
    return min(lines, key=lambda line: (line.step, line.count), default=None)
