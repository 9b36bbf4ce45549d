"""Runs the public recipe (transformers' examples/tensorflow/language-modeling-tpu) from end to end on WikiText, with
our commands and TensorFlow.

    make benchmark NAME=public_recipe [ARGS="--json --steps 300 --corpus /data/wikitext"]

A Unigram tokenizer, shards in the recipe's layout without a manifest, masked-language modelling over two logical
devices (MirroredStrategy: TPUStrategy's path through the backend), and the answers of `pipeline("fill-mask")` of the
exported folder. It trains on `wiki.valid.tokens` and evaluates on `wiki.test.tokens`. The peer of the perplexity is a
model that knows only the frequency of each token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import finish, row
from training.data.formats.open_dataset import open_dataset
from training.data.loading.record_source import open_source
from training.models.predict import open_pipeline

RUNS_IN = "tensorflow"
VOCABULARY, LENGTH, DEVICES = 8000, 128, 2
ASKED = "The film was released in the United <MASK> in 1998 ."
SECONDS = 3000


def tpu_train(*arguments: str, **environment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "training.cli", *arguments],
        env={**os.environ, **environment},
        stdout=sys.stderr,
        timeout=SECONDS,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"tpu-train {' '.join(arguments)} ended with code {ended.returncode}")


def recipe(corpus: Path, folder: Path, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs the recipe; returns the run's summary, and the answers for ASKED."""
    train, evaluation, tokenizer = (
        str(corpus / "wiki.valid.tokens"),
        str(corpus / "wiki.test.tokens"),
        str(folder / "tokenizer"),
    )
    tpu_train("tokenizer", "--corpus", train, "--vocabulary", str(VOCABULARY), "--out", tokenizer)
    options = ["--layout", "recipe", "--sequence-length", str(LENGTH), "--tokenizer", tokenizer, "--out", str(folder)]
    tpu_train("shards", "--corpus", train, "--evaluation-corpus", evaluation, *options)
    for split in ("train", "evaluation"):
        (folder / split / "dataset.json").unlink()  # the recipe writes none
    config = {
        "backend": "tensorflow",
        "seed": 1,
        "model": {"name": "bert-mini"},
        "data": {"tokenizer": tokenizer, "train": str(folder / "train"), "evaluation": str(folder / "evaluation")},
        "train": {"steps": steps, "global_batch_size": 32, "learning_rate": 1e-3, "warmup_steps": steps // 10},
        "output": str(folder / "runs"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    tpu_train("train", str(folder / "run.yaml"), "--run-id", "recipe", CPU_NUM_DEVICES=str(DEVICES))
    summary: dict[str, Any] = json.loads((folder / "runs" / "recipe" / "summary.json").read_text())
    fill = open_pipeline("fill-mask", summary["model"])
    return summary, fill(ASKED.replace("<MASK>", fill.tokenizer.mask_token))


def frequency_perplexity(folder: Path) -> float:
    """Returns the perplexity of the evaluation set if each token has its frequency in the training set."""

    def counts(split: str) -> Any:
        dataset = open_dataset(str(folder / split))
        ids = open_source(dataset, vocabulary=VOCABULARY).read(0, dataset.records, dataset.records)["input_ids"]
        return np.bincount(ids.reshape(-1), minlength=VOCABULARY).astype(np.float64)

    guessed, found = counts("train") + 1, counts("evaluation")
    return float(np.exp(-(found * np.log(guessed / guessed.sum())).sum() / found.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("/data/wikitext"),
        help="a folder with wiki.valid.tokens and wiki.test.tokens",
    )
    options = parser.parse_args()
    if not (options.corpus / "wiki.valid.tokens").is_file():
        raise SystemExit(f"{options.corpus} has no wiki.valid.tokens: name the folder with WikiText with --corpus")
    with tempfile.TemporaryDirectory() as folder:
        summary, answers = recipe(options.corpus, Path(folder), options.steps)
        baseline = frequency_perplexity(Path(folder))
    ours = summary["eval_perplexity"]
    said = ", ".join(f"{answer['token_str']} {answer['score']:.3f}" for answer in answers)
    found = [
        row(
            f"perplexity on WikiText after {options.steps} steps",
            "",
            ours,
            "token frequencies",
            baseline,
            "below 1 times",
        ),
        row(f"fill-mask: {ASKED}", "answers", len(answers), said, None, "5 answers"),
    ]
    finish("public_recipe", found, options.json)


if __name__ == "__main__":
    main()
