"""Measures the host time of a training step before the devices can start it, beside Hugging Face's plain loop and JAX.

    make benchmark NAME=dispatch [ARGS="--devices 8 --model bert-base --json"]

On a virtual TPU of 1 and of 8 devices, with the depth and heads of bert-base and bert-large and tiny widths: what the
host does depends on how many operations and buffers a step has, and not on their sizes. Measured is the time until the
call that starts a step has returned, with devices that are idle (each step's result is read before the next begins);
the median of the steps after compiling. Each figure is of a process of its own, one after another.

The virtual devices compute on the cores that the host's threads need, as soon as the program has started; a TPU does
not. So the time for which the calling thread was ready to run and had no core, as the kernel counts it, is excluded;
time spent waiting for another thread counts. A row shows the whole time beside it.

  ours          `step` of the trainer's own backend, bf16, dropout 0.1: from the batch in numpy to the started program
  plain loop    the unmodified BertForMaskedLM, bf16 autocast, torch.optim.AdamW and torch_xla.sync(): forward,
                backward, step and sync, traced every time
  JAX           a compiled function of as many donated buffers as the step has tensors of state, on its CPU devices
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import run_in_process
from benchmarks.peers.rows import Row, finish, row

RUNS_IN = "torch-xla"
VIRTUAL_TPU = True
SLICES = {1: "v5litepod-1", 8: "v3-8"}  # devices -> a slice with this many
ROWS, LENGTH, VOCABULARY = 8, 16, 128
WARM = 4  # steps before the first that counts: the trainer traces the first two
GOALS = {"bert-base": 6.0, "bert-large": 10.0}  # ms
GROWTH, SHARE = 1.5, 20.0  # bert-large to bert-base; plain loop to ours


@dataclass(frozen=True)
class Measured:
    """Host time of a step, and how many tensors of state it changes."""

    milliseconds: float
    elapsed: float  # ms, with what the calling thread waited for a core
    buffers: int


def sizes_of(model: str) -> dict[str, int]:
    """Returns the sizes of a network with full depth and heads, and tiny widths."""
    layers, heads = {"bert-base": (12, 12), "bert-large": (24, 16)}[model]
    return {"hidden_size": 2 * heads, "layers": layers, "heads": heads, "intermediate_size": 32}


def time_steps(start: Callable[[int], Callable[[], Any]], steps: int) -> tuple[float, float]:
    """Returns the medians of the milliseconds that `start` takes, without and with the time this thread waited for a
    core. `start` returns a function that waits for the started step."""
    elapsed, waited = [], []
    for number in range(WARM + steps):
        without_core, began = seconds_without_core(), time.perf_counter()
        wait = start(number)
        elapsed.append(time.perf_counter() - began)
        waited.append(seconds_without_core() - without_core)
        wait()
    host = [total - part for total, part in zip(elapsed, waited, strict=True)]
    return 1000 * statistics.median(host[WARM:]), 1000 * statistics.median(elapsed[WARM:])


def seconds_without_core() -> float:
    """Returns the total seconds for which this thread was ready to run and waited for a core
    (https://docs.kernel.org/scheduler/sched-stats.html)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def use_virtual_tpu(devices: int) -> Any:
    """Lets torch_xla, imported afterwards, open this many devices. Returns the host of that slice."""
    from training.distributed.cluster import Cluster, torch_xla_environment

    cluster = Cluster(0, ("localhost",), SLICES[devices])
    os.environ |= {**torch_xla_environment(cluster, {}), "PJRT_DEVICE": "TPU"}
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiling takes longer than all steps
    return cluster


def measure_ours(model: str, devices: int, steps: int) -> Measured:
    """Measures the trainer's backend."""
    cluster = use_virtual_tpu(devices)
    from training.backends.torch_xla.backend import TorchXla

    return measure_backend(TorchXla, cluster, model, steps)


def measure_backend(backend_class: Any, cluster: Any, model: str, steps: int) -> Measured:
    """Measures a backend of the trainer, whose framework can be imported."""
    import numpy as np

    from training.batch import Signals
    from training.config import TrainerConfig
    from training.distributed.rendezvous import SingleHost
    from training.models.hugging_face import ModelRequirements
    from training.preflight.programs import DataFacts, Graph, empty_batch

    sizes = {"name": model, "max_positions": LENGTH, **sizes_of(model)}
    settings = {"steps": WARM + steps, "global_batch_size": ROWS, "precision": "bf16", "dropout": 0.1}
    folders = {"train": "none", "tokenizer": "none"}
    config = TrainerConfig.model_validate({"model": sizes, "data": folders, "train": settings, "output": "none"})
    backend = backend_class(config, cluster, SingleHost(), ModelRequirements(VOCABULARY, 0, LENGTH))
    facts = DataFacts(VOCABULARY, 0, (LENGTH,), (), None)
    empty = empty_batch(config, Graph("training", ROWS, LENGTH), facts)
    batch = {name: np.array(array) for name, array in empty.items()}
    batch["weights"][:] = 1
    times = time_steps(lambda number: backend.step(number, batch, Signals()).result, steps)
    return Measured(*times, len(backend.tensor_specs()))


def plain_network(model: str) -> Any:
    """Returns Hugging Face's unmodified network of a model, in training mode on the host."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = sizes_of(model)
    config = BertConfig(
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["intermediate_size"],
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config).train()


def measure_plain_loop(model: str, devices: int, steps: int) -> Measured:
    """Measures Hugging Face's model and torch's optimizer in a loop as in torch_xla's guides."""
    use_virtual_tpu(devices)
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xla_runtime

    if devices > 1:
        xla_runtime.use_spmd()
    device = torch_xla.device()
    spec = (
        spmd.ShardingSpec(spmd.Mesh(np.arange(devices), (devices,), ("data",)), ("data", None)) if devices > 1 else None
    )
    network = plain_network(model).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)

    def start(_number: int) -> Callable[[], Any]:
        inputs = {
            name: xm.send_cpu_data_to_device([ids], device, input_sharding=spec)[0]
            for name in ("input_ids", "attention_mask", "labels")
        }
        optimizer.zero_grad()
        with torch.autocast("xla", dtype=torch.bfloat16):
            loss = network(**inputs).loss
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.detach().cpu

    return Measured(*time_steps(start, steps), 3 * len(list(network.parameters())))


