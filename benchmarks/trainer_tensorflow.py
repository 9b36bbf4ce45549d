"""Compares `backend: tensorflow` with the public recipe's model.fit, on this CPU and in the same TensorFlow.

    make benchmark NAME=trainer ARGS="--backend tensorflow [--json --repeat 2]"

Masked-language modelling on the model, rows and batches of benchmarks/trainer.py (fp32, dropout 0.1, 128 tokens, a
vocabulary of 30,000). Ours: `tpu-train train`. Theirs: run_mlm.py as it is published, but for TPUStrategy: TFRecords in
its layout, TFBertForMaskedLM, AdamW, `model.fit`. Each measurement is a process of its own, ours and theirs in turn;
steps are timed from outside, after a few for warming up; the best of `--repeat` is kept for both. The second row gives
both XLA on the CPU (`train.jit_compile`; `model.compile(jit_compile=True)`), which the recipe does not do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers import processes
from benchmarks.peers.rows import Row, finish, row
from benchmarks.trainer import LENGTH, ROWS, SHAPES, VOCABULARY, mlm_config, peer_job
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import PackedRows, write_rows

RUNS_IN = "tensorflow"
PEER = Path(__file__).parent / "peers" / "keras_fit.py"
GOAL = 1.3


def compare(folder: Path, repeat: int) -> list[Row]:
    found = []
    name, (_, _, _, batch, steps, warm, _) = next(iter(SHAPES.items()))
    for compiled in (False, True):
        config = mlm_config(folder, name, steps, log_every=1)
        config |= {"backend": "tensorflow", "train": {**config["train"], "jit_compile": compiled}}
        rows = np.load(folder / "rows.npz")["input_ids"]
        plan = DatasetPlan("train", LENGTH, "", VOCABULARY, ROWS // 4, layout="recipe")
        write_rows(
            str(folder / "recipe"),
            plan,
            lambda: map(str, range(ROWS)),
            PackedRows(plan, lambda texts, rows=rows: [rows[int(each)] for each in texts]),
        )
        job = {**peer_job(folder, name, folder / "recipe"), "length": LENGTH, "jit_compile": compiled}
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        ours = theirs = 0.0
        for number in range(repeat):
            ours = max(ours, batch * processes.ours(folder, config, warm, f"{compiled}-{number}")[0])
            theirs = max(theirs, batch * processes.timed([sys.executable, str(PEER), str(path)], warm)[0])
        what = ", both with XLA" if compiled else ""
        found.append(
            row(
                f"MLM, {name}{what}",
                "examples/s",
                ours,
                "run_mlm.py's model.fit",
                theirs,
                "" if compiled else f"{GOAL:g} times",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        finish("trainer_tensorflow", compare(Path(folder), options.repeat), options.json)


if __name__ == "__main__":
    main()
