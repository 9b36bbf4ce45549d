"""TensorFlow reads our shards with its own code, our examples are its bytes, and masks are the same integers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.packed_datasets import pack_rows
from training.data.formats import example_codec
from training.data.formats.dataset import Dataset
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.sampling.masking import Masker, Masking, SpecialTokens
from training.data.tf.sampling import mask

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=30_000)
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
    batches = [
        tf.io.parse_example(batch, spec)
        for batch in tf.data.TFRecordDataset(files(make(tmp_path, layout="recipe"))).batch(100)
    ]
    assert np.array_equal(np.concatenate([batch["input_ids"].numpy() for batch in batches]), ROWS)
    assert all((batch["attention_mask"].numpy() == 1).all() for batch in batches)


def test_our_examples_are_tensorflows_bytes() -> None:
    feature = {
        "a": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x" * 300])),
        "b": tf.train.Feature(int64_list=tf.train.Int64List(value=[-1, 0, 2**40])),
    }
    theirs = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)
    assert example_codec.encode({"a": b"x" * 300, "b": [-1, 0, 2**40]}) == theirs


@pytest.mark.parametrize(
    ("length", "percent", "seed", "epoch"), [(128, 15, 0, 0), (128, 40, 2**63 + 5, 7), (20, 15, 1, -1), (3, 100, 9, 2)]
)
def test_masks_are_the_same_integers(length: int, percent: int, seed: int, epoch: int) -> None:
    ids = np.random.default_rng(1).integers(0, 300, (500, length)).astype(np.int32)
    ids[0] = 3
    records = np.arange(500) * 1_000_003
    ours = Masker(Masking(percent), TOKENS, seed)(ids, epoch, records)

    @tf.function
    def traced(ids: Any, records: Any) -> Any:
        return mask(ids, epoch, records, seed=seed, masking=Masking(percent), tokens=TOKENS)

    theirs = traced(tf.constant(ids), tf.constant(records))
    assert theirs.keys() == vars(ours).keys()
    for name, one in vars(ours).items():
        assert np.array_equal(one, theirs[name].numpy())
        assert one.dtype == theirs[name].numpy().dtype
