"""Measures the time of `tpu-train train` from the start of its process to its first step: the first time, and a second
time on the same host with the compiled programs of the first.

    make benchmark NAME=start [ARGS="--json --layers 12 --devices 8"]

On a virtual TPU, a small BERT over made-up rows; both are processes of their own, each an attempt of the same run, so
the second one restores the first one's checkpoint. The trainer itself reports the seconds by phase:

  start        interpreter, configuration, the other hosts
  dataset      opening the data
  imports      the framework and the model's code
  devices      opening them
  model        building it
  restore      reading the checkpoint
  compile      programs compiled, or read from the cache
  step         tracing it, and running it for the first time
  other        what is between
  total        all of it

A row's peer is the first start. The goal is half of it for the second, and no program compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from training.accelerators import accelerator

RUNS_IN = "torch-xla"
VIRTUAL_TPU = True
SLICES = {1: "v5litepod-1", 8: "v3-8"}  # devices -> a slice with this many
PHASES = ("start", "dataset", "imports", "devices", "model", "restore", "compile", "step", "other", "total")
GOAL = 0.5
VOCABULARY, LENGTH, ROWS = 512, 64, 8  # unoptimized code computes slowly
ATTEMPT_SECONDS = 900.0


def main() -> None:
    """Measures both starts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--devices", type=int, default=1, choices=SLICES, help="of the virtual TPU (1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, second = measure(Path(folder), options.layers, options.devices)
    finish("start", compare(first, second), options.json)


def measure(folder: Path, layers: int, devices: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds by phase, and "programs" compiled, of two attempts of one run."""
    config = prepare(folder, layers)
    attempts = []
    for number in (0, 1):
        config["train"]["steps"] = number + 1  # the second goes on from the first's checkpoint
        attempts.append(start(folder, config, number, devices))
        print(f"  attempt {number}: {attempts[-1]['total']:.1f} s", file=sys.stderr, flush=True)
    return attempts[0], attempts[1]


def prepare(folder: Path, layers: int) -> dict[str, Any]:
    """Writes a tokenizer and a dataset, and returns the configuration."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of words {number * 7919 % 997} and more\n" for number in range(4000)))
    made = ["--out", str(folder / "tokenizer")]
    tpu_train("tokenizer", "--corpus", str(text), "--vocabulary", str(VOCABULARY), *made)
    tpu_train(
        "shards", "--corpus", str(text), "--tokenizer", str(folder / "tokenizer"), "--sequence-length", str(LENGTH),
        "--split", "train", "--out", str(folder / "data"),
    )  # fmt: skip
    return {
        "model": {
            "name": "bert-tiny", "hidden_size": 128, "layers": layers, "heads": 2, "intermediate_size": 512,
            "max_positions": LENGTH, "vocabulary_size": VOCABULARY,
        },
        "data": {"train": str(folder / "data" / "train"), "tokenizer": str(folder / "tokenizer")},
        "train": {"steps": 1, "global_batch_size": ROWS, "log_every": 1},
        "checkpoint": {"every_steps": 1},
        "export": {"at_end": False},
        "output": str(folder / "runs"),
    }  # fmt: skip


def start(folder: Path, config: dict[str, Any], number: int, devices: int) -> dict[str, float]:
    """Returns the seconds by phase of one attempt, and the number of programs that it compiled."""
    path = folder / f"attempt-{number}.yaml"
    path.write_text(yaml.safe_dump(config))
    began = time.monotonic()
    tpu_train(
        "train", str(path), "--run-id", "start", **use_virtual_tpu(devices), TPU_LAUNCH_ATTEMPT=str(number),
        TPU_LAUNCH_COMPILE_CACHE=str(folder / "programs"),
    )  # fmt: skip
    print(f"  attempt {number}: process of {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    lines = [json.loads(line) for line in (folder / "runs" / "start" / "metrics.jsonl").read_text().splitlines()]
    (values,) = [line for line in lines if line["step"] == number + 1 and "start_total_seconds" in line]
    summary = json.loads((folder / "runs" / "start" / "summary.json").read_text())
    seconds = {phase: values.get(f"start_{phase}_seconds", 0.0) for phase in PHASES}
    return {**seconds, "programs": summary["compilations"] - summary["programs_from_cache"]}


def use_virtual_tpu(devices: int) -> dict[str, str]:
    """Returns the variables with which a trainer opens a virtual TPU."""
    return {
        "PJRT_DEVICE": "TPU",
        "TPU_ACCELERATOR_TYPE": accelerator(SLICES[devices]).name,
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # LLVM for CPUs takes minutes for a step, unlike libtpu
    }


def tpu_train(*arguments: str, program: Sequence[str] = ("-m", "training.cli"), **environment: str) -> None:
    """Runs a command of tpu-train; raises an error if it fails. `program`: Python's arguments before the command."""
    command = [sys.executable, *program, *arguments]
    ended = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ATTEMPT_SECONDS,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {ended.returncode}:\n{ended.stdout}")


def compare(first: dict[str, float], second: dict[str, float]) -> list[Row]:
    """Returns the table's rows."""
    goals = {"total": f"ratio at most {GOAL:g}"}
    rows = [
        row(f"second start: {phase}", "s", second[phase], "first start", first[phase], goals.get(phase, ""))
        for phase in PHASES
    ]
    programs = row(
        "second start: programs compiled", "", second["programs"], "first start", first["programs"], "ours 0"
    )
    return [*rows, programs]


if __name__ == "__main__":
    main()
