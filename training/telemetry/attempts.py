"""The records of a run's attempts, in the run's folder:

    attempts/attempt-0002.<token>.json        written when all hosts have agreed: hosts, code, configuration
    attempts/attempt-0002.<token>.end.json    written by host 0 when the attempt ends in any way that Python sees
    attempts/attempt-0002.<token>.nonfinite.json    before that, by host 0, when a step ended it that was not finite

An attempt without the second file is running, or was killed: preempted, out of memory, stopped hard. The token belongs
to one group of processes, so no record is ever overwritten.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from training import storage as default_storage
from training.errors import Exit, StopRequested, TrainError
from training.storage import Storage, join, name_of
from training.telemetry.console import warn

_NAME = re.compile(r"attempt-(\d+)\.([^.]+)(\.end)?\.json")
_END, _NON_FINITE = ".end.json", ".nonfinite.json"


@dataclass(frozen=True)
class Attempt:
    """Both records of one attempt."""

    number: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None  # how, message, step, ended, seconds


@dataclass(frozen=True)
class NonFiniteStep:
    """An attempt's record of a step that was not finite. Later attempts choose their checkpoint by it."""

    step: int  # its number
    restored: int  # the step of the checkpoint that the attempt had restored; 0 when it had none
    checkpoint: str | None  # that checkpoint: a name that no other has
    program: str  # hash of configuration and code: another program may do better


def write_nonfinite(start_url: str, record: NonFiniteStep, storage: Storage = default_storage) -> None:
    """Writes the record of an attempt, beside its start record."""
    url = start_url.removesuffix(".json") + _NON_FINITE
    storage.write(url, json.dumps(asdict(record), indent=1).encode() + b"\n")


def read_nonfinite(folder: str, storage: Storage = default_storage) -> list[NonFiniteStep]:
    """The records of all attempts of the run in `folder`, in the order of their names. One that can't be read is as
    good as none."""
    records = []
    for info in storage.listing(join(folder, "attempts")):
        if info.url.endswith(_NON_FINITE):
            with contextlib.suppress(ValueError, TypeError):
                records.append(NonFiniteStep(**json.loads(storage.read(info.url))))
    return records


def write_end(
    start_url: str,
    error: BaseException | None,
    step: int,
    seconds: Mapping[str, float],
    now: Callable[[], float] = time.time,
    storage: Storage = default_storage,
) -> None:
    """Writes the end record of an attempt.

    Args:
        start_url: of its start record.
        error: that ended it; None when it finished.
        step: the steps that were done.
        seconds: by phase, as of PhaseTimer.report.
        now: the time source, in seconds since the epoch.
        storage: where the run's folder is.
    """
    record = {
        "how": classify_end(error),
        "message": str(error or ""),
        "step": step,
        "ended": round(now(), 3),
        "seconds": dict(seconds),
    }
    storage.write(start_url.removesuffix(".json") + _END, json.dumps(record, indent=1).encode() + b"\n")


def classify_end(error: BaseException | None) -> str:
    """How an attempt ended: finished, stopped, refused (bad configuration or data), lost a host, or failed."""
    if error is None:
        return "finished"
    if isinstance(error, StopRequested):
        return "stopped"
    if isinstance(error, TrainError) and error.exit_code == Exit.BAD_INPUT:
        return "refused"
    return "lost a host" if isinstance(error, TrainError) and error.exit_code == Exit.LOST_PEER else "failed"


def _read_document(url: str, storage: Storage) -> dict[str, Any] | None:
    try:
        document = json.loads(storage.read(url))
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    warn(f"{url} can't be read, and is left out")
    return None


def read_attempts(folder: str, storage: Storage = default_storage) -> list[Attempt]:
    """All attempts of the run in `folder`, in the order in which they began."""
    records: dict[tuple[int, str], dict[str, Any]] = {}  # (number, token) -> "start" and "end"
    for info in storage.listing(join(folder, "attempts")):
        match = _NAME.fullmatch(name_of(info.url))
        document = _read_document(info.url, storage) if match else None
        if match and document is not None:
            record = records.setdefault((int(match[1]), match[2]), {})
            record["end" if match[3] else "start"] = document
    ordered = sorted(records.items(), key=lambda item: (item[0][0], item[1].get("start", {}).get("began", 0.0)))
    return [Attempt(number, record.get("start", {}), record.get("end")) for (number, _), record in ordered]
