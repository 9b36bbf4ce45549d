"""Trains a decoder over all chips of a slice, with DistributedDataParallel or FSDP2. It imports nothing of tpu-launch.

tpu-train exec --runtime torch-tpu train.py --steps 20
tpu-train exec --runtime torch-tpu train.py --fsdp      # weights, gradients and optimizer state sharded over all chips
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from decoder import Decoder, make_batch
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="of the global batch")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 (fully_shard) instead of DistributedDataParallel")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group("tpu_dist")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(rank * arguments.rows // world, (rank + 1) * arguments.rows // world)
    model = Decoder().to("tpu")
    if arguments.fsdp:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        loss = model(make_batch(step, arguments.rows)[own].to("tpu"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / world:.9g}", flush=True)
    stored = sum(getattr(weight, "to_local", lambda weight=weight: weight)().numel() for weight in model.parameters())
    print(f"process {rank} of {world} stores {stored} numbers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
