"""Runs trainers as processes and times their steps from outside, ours and the peer's alike, by the arrival of the
lines with their numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

PEER = Path(__file__).with_name("hugging_face.py")
_STEP = re.compile(r"step +(\d+)\b")


def timed(command: list[str], warm: int, seconds: float = 1500, **environment: str) -> tuple[float, str]:
    """Returns steps per second after the first `warm` ones (0 if there were no more), and the whole output."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    step_times: dict[int, float] = {}
    lines = []
    deadline = time.monotonic() + seconds
    for line in process.stdout:
        lines.append(line)
        if match := _STEP.match(line):
            step_times.setdefault(int(match[1]), time.perf_counter())
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{' '.join(command)} was not done within {seconds:g} s:\n{''.join(lines[-20:])}")
    if process.wait() or not step_times:
        raise SystemExit(
            f"{' '.join(command)} ended with code {process.returncode} after {len(step_times)} step(s):\n"
            f"{''.join(lines[-40:])}"
        )
    first, last = min(step for step in step_times if step >= warm), max(step_times)
    return (last - first) / (step_times[last] - step_times[first]) if last > first else 0.0, "".join(lines)


def done(command: list[str], seconds: float = 1500) -> str:
    """Runs a command and returns its output; raises an error if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def ours(folder: Path, config: dict[str, Any], warm: int, run_id: str = "run") -> tuple[float, dict[str, Any]]:
    """Returns steps per second of `tpu-train train`, and the run's summary."""
    path = folder / f"{run_id}.yaml"
    path.write_text(yaml.safe_dump(config))
    rate, _ = timed([sys.executable, "-m", "training.cli", "train", str(path), "--run-id", run_id], warm)
    summary: dict[str, Any] = json.loads((Path(config["output"]) / run_id / "summary.json").read_text())
    return rate, summary


def peer(folder: Path, job: dict[str, Any], warm: int) -> tuple[float, str]:
    """Returns steps per second of Hugging Face's Trainer, and its output."""
    path = folder / "job.json"
    path.write_text(json.dumps({"out": str(folder / "peer"), **job}))
    return timed([sys.executable, str(PEER), str(path)], warm)
