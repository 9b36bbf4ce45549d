"""Measures whether `tpu-launch estimate` held the time of a step in the rehearsal's runs, and how long estimates take.

    make benchmark NAME=estimate [ARGS="--json"]

Each emulated type, v4-16 and v4-32 (CPU hosts) and v3-8 (the virtual TPU), runs examples/rehearsal.yaml twice. The
range is what `estimate` tells after the first run, from that run's share; the time is that of the second run: the
median of its last steps, as its ledger has it. No range of a TPU can be measured here.

The time is that of `tpu-launch estimate` for bert-base on five types. Their preflights are kept in the form that the
TPU compiler's answers have, with made-up figures: compiling them takes minutes a type, and changes nothing here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from launcher.checks import preflight
from launcher.config import load

ROOT = Path(__file__).resolve().parent.parent
FILE = str(ROOT / "examples" / "rehearsal.yaml")
ZONES = {"v4-16": "us-central2-b", "v3-8": "us-central1-a", "v4-32": "us-central2-b"}
TYPES = ("v4-16", "v3-8", "v4-8", "v5litepod-8", "v6e-8")
FIVE = """\
project: my-project
zone: us-central2-b
slice:
  name: demo
  accelerator_type: v4-16
  candidates:
  - {accelerator_type: v3-8, zones: [us-central1-a]}
  - {accelerator_type: v4-8}
  - {accelerator_type: v5litepod-8, zones: [us-west4-a]}
  - {accelerator_type: v6e-8, zones: [us-east5-a]}
model: {name: bert-base}
data: {train: data/train, tokenizer: data/tokenizer}
train: {steps: 100000, global_batch_size: 256}
output: runs
"""


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(folder, "emulator", "start", "--bucket", "rehearsal")
            for name in ZONES:
                rows += measure(folder, name)
            rows += measure_five(folder)
        finally:
            launch(folder, "emulator", "stop")
    os.chdir(ROOT)
    finish("estimate", rows, options.json)


def launch(folder: str, *arguments: str) -> str:
    """Runs `tpu-launch ARGUMENTS` and returns its output; ends the benchmark if it fails."""
    argv = [sys.executable, "-m", "launcher.cli", *arguments]
    environment = {**os.environ, "TPU_LAUNCH_HOME": f"{folder}/home", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def on(command: str, *settings: str) -> list[str]:
    """Returns the arguments of an emulated command on the rehearsal's file with these settings."""
    return ["--emulated", command, "-f", FILE, *(word for setting in settings for word in ("--set", setting))]


def measure(folder: str, name: str) -> list[Row]:
    """Returns the rows of a type: the second run's step beside both ends of the range that was told before it."""
    place = (f"zone={ZONES[name]}", f"slice.accelerator_type={name}")
    launch(folder, *on("up", *place))
    if name == next(iter(ZONES)):
        words = ("--corpus", "builtin:pydoc", "--tokenizer", "gs://rehearsal/tokenizer", "--sequence-length", "64")
        tokenizer = (*words[:2], "--vocabulary", "2000", "--out", "gs://rehearsal/tokenizer")
        for command in (("tokenizer", *tokenizer), ("shards", *words, "--out", "gs://rehearsal/data")):
            launch(folder, *on("local"), "--", "tpu-train", *command)
    launch(folder, *on("run", *place), "--new")
    [told] = read(launch(folder, *on("estimate", *place), "--json"))["candidates"]
    launch(folder, *on("run", *place), "--new")
    ended = [event for event in read(launch(folder, *on("events", *place), "--json")) if event["event"] == "ended"]
    launch(folder, *on("down", *place))
    steps, seconds = 60, ended[-1]["step_seconds"]
    least, most = (hours * 3600 / steps for hours in told["hours"])
    rows = [
        row(f"{name}: a step of bert-tiny", "s", seconds, "least of the range", least, "ratio at least 1"),
        row(f"{name}: a step of bert-tiny", "s", seconds, "most of the range", most, "ratio at most 1"),
    ]
    print(*rows, sep="\n", file=sys.stderr, flush=True)
    return rows


def measure_five(folder: str) -> list[Row]:
    """Returns the rows of an estimate of bert-base on five types: the whole command, with Python's start."""
    keep_answers(Path(folder))
    before, begun = used(), time.monotonic()
    told = read(launch(folder, "estimate", "-f", "run.yaml", "--json"))["candidates"]
    seconds, processor = time.monotonic() - begun, used() - before
    compiled = sum(item["bound"]["source"] == "compiled" for item in told)
    return [
        row("bert-base: types estimated from a preflight", "types", compiled, "goal", len(TYPES), "all"),
        row("bert-base on five types: processor time of the command", "s", processor, "goal", 1, "at most 1"),
        row("bert-base on five types: the command", "s", seconds, "goal", 1, "at most 1"),
    ]


def keep_answers(folder: Path) -> None:
    """Writes FIVE as run.yaml, and a kept preflight of its step for each type."""
    (folder / "run.yaml").write_text(FIVE)
    for name in ("train/dataset.json", "tokenizer/tokenizer.json"):
        (folder / "data" / name).parent.mkdir(parents=True)
        (folder / "data" / name).write_text("{}")
    os.chdir(folder)
    config = load("run.yaml")
    for candidate in config.all_candidates:
        name = candidate.accelerator_type
        costs = {"flops": 1e12, "bytes": 2e9, "bound_by": "FLOPs", "examples_per_second": 1e4}
        graph = {"graph": "training", "kind": "training", "rows": 256, "fits": True, "hash": name, "costs": costs}
        path = preflight._path(config.placed(candidate), folder / "home", name)
        assert path is not None
        result = {"accelerator": name, "fits": True, "graphs": [graph], "max_batch": None, "lines": []}
        preflight.keep(path, result)


def used() -> float:
    """Returns the processor seconds of the processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read(output: str) -> Any:
    """Returns the JSON value in an output."""
    return json.loads(output[min(at for at in map(output.find, "[{") if at >= 0) :])


if __name__ == "__main__":
    main()
