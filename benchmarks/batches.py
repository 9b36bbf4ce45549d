"""Finds the largest training batches that fit, by the TPU compiler, without a TPU: the table in
docs/guide/preflight.md.

    make benchmark NAME=batches [ARGS="--json --model bert-base --accelerator v3-8 --model 'Llama-3-8B LoRA'"]

What `tpu-train preflight --max-batch` finds for each model and slice, in sequences of the global batch, in bf16 with
AdamW. Encoders do MLM at 512 tokens on the slices of one host, with predictions at the masked positions and
`train.remat` as it is by default; the larger models and long rows are those of benchmarks/preflight.py. Beside it the
next larger batch that was tried, which the compiler refuses, at most 1/16 above. Two to four compilations of one to
four minutes each for a row: two hours and a half for all on two cores, and 10 GB of memory.
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
from benchmarks.preflight import DECODERS, LONG, Case, make_large_run
from training.accelerators import Accelerator, accelerator
from training.config import TrainerConfig
from training.preflight.programs import DataFacts
from training.preflight.report import LargestBatch
from training.preflight.search import run_preflight

RUNS_IN = "torch-xla"
LENGTH = 512
TRIES = 3
SLICES = ("v3-8", "v4-8", "v5litepod-8", "v5p-8", "v6e-8")
# Vocabulary, GiB of weights and moments, and GiB of HBM a row. The last two set where the search begins, which changes
# its time only.
MODELS = {"bert-base": (30_522, 1.3, 0.0905), "bert-large": (30_522, 3.8, 0.236), "roberta-base": (50_265, 1.5, 0.0912)}


LARGE: dict[str, dict[str, Case]] = {}  # by model and accelerator
for _case in [*DECODERS, LONG]:
    LARGE.setdefault(f"{_case.model}{' LoRA' * bool(_case.lora)}", {})[_case.accelerator] = _case


def make_search(model: str, name: str) -> tuple[TrainerConfig, DataFacts]:
    """Returns the run whose batch is searched, with the batch at which the search begins."""
    target = accelerator(name)
    if model in MODELS:
        vocabulary, _, _ = MODELS[model]
        return make_run(model, LENGTH, vocabulary, first_rows(model, target) * target.devices)
    return make_large_run(LARGE[model][name])


def search_largest(model: str, name: str) -> LargestBatch:
    """Runs the search of `tpu-train preflight --max-batch`."""

    def show(line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)

    config, facts = make_search(model, name)
    [result] = run_preflight(config, facts, [accelerator(name)], search_batch=True, show=show).accelerators
    assert result.max_batch is not None
    return result.max_batch


def first_rows(model: str, target: Accelerator) -> int:
    """Returns the rows per device with which the search begins."""
    _, state, row_size = MODELS[model]
    return max(8, int((target.generation.usable_hbm_bytes_per_device / 2**30 - state) / row_size) // 8 * 8)


def measure(model: str, name: str) -> Row:
    """Runs one search in its own process; repeats it if the compiler crashed, as it sometimes does when memory is
    nearly used up."""
    length = LENGTH if model in MODELS else LARGE[model][name].length
    title, goal = f"{model}, {length} tokens, {name}: largest batch", "at least 0.93, or one row a device"
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
    parser.add_argument("--model", action="append", choices=[*MODELS, *LARGE])
    parser.add_argument("--accelerator", action="append", choices=SLICES, help="of encoders")
    options = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    rows: list[Row] = []
    for model in options.model or [*MODELS, *LARGE]:
        for name in LARGE.get(model) or options.accelerator or SLICES:
            print(f"{model} on {name}", file=sys.stderr, flush=True)
            rows.append(measure(model, name))
    finish("batches", rows, options.json)


if __name__ == "__main__":
    main()
