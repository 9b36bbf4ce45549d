"""Finds the largest training batches that fit, by the TPU compiler, without a TPU: the table in
docs/guide/preflight.md.

    make benchmark NAME=batches [ARGS="--json --model bert-base --accelerator v3-8"]

MLM at 512 tokens in bf16 with AdamW, predictions at the masked positions, `train.remat` as it is by default: what
`tpu-train preflight --max-batch` finds for each model and each slice of one host, in sequences of the global batch.
Beside it the next larger batch that was tried, which the compiler refuses, at most 1/16 above. Two to four compilations
of one to four minutes each for a row: an hour and a half for all on two cores, and 10 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import make_run, run_in_process
from benchmarks.peers.rows import Row, finish, row
from training.accelerators import Accelerator, accelerator
from training.preflight.report import LargestBatch
from training.preflight.search import run_preflight

RUNS_IN = "torch-xla"
LENGTH = 512
TRIES = 3
SLICES = ("v3-8", "v4-8", "v5litepod-8", "v5p-8", "v6e-8")
# Vocabulary, GiB of weights and moments, and GiB of HBM a row. The last two set where the search begins, which changes
# its time only.
MODELS = {"bert-base": (30_522, 1.3, 0.0905), "bert-large": (30_522, 3.8, 0.236), "roberta-base": (50_265, 1.5, 0.0912)}


def search_largest(model: str, name: str) -> LargestBatch:
    """Runs the search of `tpu-train preflight --max-batch`."""
    target = accelerator(name)
    vocabulary, _, _ = MODELS[model]
    config, facts = make_run(model, LENGTH, vocabulary, first_rows(model, target) * target.devices)

    def show(line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)

    [result] = run_preflight(config, facts, [target], search_batch=True, show=show).accelerators
    assert result.max_batch is not None
    return result.max_batch


def first_rows(model: str, target: Accelerator) -> int:
    """Returns the rows per device with which the search begins."""
    _, state, row_size = MODELS[model]
    return max(8, int((target.generation.usable_hbm_bytes_per_device / 2**30 - state) / row_size) // 8 * 8)


def measure(model: str, name: str) -> Row:
    """Runs one search in its own process; repeats it if the compiler crashed, as it sometimes does when memory is
    nearly used up."""
    title, goal = f"{model}, {LENGTH} tokens, {name}: largest batch", "at least 0.93"
    for _ in range(TRIES):
        try:
            batch = run_in_process(search_largest, model, name)
        except BrokenProcessPool:
            print(f"{model} on {name}: the compiler crashed", file=sys.stderr, flush=True)
            continue
        print(f"{model} on {name}: {batch.fits} fits, {batch.refused} does not", file=sys.stderr, flush=True)
        unit = f"sequences ({batch.rows_per_device} a device)"
        return row(title, unit, batch.fits, "smallest refused", batch.refused, goal)
    return row(title, "sequences", None, f"the compiler crashed {TRIES} times", None, goal)


def main() -> None:
    """Runs the searches and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--accelerator", action="append", choices=SLICES)
    options = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    rows: list[Row] = []
    for model in options.model or MODELS:
        for name in options.accelerator or SLICES:
            print(f"{model} on {name}", file=sys.stderr, flush=True)
            rows.append(measure(model, name))
    finish("batches", rows, options.json)


if __name__ == "__main__":
    main()
