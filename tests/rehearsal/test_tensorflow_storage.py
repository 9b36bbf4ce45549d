"""Claims about TensorFlow's own gs:// on an emulated host: unmodified, by Google's names, from what the Python client
library wrote.

Starts an emulated v4-8 (one host) with a bucket, and runs one container of the tensorflow image on it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.emulator import control
from tests.rehearsal.workstation import BUCKET, Workstation
from training import storage
from training.data.loading import mlm_batches
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import pack_documents
from training.data.sampling.masking import Masking, SpecialTokens

pytestmark = pytest.mark.alone

FILE = """\
project: p
zone: us-central2-b
slice: {name: reader, accelerator_type: v4-8}
image: {backend: tensorflow}
run: {command: [python, -c, PROGRAM]}
"""
# What is said of the bucket from the inside.
PROGRAM = """
import hashlib, json
import tensorflow as tf
from training.data.tf.mlm_batches import mlm_batches
from training.data.formats.open_dataset import open_dataset
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.loading.record_source import HostSlice
url = "gs://BUCKET/data"
names = sorted(tf.io.gfile.listdir(url))
shards = [url + "/" + name for name in names if name.endswith(".tfrecord")]
content = b"".join(tf.io.gfile.GFile(shard, "rb").read() for shard in shards)
with tf.io.gfile.GFile("gs://BUCKET/written by/TensorFlow", "wb") as file:
    file.write(content)
tokens = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)
batch = next(iter(mlm_batches(open_dataset(url), HostSlice(tokens, 8), Masking(), seed=1, start=5)))
try:
    tf.io.gfile.GFile("gs://BUCKET/nothing", "rb").read()
    missing = "read"
except tf.errors.NotFoundError:
    missing = "NotFoundError"
records = sum(1 for _ in tf.data.TFRecordDataset(shards, compression_type="GZIP"))
ids = batch["input_ids"].numpy().tolist()
print("seen: " + json.dumps([names, hashlib.sha256(content).hexdigest(), records, ids, missing]))
"""
TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)


@pytest.mark.nightly
def test_tensorflow_reads_and_writes_the_emulated_bucket_by_its_own_code(
    emulator: Workstation, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(emulator.environment["TPU_LAUNCH_HOME"]) / "emulator"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.environment(home)["STORAGE_EMULATOR_HOST"])
    rows = np.random.default_rng(0).integers(5, 100, (300, 16)).astype(np.int32)
    plan = DatasetPlan("train", 16, "t", 100, 70, compression="gzip")
    url = f"gs://{BUCKET}/data"
    dataset = pack_documents(
        url, plan, lambda: map(str, range(300)), lambda texts: [rows[int(each)] for each in texts]
    ).dataset
    content = b"".join(storage.read(storage.join(url, shard.name)) for shard in dataset.shards)

    name = emulator.file("reader.yaml", FILE.replace("PROGRAM", json.dumps(PROGRAM.replace("BUCKET", BUCKET))))
    emulator.good("--emulated", "up", "-f", name)
    printed = emulator.good("--emulated", "run", "-f", name, seconds=280).output
    seen: list[Any] = json.loads(next(line for line in printed.splitlines() if "seen: " in line).split("seen: ", 1)[1])
    expected = mlm_batches.MlmBatches(dataset, HostSlice(TOKENS, 8), Masking(), seed=1).batch(5).input_ids.tolist()
    names = sorted([*(shard.name for shard in dataset.shards), "dataset.json"])
    assert seen == [names, hashlib.sha256(content).hexdigest(), 300, expected, "NotFoundError"]
    assert storage.read(f"gs://{BUCKET}/written by/TensorFlow") == content
    emulator.good("--emulated", "down", "-f", name)
