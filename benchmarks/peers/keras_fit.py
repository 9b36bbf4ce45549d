"""Runs the peer of `backend: tensorflow`, as a process of its own: keras_fit.py JOB.json

It has the data pipeline, model, optimizer and `model.fit` of the public recipe's run_mlm.py (transformers'
examples/tensorflow/language-modeling-tpu), on shards in its layout, without TPUStrategy: there is no TPU.
It prints `step N` after each step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1", TF_CPP_MIN_LOG_LEVEL="2", TF_USE_LEGACY_KERAS="1"
)  # before they are imported

import tensorflow as tf
import tf_keras
from transformers import AutoTokenizer, BertConfig, DataCollatorForLanguageModeling, TFBertForMaskedLM, create_optimizer

SHUFFLE = 2**18  # the recipe's default


class Steps(tf_keras.callbacks.Callback):
    """Prints a line after each step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print(f"step {batch + 1}", flush=True)


def rows(folder: Path, length: int, batch: int, collator: Any) -> Any:
    """Returns the dataset of run_mlm.py's prepare_dataset, repeated without end."""
    spec = {name: tf.io.FixedLenFeature(dtype=tf.int64, shape=(length,)) for name in ("input_ids", "attention_mask")}
    tokenizer = collator.tokenizer

    def masked(found: Any) -> Any:
        special = (
            ~tf.cast(found["attention_mask"], tf.bool)
            | (found["input_ids"] == tokenizer.cls_token_id)
            | (found["input_ids"] == tokenizer.sep_token_id)
        )
        found["input_ids"], found["labels"] = collator.tf_mask_tokens(
            found["input_ids"],
            vocab_size=len(tokenizer),
            mask_token_id=tokenizer.mask_token_id,
            special_tokens_mask=special,
        )
        return found

    files = tf.data.Dataset.from_tensor_slices([str(path) for path in sorted(folder.glob("*.tfrecord"))])
    dataset = tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.map(lambda record: tf.io.parse_single_example(record, spec), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(SHUFFLE).batch(batch, drop_remainder=True).repeat()
    return dataset.map(masked, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    tf_keras.utils.set_random_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    model = TFBertForMaskedLM(BertConfig(**job["config"]))
    model(model.dummy_inputs)
    optimizer, _ = create_optimizer(
        num_train_steps=job["steps"], num_warmup_steps=job["steps"] // 20, init_lr=1e-4, weight_decay_rate=1e-3
    )
    model.compile(optimizer=optimizer, metrics=["accuracy"], jit_compile=job["jit_compile"] or None)
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15, mlm=True, return_tensors="tf")
    data = rows(Path(job["rows"]), job["length"], job["batch"], collator)
    model.fit(data, steps_per_epoch=job["steps"], epochs=1, callbacks=[Steps()], verbose=0)


if __name__ == "__main__":
    main(sys.argv[1])
