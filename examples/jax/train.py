"""Trains a small network with JAX, data-parallel over all devices of a slice.

A program as it would run anywhere: nothing of tpu-launch is imported. One process for each host; `jax.distributed`
makes all devices of the slice one list. Every process brings its part of each batch; the losses are those of the whole.

    tpu-launch run -f examples/jax/run.yaml         on every host of a slice
    python train.py                                 here
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, BATCH, WIDTH, RATE = 400, 256, 64, 0.02
PORT = 8476  # of host 0; any that is free there


def join() -> None:
    """Makes the hosts' processes one program: `tpu-launch` tells each where the others are."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")
    if os.environ.get("PJRT_DEVICE") == "CPU":  # an emulated slice
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if len(hosts) > 1:
        jax.distributed.initialize(f"{hosts[0]}:{PORT}", len(hosts), int(os.environ["TPU_WORKER_ID"]))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This host's rows of a step's batch; the seed is the step and the host, so that a batch is the same again."""
    rows = BATCH // jax.process_count()
    x = np.random.default_rng((step, jax.process_index())).normal(size=(rows, 2)).astype(np.float32)
    return x, np.sin(3 * x[:, 0]) * x[:, 1]


def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def main() -> None:
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
    weights = jax.jit(lambda: weights, out_shardings=everywhere)()

    @jax.jit
    def update(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)  # XLA adds the devices' gradients up
        return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients), value

    for step in range(STEPS):
        x, y = (jax.make_array_from_process_local_data(rows, part) for part in batch(step))
        weights, value = update(weights, x, y)
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step + 1}: loss {value:.6f}", flush=True)
        if stopping:
            sys.exit(75)  # save here: `tpu-launch run` starts the program again
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} {jax.default_backend()} "
        f"devices: loss {value:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
