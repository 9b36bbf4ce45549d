"""TensorFlow reads our shards with its own code, and our examples are its bytes."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.packed_datasets import pack_rows
from training.data.formats import example_codec
from training.data.formats.dataset import Dataset
from training.data.prepare.dataset_writer import DatasetPlan

ROWS = np.random.default_rng(0).integers(5, 30_000, (1000, 128)).astype(np.int32)


def make(folder: Path, **options: str) -> Dataset:
    return pack_rows(folder, DatasetPlan("train", 128, "t", 30_000, 400, **options), ROWS)


def files(dataset: Dataset) -> list[str]:
    return [f"{dataset.url}/{shard.name}" for shard in dataset.shards]


def test_tensorflow_reads_our_shards(tmp_path: Path) -> None:
    ids = []
    for batch in tf.data.TFRecordDataset(files(make(tmp_path))).batch(100):
        parsed = tf.io.parse_example(batch, {"input_ids": tf.io.FixedLenFeature([], tf.string)})
        ids.append(tf.cast(tf.io.decode_raw(parsed["input_ids"], tf.uint16), tf.int32).numpy())
    assert np.array_equal(np.concatenate(ids), ROWS)


def test_tensorflow_reads_our_shards_in_the_public_layout(tmp_path: Path) -> None:
    spec = {name: tf.io.FixedLenFeature([128], tf.int64) for name in ("input_ids", "attention_mask")}
    dataset = tf.data.TFRecordDataset(files(make(tmp_path, layout="recipe"))).batch(100)
    batches = [tf.io.parse_example(batch, spec) for batch in dataset]
    assert np.array_equal(np.concatenate([batch["input_ids"].numpy() for batch in batches]), ROWS)
    assert all((batch["attention_mask"].numpy() == 1).all() for batch in batches)


def test_our_examples_are_tensorflows_bytes() -> None:
    feature = {
        "a": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x" * 300])),
        "b": tf.train.Feature(int64_list=tf.train.Int64List(value=[-1, 0, 2**40])),
    }
    theirs = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)
    assert example_codec.encode({"a": b"x" * 300, "b": [-1, 0, 2**40]}) == theirs
