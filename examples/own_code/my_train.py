"""Your own training code on every host of a slice: plain torch_xla, and the variables that tpu-launch sets.

    tpu-launch run -f examples/own_code/run.yaml       # on a slice; --emulated for a rehearsal
    (cd examples/own_code && tpu-launch local -f run.yaml -- python my_train.py)       # on this machine's CPU

A linear model learns y = 3 x - 2. Each host reads its own rows; all hosts hold the same weights after each step. On TPU
one process a host drives all its chips (SPMD): the compiler sums the gradients. CPU hosts sum them with gloo.
"""

import os

from training.distributed.cluster import discover, tpu_environment  # installed in the image

WORKER = int(os.environ.get("TPU_WORKER_ID", "0"))
HOSTS = os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")  # addresses, in worker order
TPU = os.environ.get("PJRT_DEVICE") == "TPU"
if TPU:
    # The variables that libtpu reads about the slice; they must be set before torch_xla is imported.
    os.environ.update(tpu_environment(discover()))

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr

STEPS, ROWS = 60, 64  # rows of each host

if TPU:
    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    mesh = spmd.Mesh(np.arange(devices), (devices,), ("data",))
elif len(HOSTS) > 1:
    dist.init_process_group("gloo", init_method=f"tcp://{HOSTS[0]}:8491", rank=WORKER, world_size=len(HOSTS))


def send(rows: np.ndarray) -> torch.Tensor:
    """Returns this host's rows; on TPU as part of one array over the devices of all hosts."""
    if not TPU:
        return torch.from_numpy(rows).to(device)
    spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=len(HOSTS) > 1)
    return xm.send_cpu_data_to_device([torch.from_numpy(rows)], device, input_sharding=spec)[0]


device = torch_xla.device()
torch.manual_seed(0)  # the same weights everywhere
model = torch.nn.Linear(1, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = np.random.default_rng(WORKER)
for step in range(1, STEPS + 1):
    x = generator.uniform(-1, 1, (ROWS, 1)).astype(np.float32)
    loss = torch.nn.functional.mse_loss(model(send(x)), send(3 * x - 2))
    optimizer.zero_grad()
    loss.backward()
    if not TPU and len(HOSTS) > 1:
        for parameter in model.parameters():
            gradient = parameter.grad.cpu()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient / len(HOSTS))
    optimizer.step()
    torch_xla.sync()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
print(f"host {WORKER} of {len(HOSTS)}: y = {model.weight.item():.6f} x + {model.bias.item():.6f}", flush=True)
