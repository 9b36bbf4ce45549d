"""Measures the host time of a training step with TorchTPU, on a virtual TPU of one device, as `dispatch.py` does.

  make benchmark NAME=dispatch ARGS="--backend torch-tpu [--model bert-base --json]"

ours          `step` of the trainer's backend torch-tpu: one compiled program
torch-xla     the same of the backend torch-xla: the last result of `make benchmark NAME=dispatch` here
eager loop    the unmodified BertForMaskedLM, bf16 autocast and torch.optim.AdamW, operation by operation
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dispatch import (
    GOALS,
    LENGTH,
    ROWS,
    SLICES,
    Measured,
    measure,
    measure_backend,
    plain_network,
    time_steps,
)
from benchmarks.peers.rows import finish, row

RUNS_IN = "torch-tpu"
VIRTUAL_TPU = True
MOST = 2.0  # times torch-xla's


def use_virtual_tpu() -> Any:
    """Lets torch_tpu, imported afterwards, open one device. Returns the host of that slice."""
    from training.distributed.cluster import Cluster
    from training.distributed.torch_tpu import rank_environments

    cluster = Cluster(0, ("localhost",), SLICES[1])
    os.environ |= {**rank_environments(cluster)[0], "PJRT_DEVICE": "TPU"}
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiling takes longer than all steps
    return cluster


def measure_ours(model: str, steps: int) -> Measured:
    """Measures the trainer's backend."""
    cluster = use_virtual_tpu()
    from training.backends.torch_tpu.backend import TorchTpu

    return measure_backend(TorchTpu, cluster, model, steps)


def measure_eager_loop(model: str, steps: int) -> Measured:
    """Measures Hugging Face's model and torch's optimizer without torch.compile."""
    use_virtual_tpu()
    import torch

    from training.backends.torch_tpu import internals

    internals.open_device()
    network = plain_network(model).to(internals.DEVICE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)

    def start(_number: int) -> Callable[[], Any]:
        inputs = {name: ids.to(internals.DEVICE) for name in ("input_ids", "attention_mask", "labels")}
        optimizer.zero_grad()
        loss = network(**inputs).loss
        loss.backward()
        optimizer.step()
        return loss.detach().cpu

    return Measured(*time_steps(start, steps), 3 * len(list(network.parameters())))


def of_torch_xla(model: str) -> float | None:
    """Returns the milliseconds of torch-xla's step on one device in the last result of `dispatch`; None without one."""
    path = Path(os.environ["TPU_LAUNCH_HOME"]) / "benchmarks" / "dispatch.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    name, unit = f"{model}, 1 device", "ms a step"
    return next((each["ours"] for each in rows if each["name"] == name and each["unit"] == unit), None)


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (20)")
    parser.add_argument("--model", action="append", choices=GOALS, help="bert-base or bert-large; both, unless given")
    options = parser.parse_args()
    rows = []
    for model in options.model or GOALS:
        name = f"{model}, 1 device"
        ours = measure("ours", measure_ours, model, options.steps)
        eager = measure("eager loop", measure_eager_loop, model, max(3, options.steps // 4))
        goal = f"ratio at most {MOST:g}"
        rows += [
            row(name, "ms a step", ours.milliseconds, "torch-xla", of_torch_xla(model), goal),
            row(name, "ms a step", ours.milliseconds, "eager loop", eager.milliseconds, "none"),
        ]
    finish("dispatch_torch_tpu", rows, options.json)


if __name__ == "__main__":
    main()
