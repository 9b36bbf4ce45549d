"""Measures the host time of a training step with TensorFlow, on eight replicas (logical devices of this CPU).

    make benchmark NAME=dispatch ARGS="--backend tensorflow [--layers 12 --json]"

On CPUs a call returns when its devices have ended, so the figure is the processor time of the calling thread: the
devices compute on other threads. It is the mean over the steps after warming up; each figure has a process of its own.
The model is BERT with tiny widths and, by default, two layers: TensorFlow builds the program once per replica.

  ours            `step` of the trainer's own backend and its result, read as late as the loop does, with
                  train.steps_per_call 1 and as the trainer chooses it
  Keras           `model.fit` of the unmodified TFBertForMaskedLM under the same strategy, with steps_per_execution 1
  plain loop      the same model and optimizer in a tf.function over strategy.run, and next() on the strategy's iterator
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import run_in_process
from benchmarks.peers.rows import finish, row

RUNS_IN = "tensorflow"
REPLICAS, ROWS, LENGTH, VOCABULARY, WIDTH = 8, 8, 16, 128, 16
WARM = 64  # steps: calls of the trainer's grow until then
GOAL = 2.0  # ms


def use_replicas() -> None:
    """Sets the number of logical devices for TensorFlow, imported afterwards."""
    os.environ |= {"CPU_NUM_DEVICES": str(REPLICAS), "TF_CPP_MIN_LOG_LEVEL": "2", "TF_USE_LEGACY_KERAS": "1"}


def time_steps(step: Callable[[int], None], steps: int) -> float:
    """Returns the mean milliseconds of this thread's processor time per step; a call may run several steps."""
    for number in range(WARM):
        step(number)
    began = time.thread_time()
    for number in range(WARM, WARM + steps):
        step(number)
    return 1000 * (time.thread_time() - began) / steps


def measure_ours(layers: int, steps: int, steps_per_call: int | None) -> float:
    """Measures the trainer's backend, on a dataset of its format."""
    use_replicas()
    import numpy as np

    from benchmarks.trainer import tokenizer
    from training.batch import Signals
    from training.config import TrainerConfig
    from training.data.prepare.dataset_writer import DatasetPlan
    from training.data.prepare.pack import PackedRows, write_rows
    from training.distributed.cluster import Cluster
    from training.distributed.rendezvous import SingleHost
    from training.run_setup import open_backend, open_task

    with tempfile.TemporaryDirectory() as folder:
        plan = DatasetPlan("train", LENGTH, tokenizer(Path(folder) / "tokenizer"), VOCABULARY, 64)
        rows = np.random.default_rng(0).integers(5, VOCABULARY, (64, LENGTH), dtype=np.int32)
        write_rows(
            f"{folder}/train",
            plan,
            lambda: map(str, range(64)),
            PackedRows(plan, lambda texts: [rows[int(text)] for text in texts]),
        )
        sizes = {"layers": layers, "hidden_size": WIDTH, "heads": 2, "intermediate_size": 32, "max_positions": LENGTH}
        settings = {"steps": WARM + steps, "global_batch_size": ROWS, "dropout": 0.1, "steps_per_call": steps_per_call}
        config = TrainerConfig.model_validate(
            {
                "model": {"name": "bert-base", **sizes},
                "backend": "tensorflow",
                "data": {"train": f"{folder}/train", "tokenizer": f"{folder}/tokenizer"},
                "train": settings,
                "output": f"{folder}/runs",
            }
        )
        cluster = Cluster(0, ("localhost",))
        task = open_task(config, cluster)
        backend = open_backend(config, cluster, SingleHost(), task)
        assert backend.devices == REPLICAS
        batches, in_flight = backend.batches(task, 0), deque[Any]()

        def step(number: int) -> None:
            in_flight.append(backend.step(number, next(batches).arrays, Signals()))
            while len(in_flight) > backend.in_flight:
                in_flight.popleft().result()

        return time_steps(step, steps)


def _peer(layers: int) -> tuple[Any, Any, Any]:
    """Returns a strategy, with Hugging Face's model and Keras' Adam made in its scope."""
    use_replicas()
    import tensorflow as tf
    import tf_keras
    from transformers import BertConfig, TFBertForMaskedLM

    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{index}" for index in range(REPLICAS)])
    with strategy.scope():
        model = TFBertForMaskedLM(
            BertConfig(
                num_hidden_layers=layers,
                hidden_size=WIDTH,
                num_attention_heads=2,
                intermediate_size=32,
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
            )
        )
        optimizer = tf_keras.optimizers.Adam(1e-4)
    return strategy, model, optimizer


def _rows() -> Any:
    """Yields batches of one array, as ids and as labels, without end."""
    import tensorflow as tf

    ids = tf.ones((ROWS, LENGTH), tf.int32)
    return tf.data.Dataset.from_tensors({"input_ids": ids, "labels": ids}).repeat().prefetch(2)


def measure_keras(layers: int, steps: int) -> float:
    """Measures `model.fit`."""
    strategy, model, optimizer = _peer(layers)
    import tf_keras

    times: list[float] = []

    class Clock(tf_keras.callbacks.Callback):  # type: ignore[misc]
        """Records the processor time at the end of each step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.thread_time())

    with strategy.scope():
        model.compile(optimizer=optimizer)
    model.fit(_rows(), steps_per_epoch=WARM + steps, epochs=1, callbacks=[Clock()], verbose=0)
    return 1000 * (times[-1] - times[WARM - 1]) / steps


def measure_plain_loop(layers: int, steps: int) -> float:
    """Measures a loop as in TensorFlow's guides to tf.distribute."""
    strategy, model, optimizer = _peer(layers)
    import tensorflow as tf

    def of_replica(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch, training=True).loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            [pair for pair in zip(gradients, model.trainable_variables, strict=True) if pair[0] is not None]
        )
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def run(batch: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(of_replica, args=(batch,)), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(_rows()))
    return time_steps(lambda _number: run(next(batches)).numpy(), steps)


def measure(label: str, function: Callable[..., float], *arguments: Any) -> float:
    """Measures one case in a process of its own; prints it at once."""
    milliseconds = run_in_process(function, *arguments)
    print(f"  {label}: {milliseconds:.2f} ms", file=sys.stderr, flush=True)
    return milliseconds


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=128, help="steps that count (128)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    options = parser.parse_args()
    size = (options.layers, options.steps)
    chosen = measure("ours, chosen", measure_ours, *size, None)
    single = measure("ours, 1", measure_ours, *size, 1)
    keras = measure("Keras' fit", measure_keras, *size)
    plain = measure("plain loop", measure_plain_loop, *size)
    goal = f"ours at most {GOAL:g}"
    rows = [
        row(f"{REPLICAS} replicas, steps_per_call {name}", "ms of the caller a step", ours, peer_name, peer, goal)
        for name, ours in (("chosen", chosen), ("1", single))
        for peer_name, peer in (("Keras' fit", keras), ("plain loop", plain))
    ]
    finish("dispatch_tensorflow", rows, options.json)


if __name__ == "__main__":
    main()
