"""Runs the peer: Hugging Face's Trainer in plain torch on the CPU, as a process of its own: hugging_face.py JOB.json

It is driven as the public recipes drive it (transformers' run_mlm.py and run_glue.py): a model, rows, a collator,
TrainingArguments. It prints `step N` after each step, for the measuring process, and at the end one JSON object with
the figures of the evaluation, if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    USE_TORCH_XLA="0", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1"
)  # before transformers is imported

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Rows(Dataset[dict[str, Any]]):
    """Rows of arrays, for the Trainer to shuffle."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: torch.from_numpy(np.asarray(values[row], np.int64)) for name, values in self.arrays.items()}


class InOrder(IterableDataset[dict[str, Any]]):
    """The same rows in their stored order."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.rows[row] for row in range(len(self.rows)))


class Steps(TrainerCallback):
    """Prints a line after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"step {state.global_step}", flush=True)


def model(job: dict[str, Any]) -> torch.nn.Module:
    if job.get("labels"):
        return AutoModelForSequenceClassification.from_pretrained(job["model"], num_labels=job["labels"])
    if "model" in job:
        return AutoModelForMaskedLM.from_pretrained(job["model"], **job.get("dropouts", {}))
    torch.manual_seed(job["seed"])
    return BertForMaskedLM(BertConfig(**job["config"]))


def figures(network: torch.nn.Module, rows: Rows, batch: int) -> dict[str, float]:
    """Returns loss and accuracy over the predictions: the positions whose label is not -100."""
    network.eval()
    loss, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(rows), batch):
            part = {
                name: torch.from_numpy(values[start : start + batch].astype(np.int64))
                for name, values in rows.arrays.items()
            }
            labels = part.pop("labels")
            predicted = labels != -100
            logits = network(**part).logits[predicted]
            loss += float(torch.nn.functional.cross_entropy(logits, labels[predicted], reduction="sum"))
            hits += int((logits.argmax(-1) == labels[predicted]).sum())
            count += int(predicted.sum())
    return {
        "loss": loss / count,
        "perplexity": float(np.exp(loss / count)),
        "accuracy": hits / count,
        "predictions": count,
    }


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    rows = Rows(dict(np.load(job["rows"])))
    network = model(job)
    collator = None
    if "tokenizer" in job:  # masks are made as rows are read
        collator = DataCollatorForLanguageModeling(
            AutoTokenizer.from_pretrained(job["tokenizer"]), mlm_probability=0.15
        )
    arguments = TrainingArguments(
        output_dir=job["out"],
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=job["seed"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        **job.get("arguments", {}),
    )
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=InOrder(rows) if job.get("in_order") else rows,
        data_collator=collator,
        callbacks=[Steps()],
    )
    trainer.train()
    if "evaluation" in job:
        print(json.dumps(figures(network, Rows(dict(np.load(job["evaluation"]))), job["batch"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
