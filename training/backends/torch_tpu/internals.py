"""All internal names of torch_tpu that this program uses; training/distributed/torch_tpu.py has its variables.

torch_tpu is beta: another version than `training.distributed.torch_tpu.VERSION` may have others.
"""

from __future__ import annotations

DEVICE = "tpu"  # torch's name of the device
PROCESS_GROUP = "tpu_dist"  # torch.distributed's name of the processes of all chips


def open_device() -> None:
    """Opens this process's chip as torch's device `tpu`.

    `import torch` opens it by itself only where torch_tpu finds the chips in /dev/vfio: neither on v4, whose driver has
    /dev/accel*, nor on a virtual TPU. This does what that import would do, and nothing when it has done it.
    """
    import torch_tpu._loader

    torch_tpu._loader._init_device(DEVICE)
