"""Compares `tpu-train train` with Hugging Face's Trainer on WikiText (masked language modelling): the same loss after
as many steps?

    make benchmark NAME=wikitext [ARGS="--json --steps 600"]

Both get the same small BERT with the same initial weights, the same rows with the same masks in the same order, and the
same hyperparameters (AdamW, warm-up, linear decay, clipping, dropout, fp32, one CPU host). What differs is the code:
ours in torch_xla with the head at masked positions only, theirs in plain torch. Both models are evaluated over the same
masked predictions of the evaluation file: ours at its end, theirs in plain torch.

The training split of WikiText is too large for this: training uses wiki.test.tokens, evaluation wiki.valid.tokens.
--wikitext names the folder with both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers import processes, rows
from training.config import from_document
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.loading.batches import MlmBatch, MlmBatches, mlm_evaluation
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masking
from training.models.hugging_face import DROPOUT
from training.yaml_file import Document

RUNS_IN = "torch-xla"
VOCABULARY, LENGTH, BATCH, SEED = 8000, 128, 32, 1
MODEL = {"name": "bert-tiny", "max_positions": LENGTH}
PEAK = 1e-3
WITHIN = 0.02


def data(folder: Path, wikitext: Path) -> None:
    """Makes the tokenizer and the datasets, by the commands that users type."""
    command = [sys.executable, "-m", "training.cli"]
    train, other = wikitext / "wiki.test.tokens", wikitext / "wiki.valid.tokens"
    processes.done(
        [
            *command,
            "tokenizer",
            "--corpus",
            str(train),
            "--vocabulary",
            str(VOCABULARY),
            "--algorithm",
            "wordpiece",
            "--out",
            str(folder / "tokenizer"),
        ]
    )
    shards = [
        "--corpus",
        str(train),
        "--evaluation-corpus",
        str(other),
        "--tokenizer",
        str(folder / "tokenizer"),
        "--sequence-length",
        str(LENGTH),
    ]
    processes.done([*command, "shards", *shards, "--out", str(folder / "data")])


def labelled(batch: MlmBatch) -> dict[str, np.ndarray]:
    """Returns labels (rows, sequence) for the Trainer, -100 where no token is to be predicted."""
    kept = batch.records >= 0
    labels = np.full(batch.input_ids.shape, -100, np.int32)
    row, place = np.nonzero(batch.weights)
    labels[row, batch.positions[row, place]] = batch.labels[row, place]
    return {"input_ids": batch.input_ids[kept], "labels": labels[kept]}


def save(path: Path, parts: list[dict[str, np.ndarray]]) -> str:
    np.savez(path, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return str(path)


def compare(folder: Path, wikitext: Path, steps: int) -> list[rows.Row]:
    data(folder, wikitext)
    config: dict[str, Any] = {
        "seed": SEED,
        "model": MODEL,
        "data": {
            "tokenizer": str(folder / "tokenizer"),
            "train": str(folder / "data/train"),
            "evaluation": str(folder / "data/evaluation"),
        },
        "train": {
            "steps": steps,
            "global_batch_size": BATCH,
            "learning_rate": PEAK,
            "warmup_steps": steps // 10,
            "strict": True,
        },
        "output": str(folder / "runs"),
    }
    # The model before its first step, as a folder: both start from it.
    first = {
        **config,
        "train": {**config["train"], "steps": 1, "learning_rate": 1e-30, "weight_decay": 0, "warmup_steps": 0},
    }
    initial = str(processes.ours(folder, first, 0, "initial")[1]["model"])
    config["model"] = {"path": initial}
    tokens = tokenizers.read(config["data"]["tokenizer"]).special
    settings = from_document(Document("benchmark", config, {}))
    masking = Masking(settings.data.masking.percent, settings.data.masking.predictions)
    how = HostSlice(tokens, BATCH)
    source = MlmBatches(open_dataset(config["data"]["train"]), how, masking, SEED)
    trained = save(folder / "train.npz", [labelled(source.batch(step)) for step in range(steps)])
    source.close()
    every = mlm_evaluation(open_dataset(config["data"]["evaluation"]), how, masking)
    evaluated = save(folder / "evaluation.npz", [labelled(each) for each in every])

    _, summary = processes.ours(folder, config, 5)
    dropout = DROPOUT if settings.train.dropout is None else settings.train.dropout
    job = {
        "model": initial,
        "dropouts": {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
        "rows": trained,
        "in_order": True,
        "evaluation": evaluated,
        "steps": steps,
        "batch": BATCH,
        "seed": SEED,
        "arguments": {"learning_rate": PEAK, "warmup_steps": steps // 10, "weight_decay": settings.train.weight_decay},
    }
    theirs = json.loads(processes.peer(folder, job, 5)[1].splitlines()[-1])
    found = []
    for name, unit, ours in (
        ("masked accuracy", "share", summary["eval_accuracy"]),
        ("perplexity", "", summary["eval_perplexity"]),
    ):
        peer = theirs[name.split()[-1]]
        found.append(
            rows.row(
                f"{name}, {theirs['predictions']} predictions, {steps} steps",
                unit,
                ours,
                "Hugging Face Trainer",
                peer,
                f"within {WITHIN:.0%}",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--wikitext",
        type=Path,
        default=Path("/data/wikitext"),
        help="the folder with wiki.test.tokens and wiki.valid.tokens",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), options.wikitext, options.steps)
    rows.finish("wikitext", found, options.json)


if __name__ == "__main__":
    main()