def measure_jax(buffers: int, devices: int, steps: int) -> Measured:
    """Measures a JAX function over small buffers, replicated over the devices, each changed in place."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(lambda values: [value + 1 for value in values], donate_argnums=0)
    state = [jax.device_put(np.zeros(32, np.float32), layout) for _ in range(buffers)]

    def start(_number: int) -> Callable[[], Any]:
        nonlocal state
        state = step(state)
        return lambda: jax.block_until_ready(state)

    return Measured(*time_steps(start, steps), buffers)


def measure(label: str, function: Callable[..., Measured], *arguments: Any) -> Measured:
    """Measures one case in a process of its own; prints it at once, because compiling takes long."""
    measured = run_in_process(function, *arguments)
    print(f"  {label}: {measured.milliseconds:.2f} ms of {measured.elapsed:.2f}", file=sys.stderr, flush=True)
    return measured


def compare(model: str, devices: int, steps: int) -> tuple[list[Row], float]:
    """Returns the rows of one model on this many devices, and our milliseconds."""
    name = f"{model}, {_count(devices)}"
    print(name, file=sys.stderr, flush=True)
    ours = measure("ours", measure_ours, model, devices, steps)
    jax = measure("JAX", measure_jax, ours.buffers, devices, steps)
    plain = measure("plain loop", measure_plain_loop, model, devices, max(3, steps // 4))
    tensors = f"JAX, {jax.buffers} donated buffers"
    return [
        row(name, "ms a step", ours.milliseconds, "plain loop", plain.milliseconds, f"ratio at most {1 / SHARE:g}"),
        row(name, "ms a step", ours.milliseconds, tensors, jax.milliseconds, f"ours at most {GOALS[model]:g}"),
        row(name, "ms a step, with waits for a core", ours.elapsed, tensors, jax.elapsed, "none"),
    ], ours.milliseconds


def _count(devices: int) -> str:
    return f"{devices} device{'s' if devices > 1 else ''}"


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (20)")
    parser.add_argument("--devices", type=int, action="append", choices=SLICES, help="1 or 8; both, unless given")
    parser.add_argument("--model", action="append", choices=GOALS, help="bert-base or bert-large; both, unless given")
    options = parser.parse_args()
    rows: list[Row] = []
    for devices in options.devices or SLICES:
        milliseconds = {}
        for model in options.model or GOALS:
            more, milliseconds[model] = compare(model, devices, options.steps)
            rows += more
        if len(milliseconds) == len(GOALS):
            large, base = milliseconds["bert-large"], milliseconds["bert-base"]
            name = f"bert-large beside bert-base, {_count(devices)}"
            rows.append(row(name, "ms a step", large, "ours, bert-base", base, f"ratio at most {GROWTH:g}"))
    finish("dispatch", rows, options.json)


if __name__ == "__main__":
    main()
