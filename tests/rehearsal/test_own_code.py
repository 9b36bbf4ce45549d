"""A user's own program on a virtual TPU, without a variable. Starts a slice; half a minute."""

import pytest

from tests.nightly import others_at_night
from tests.rehearsal.workstation import Workstation
from training.accelerators import Api, accelerator

pytestmark = pytest.mark.alone

FILE = """\
project: p
zone: ZONE
slice: {name: sharded, accelerator_type: TYPE}
image: {code: sharded}
run: {command: [python, train.py]}
"""
# As pytorch/xla's published examples: https://github.com/pytorch/xla/blob/v2.9.0/examples/fsdp/train_decoder_only_fsdp_v2.py
PROGRAM = """
import numpy as np, torch, torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla import runtime as xr
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2
xr.use_spmd()
devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices, 1), ("fsdp", "model"))
xs.set_global_mesh(mesh)
torch.manual_seed(0)
rows = torch.randn(16, 64).to(torch_xla.device())
xs.mark_sharding(rows, mesh, ("fsdp", None))
model = FSDPv2(torch.nn.Linear(64, 64).to(torch_xla.device()))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.item())
print(f"{xr.device_type()} of {devices} devices: {losses[-1] < losses[0]}")
"""


@pytest.mark.parametrize("kind", others_at_night(("v3-8", "v4-8"), ("v3-8",)))
def test_a_program_that_sets_no_variable_finds_its_tpu(emulator: Workstation, kind: str) -> None:
    (emulator.folder / "sharded").mkdir(exist_ok=True)
    emulator.file("sharded/train.py", PROGRAM)
    zone = accelerator(kind).zones(Api.CLOUD_TPU)[0]
    with emulator.slice_of(emulator.file("sharded.yaml", FILE.replace("ZONE", zone).replace("TYPE", kind))) as made:
        made.on_slice("run").require(0, f"TPU of {accelerator(kind).devices} devices: True")
