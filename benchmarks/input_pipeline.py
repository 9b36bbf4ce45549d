"""Measures the input pipeline beside TensorFlow's: throughput, memory, size of shards, time to resume.

    make benchmark NAME=input_pipeline [ARGS="--json --records 60000 --repeat 3"]

Everything is measured on this machine, on the same generated text: 60,000 rows of 128 ids with the frequencies of words
(Zipf). Each measurement is a process of its own; the best of `--repeat` counts, for ours and theirs alike. Rows that
compare with TensorFlow need `tensorflow` and `transformers` (the tensorflow image has both); without them those rows
say so and have no peer.

  ours            MlmBatches behind prefetch: read, check every CRC, shuffle globally, decode, mask 80/10/10, batches of
                  256
  recipe          transformers' run_mlm.py for TPUs: TFRecordDataset, map(parse_single_example), shuffle(2**18), batch,
                  collator.tf_mask_tokens
  batched tf.data TFRecordDataset, batch, map(parse_example): no shuffle, no masks
                  all three over four epochs, warm-up included
  resuming        from opening the dataset to the first batch of a step in the millions, in a fresh process; gs:// is a
                  local server that waits 20 ms before each answer
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from training import storage
from training.data.formats.open_dataset import open_dataset
from training.data.loading.batches import MlmBatches
from training.data.loading.reader import prefetch
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import PackedRows, write_rows
from training.data.sampling import order
from training.data.sampling.masking import Masking, SpecialTokens

RUNS_IN = "tensorflow"  # the image that has the peers' packages
VOCABULARY, LENGTH, BATCH = 50_000, 128, 256
TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=VOCABULARY)
LATENCY = 0.020
FAR = 3_000_000
EPOCHS = 4


def generate(folder: str, records: int) -> None:
    """Writes the same rows as compact and recipe shards."""
    rows = np.minimum(np.random.default_rng(0).zipf(1.2, (records, LENGTH)) + 4, VOCABULARY - 1).astype(np.int32)
    for layout in ("compact", "recipe"):
        plan = DatasetPlan("train", LENGTH, "t", VOCABULARY, 16_384, layout)
        write_rows(
            f"{folder}/{layout}",
            plan,
            lambda: map(str, range(records)),
            PackedRows(plan, lambda texts: [rows[int(text)] for text in texts]),
        )


def open_batches(url: str) -> MlmBatches:
    """Returns our batches of a dataset."""
    return MlmBatches(open_dataset(url), HostSlice(TOKENS, BATCH), Masking(), seed=1)


def throughput(url: str) -> float:
    """Returns records per second, with a quarter of the usual window: a dataset that fits into one window is read only
    once."""
    order.WINDOW_BLOCKS //= 4
    source = open_batches(url)
    steps = EPOCHS * open_dataset(url).records // BATCH
    began = time.perf_counter()
    for _ in itertools.islice(prefetch(source.batch, 0, 4), steps):
        pass
    return steps * BATCH / (time.perf_counter() - began)


def first_batch(url: str) -> float:
    """Returns the seconds from opening the dataset to batch FAR."""
    began = time.perf_counter()
    open_batches(url).batch(FAR)
    return time.perf_counter() - began


def memory(url: str) -> float:
    """Returns the peak MB of a process that reads two epochs, libraries included."""
    source = open_batches(url)
    for k in range(2 * open_dataset(url).records // BATCH):
        source.batch(k)
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory before exec
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3


def size(url: str) -> float:
    """Returns the bytes per record."""
    dataset = open_dataset(url)
    return sum(shard.bytes for shard in dataset.shards) / dataset.records


def recipe(url: str) -> float:
    """Returns the records per second of the public recipe's pipeline, whose shuffle buffer holds all of these
    records."""
    import tensorflow as tf
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_word_level(),
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="[MASK]",
    )
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15, mlm=True, return_tensors="tf")
    spec = {name: tf.io.FixedLenFeature(dtype=tf.int64, shape=(LENGTH,)) for name in ("input_ids", "attention_mask")}

    def masked(batch: Any) -> Any:
        special = ~tf.cast(batch["attention_mask"], tf.bool) | (batch["input_ids"] == 0) | (batch["input_ids"] == 1)
        batch["input_ids"], batch["labels"] = collator.tf_mask_tokens(
            batch["input_ids"], vocab_size=VOCABULARY, mask_token_id=4, special_tokens_mask=special
        )
        return batch

    dataset = tf.data.Dataset.from_tensor_slices(_files(url))
    dataset = tf.data.TFRecordDataset(dataset.shuffle(len(dataset)), num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.map(lambda record: tf.io.parse_single_example(record, spec), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(2**18).batch(BATCH, drop_remainder=True)
    return _rate(dataset.map(masked, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def batched(url: str) -> float:
    """Returns the records per second of batching before parsing."""
    import tensorflow as tf

    spec = {name: tf.io.FixedLenFeature(dtype=tf.int64, shape=(LENGTH,)) for name in ("input_ids", "attention_mask")}
    dataset = tf.data.TFRecordDataset(_files(url), num_parallel_reads=tf.data.AUTOTUNE).batch(
        BATCH, drop_remainder=True
    )
    return _rate(
        dataset.map(lambda batch: tf.io.parse_example(batch, spec), num_parallel_calls=tf.data.AUTOTUNE).prefetch(
            tf.data.AUTOTUNE
        )
    )


MEASUREMENTS: dict[str, Callable[[str], float]] = {
    function.__name__: function for function in (throughput, first_batch, memory, size, recipe, batched)
}


def _word_level() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(
        models.WordLevel(
            {name: number for number, name in enumerate(("[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"))},
            unk_token="<unk>",
        )
    )


def _files(url: str) -> list[str]:
    return [storage.join(url, shard.name) for shard in open_dataset(url).shards]


def _rate(dataset: Any) -> float:
    began, count = time.perf_counter(), 0
    for _ in dataset.repeat(EPOCHS):
        count += BATCH
    return count / (time.perf_counter() - began)


def measure(
    name: str, url: str, repeat: int, *, smallest: bool = False, environment: dict[str, str] | None = None
) -> float | None:
    """Returns the best of several runs, each in its own process; None if a package is missing."""
    values = []
    for _ in range(repeat):
        process = subprocess.run(
            [sys.executable, __file__, "--measure", name, "--url", url],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if process.returncode:
            if "ModuleNotFoundError" in process.stderr:
                return None
            raise SystemExit(f"measuring {name} failed with code {process.returncode}:\n{process.stderr}")
        values.append(float(process.stdout.split()[-1]))
    return min(values) if smallest else max(values)


@contextmanager
def bucket(folder: str) -> Iterator[dict[str, str]]:
    """Runs the emulator's storage in another process, each answer LATENCY late; yields the environment for its
    clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port), "--url", folder])
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            if time.monotonic() > deadline:
                raise SystemExit(f"the local storage server did not start on port {port} within 30 s")
            time.sleep(0.1)
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait(10)


