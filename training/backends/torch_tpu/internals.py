"""All internal names of torch_tpu that this program uses; training/distributed/torch_tpu.py has its variables.

torch_tpu is beta: another version than `training.distributed.torch_tpu.VERSION` may have others.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from training.accelerators import Accelerator

DEVICE = "tpu"  # torch's name of the device
PROCESS_GROUP = "tpu_dist"  # torch.distributed's name of the processes of all chips


def open_device() -> None:
    """Opens this process's chip as torch's device `tpu`.

    `import torch` opens it by itself only where torch_tpu finds the chips in /dev/vfio: neither on v4, whose driver has
    /dev/accel*, nor on a virtual TPU. This does what that import would do, and nothing when it has done it."""
    import torch_tpu._loader

    torch_tpu._loader._init_device(DEVICE)


def barrier(tensors: list[Any]) -> None:
    """Replaces the list's tensors by equal ones, across which the compiler moves no operation."""
    from torch_tpu._internal.ops import ops

    tensors[:] = ops.optimization_barrier(tensors)


def compile_graph(graph: Any, arguments: Sequence[Any], donated: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """Compiles a graph of torch.fx, whose operations are those of torch_tpu's eager mode, into one program.

    Args:
        graph: a torch.fx.GraphModule.
        arguments: tensors with the shapes and types of its arguments.
        donated: places of the arguments whose memory the outputs may take.
    """
    from torch_tpu._internal.compile import compiler

    return compiler.StaticCompiler()(graph, list(arguments), donated_inputs=list(donated))


def store_of_absent_ranks(slice_: Accelerator) -> Any:
    """Returns a store of torch.distributed in which all ranks but 0 have told the place of their chip, so that rank 0
    waits for none. Each tells its number, process, coordinates and core, no slice, and the chip's name."""
    import torch.distributed as dist

    store, ranks = dist.HashStore(), slice_.devices
    places = [place[::-1] for place in product(*(range(size) for size in (*slice_.topology, 1)[:3][::-1]))]
    for rank, (x, y, z) in enumerate(places[1:], 1):
        key = f"world_topo:{rank}"
        told = f"{len(key)}:{key}{rank},{rank},{x},{y},{z},0,-1,TPU {slice_.generation.name}"
        store.set(f"0//tpu//nlag:world_topo:0:{ranks}:node:{rank - 1}", f"{len(told)}:{told}")
    store.add(f"0//tpu//nlag:world_topo:0:{ranks}:count", ranks - 1)
    return store
