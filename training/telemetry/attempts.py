"""Reads and writes the records of a run's attempts, in the run's folder. Host 0 writes them:

    attempts/attempt-0002.<token>.json              when all hosts have agreed: hosts, code, configuration
    attempts/attempt-0002.<token>.end.json          when the attempt ends, unless it is killed
    attempts/attempt-0002.<token>.nonfinite.json    before that, if a step that was not finite ended it

An attempt without the second file is running, or was killed: preempted, out of memory, SIGKILL. The token belongs to
one group of processes, so no record is ever overwritten.
"""

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from training import storage as default_storage
from training.errors import Exit, StopRequested, TrainError
from training.storage import Storage, join, name_of
from training.telemetry.console import warn

_NAME = re.compile(r"attempt-(\d+)\.([^.]+)(\.end)?\.json")
_END, _NON_FINITE = ".end.json", ".nonfinite.json"


@dataclass(frozen=True)
class AttemptRecords:
    """The start record and the end record of one attempt."""

    number: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None  # how, message, step, ended, seconds


@dataclass(frozen=True)
class NonFiniteStep:
    """An attempt's record of a step that was not finite. Later attempts choose their checkpoint by it."""

    step: int
    restored: int  # step of the checkpoint that the attempt had restored; 0 without one
    checkpoint: str | None  # unique name of that checkpoint
    program: str  # hash of configuration and code: another program may not have this problem


def write_nonfinite(start_url: str, record: NonFiniteStep, storage: Storage = default_storage) -> None:
    """Writes the record of a step that was not finite beside the attempt's start record at `start_url`."""
    url = start_url.removesuffix(".json") + _NON_FINITE
    storage.write(url, json.dumps(asdict(record), indent=1).encode() + b"\n")


def read_nonfinite(folder: str, storage: Storage = default_storage) -> list[NonFiniteStep]:
    """Returns the records of a run's steps that were not finite, by attempt, without unreadable ones."""
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
    storage: Storage = default_storage,
) -> None:
    """Writes the end record of an attempt, with the time now, beside its start record at `start_url`. `error` ended the
    attempt (None: it finished) after `step` steps; `seconds` is by phase, from PhaseTimer.report."""
    record = {
        "how": classify_end(error),
        "message": str(error or ""),
        "step": step,
        "ended": round(time.time(), 3),
        "seconds": dict(seconds),
    }
    storage.write(start_url.removesuffix(".json") + _END, json.dumps(record, indent=1).encode() + b"\n")


def classify_end(error: BaseException | None) -> str:
    """Returns "finished", "stopped", "refused" (exit code BAD_INPUT), "lost a host", or "failed" (any other error)."""
    if error is None:
        return "finished"
    if isinstance(error, StopRequested):
        return "stopped"
    if isinstance(error, TrainError) and error.exit_code == Exit.BAD_INPUT:
        return "refused"
    return "lost a host" if isinstance(error, TrainError) and error.exit_code == Exit.LOST_PEER else "failed"


def read_attempts(folder: str, storage: Storage = default_storage) -> list[AttemptRecords]:
    """Returns a run's attempts by number, then by start. Warns of each unreadable record, and leaves it out."""
    records: dict[tuple[int, str], dict[str, Any]] = {}  # (number, token) -> "start" and "end"
    for info in storage.listing(join(folder, "attempts")):
        if match := _NAME.fullmatch(name_of(info.url)):
            document = None
            with contextlib.suppress(ValueError):
                document = json.loads(storage.read(info.url))
            if isinstance(document, dict):
                records.setdefault((int(match[1]), match[2]), {})["end" if match[3] else "start"] = document
            else:
                warn(f"{info.url}: not readable as JSON; left out")
    ordered = sorted(records.items(), key=lambda item: (item[0][0], item[1].get("start", {}).get("began", 0.0)))
    return [AttemptRecords(number, record.get("start", {}), record.get("end")) for (number, _), record in ordered]
