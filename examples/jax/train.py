"""Trains a small network with JAX, data-parallel over all devices of a slice.

A program as it would run anywhere: nothing of tpu-launch is imported. One process for each host; `jax.distributed`
makes all devices of the slice one list. Every process brings its part of each batch; the losses are those of the whole.

    tpu-launch run -f examples/jax/run.yaml         on every host of a slice
    python train.py                                 here

With --save gs://BUCKET/FILE it keeps what it has learned, and goes on from there when it is started again.
"""

import argparse
import io
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, WIDTH, RATE = 256, 64, 0.02
PORT = 8476  # of host 0; any that is free there


def join() -> None:
    """Joins the hosts' processes to one program, by the addresses that `tpu-launch` sets."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")
    if os.environ.get("PJRT_DEVICE") == "CPU":  # an emulated slice
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if len(hosts) > 1:
        jax.distributed.initialize(f"{hosts[0]}:{PORT}", len(hosts), int(os.environ["TPU_WORKER_ID"]))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns this host's rows of a step's batch, from a seed of step and host: repeated steps get the same batch."""
    rows = BATCH // jax.process_count()
    x = np.random.default_rng((step, jax.process_index())).normal(size=(rows, 2)).astype(np.float32)
    return x, np.sin(3 * x[:, 0]) * x[:, 1]


def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def blob(url: str):
    from google.cloud import storage

    bucket, _, name = url.removeprefix("gs://").partition("/")
    return storage.Client().bucket(bucket).blob(name)


def save(url: str, step: int, weights: dict[str, jax.Array]) -> None:
    """Writes the weights as one object, atomically, in process 0."""
    if url and jax.process_index() == 0:
        file = io.BytesIO()
        np.savez(file, step=step, **{name: np.asarray(value) for name, value in weights.items()})
        blob(url).upload_from_string(file.getvalue())
        print(f"saved step {step}", flush=True)


def restore(url: str) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the step and the weights that were saved last; step 0 and None if there are none."""
    saved = blob(url) if url else None
    if saved is None or not saved.exists():
        return 0, {}
    arrays = dict(np.load(io.BytesIO(saved.download_as_bytes())))
    return int(arrays.pop("step")), arrays


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", default="", metavar="gs://BUCKET/FILE")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()
    join()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))

    mesh = Mesh(jax.devices(), ("data",))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    first, second, third = jax.random.split(jax.random.key(0), 3)
    weights = {
        "in": jax.random.normal(first, (2, WIDTH)) * 2,
        "bias": jax.random.normal(second, (WIDTH,)),
        "out": jax.random.normal(third, (WIDTH,)) / WIDTH,
    }
    begin, saved = restore(options.save)
    weights = jax.jit(lambda: saved or weights, out_shardings=everywhere)()
    if begin:
        print(f"goes on from step {begin}", flush=True)

    @jax.jit
    def update(weights, x, y, asked):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)  # XLA sums the gradients of the devices
        return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients), value, asked.max()

    value = jnp.nan
    for step in range(begin, options.steps):
        # The step sums the stop requests of all hosts, so that all exit after the same step.
        asked = np.full(jax.local_device_count(), len(stopping), np.float32)
        parts = (jax.make_array_from_process_local_data(rows, part) for part in (*batch(step), asked))
        weights, value, stop = update(weights, *parts)
        done = step + 1
        if step % 100 == 0 or done == options.steps:
            print(f"step {done}: loss {value:.6f}", flush=True)
        if stop or done % options.save_every == 0 or done == options.steps:
            save(options.save, done, weights)
        if stop and done < options.steps:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this host's own SIGTERM may arrive while it exits
            sys.exit(75)  # saved: `tpu-launch run` starts the program again
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} {jax.default_backend()} "
        f"devices: loss {value:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
