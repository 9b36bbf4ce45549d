"""What each attempt of a run says of itself, in the run's folder.

    attempts/attempt-0002.<token>.json        written when all hosts have agreed: who they are, the code, the
    configuration attempts/attempt-0002.<token>.end.json    written by host 0 when the attempt ends in any way that
    Python sees

An attempt without the second file is running, or was killed: preempted, out of memory, stopped hard. The token is one
group of processes', so nothing is ever overwritten.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training import storage
from training.errors import Exit, StopRequested, TrainError

_NAME = re.compile(r"attempt-(\d+)\.([^.]+)(\.end)?\.json")
_END = ".end.json"


@dataclass(frozen=True)
class Attempt:
    number: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None  # how, message, step, ended, seconds


def write_end(start_url: str, error: BaseException | None, step: int, seconds: Mapping[str, float]) -> None:
    """How the attempt whose start is at `start_url` ended: with this error, or well. `seconds` as `Clock.report`."""
    record = {
        "how": how(error),
        "message": str(error or ""),
        "step": step,
        "ended": round(time.time(), 3),
        "seconds": dict(seconds),
    }
    storage.write(start_url.removesuffix(".json") + _END, json.dumps(record, indent=1).encode() + b"\n")


def how(error: BaseException | None) -> str:
    """finished, stopped, refused (bad configuration or data), lost a host, or failed."""
    if error is None:
        return "finished"
    if isinstance(error, StopRequested):
        return "stopped"
    if isinstance(error, TrainError) and error.exit_code == Exit.BAD_INPUT:
        return "refused"
    return "lost a host" if isinstance(error, TrainError) and error.exit_code == Exit.LOST_PEER else "failed"


def read(folder: str) -> list[Attempt]:
    """All attempts of a run, in the order in which they began."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for each in storage.listing(storage.join(folder, "attempts")):
        match = _NAME.fullmatch(storage.name_of(each.url))
        if match:
            found.setdefault((int(match[1]), match[2]), {})["end" if match[3] else "start"] = json.loads(
                storage.read(each.url)
            )
    ordered = sorted(found.items(), key=lambda item: (item[0][0], item[1].get("start", {}).get("began", 0.0)))
    return [Attempt(number, files.get("start", {}), files.get("end")) for (number, _), files in ordered]