def serve(port: int, folder: str) -> None:
    """Serves buckets in a folder, each answer LATENCY late, until the process is ended."""
    from launcher.emulator import storage
    from launcher.emulator.bucket import Buckets
    from launcher.emulator.http_server import HttpRequest, HttpResponse, accept, serve_http

    buckets = Buckets(Path(folder))
    buckets.ensure("bucket")

    def late(request: HttpRequest) -> HttpResponse:
        time.sleep(LATENCY)
        return storage.answer(buckets, request)

    accept({socket.create_server(("127.0.0.1", port)): lambda connection: serve_http(connection, late)})


def compare(folder: str, records: int, repeat: int) -> list[Row]:
    """Returns all rows of the report."""
    generate(folder, records)
    rows: list[Row] = []

    def add(name: str, unit: str, ours: float | None, peer_name: str, peer: float | None, goal: str) -> None:
        rows.append(row(name, unit, ours, peer_name, peer, goal))

    compact, public = f"{folder}/compact", f"{folder}/recipe"
    ours = measure("throughput", compact, repeat)
    add(
        "full path",
        "records/s",
        ours,
        "run_mlm.py for TPUs (map, shuffle, batch)",
        measure("recipe", public, repeat),
        "8 times the recipe",
    )
    add(
        "full path",
        "records/s",
        ours,
        "tf.data batched, no shuffle, no masks",
        measure("batched", public, repeat),
        "not below",
    )
    add("full path", "records/s", ours, "goal", 400_000, "at least 400,000")
    add(
        "first batch after resuming, local",
        "s",
        measure("first_batch", compact, repeat, smallest=True),
        "goal",
        1.0,
        "at most 1 s",
    )
    with bucket(f"{folder}/server") as environment:
        os.environ.update(environment)
        for stat in storage.listing(compact):
            storage.write(f"gs://bucket/compact/{storage.name_of(stat.url)}", storage.read(stat.url))
        seconds = measure("first_batch", "gs://bucket/compact", repeat, smallest=True, environment=environment)
        add("first batch after resuming, gs:// 20 ms away", "s", seconds, "goal", 3.0, "at most 3 s")
        add("peak memory, local", "MB", measure("memory", compact, 1), "goal", 512, "below 512 MB")
        peak = measure("memory", "gs://bucket/compact", 1, environment=environment)
        add("peak memory, gs://", "MB", peak, "goal", 512, "below 512 MB")
    public_size = measure("size", public, 1)
    add("size", "bytes/record", measure("size", compact, 1), "recipe", public_size, "")
    return rows


def main() -> None:
    """Runs all measurements, or the one that a child process is started for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(MEASUREMENTS[options.measure](options.url))
    elif options.serve:
        serve(options.serve, options.url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(folder, options.records, options.repeat)
        finish("input_pipeline", rows, options.json)


if __name__ == "__main__":
    main()
