"""The processes of all chips, and the part of the state that each holds; tries the chips.

With `train.mesh.fsdp`, a process holds a slice of each layer's matrix and of its moments, as
`training.backends.placement` says. A layer gathers its whole matrix in the forward pass and again in the backward pass;
its process receives the summed gradient of its slice."""

import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from training.backends import placement
from training.backends.placement import FSDP, mesh_shape, place
from training.backends.torch.step import HostArray, rows_of, sum_of_squares
from training.backends.torch_tpu import internals
from training.checkpoint.tensors import HeldSlice, Slice, whole
from training.config import mesh_mistake
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import raise_lost_peer
from training.distributed.torch_tpu import trainer_environment
from training.errors import BadInput, UnusableTpu
from training.models.torch.attention import recompute

_ROWS, _INNER, _COLUMNS = 128, 256, 128
_SECONDS = 60.0


class Chip:
    """This process's device, and the groups of processes that it is in."""

    is_spmd, local_devices = False, 1

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous, seconds: float, fsdp: int = 1) -> None:
        """Opens the device and connects all processes, which must all call it. A sum takes at most `seconds`. The state
        is split over `fsdp` processes. Raises BadInput in a process that has not TorchTPU's variables, or if `fsdp`
        does not divide the processes; and UnusableTpu."""
        trainer_environment(cluster, os.environ)
        # torch_tpu reads `.grad` of every operation's inputs, and warns of its own variables.
        warnings.filterwarnings("ignore", r"The \.grad attribute|<TorchTpu")
        torch.set_float32_matmul_precision("highest")  # products of fp32; products of bf16 stay as they are
        self._rendezvous = rendezvous
        try:
            internals.open_device()
            self.device = torch.device(internals.DEVICE)
            rendezvous.set_phase("connecting the processes")
            if not dist.is_initialized():  # preflight has connected absent ones
                dist.init_process_group(internals.PROCESS_GROUP, timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            raise UnusableTpu(str(error), cluster.accelerator_type) from None
        self.devices: int = dist.get_world_size()
        if mistake := mesh_mistake(fsdp, self.devices):
            raise BadInput(mistake)
        self.mesh_shape = mesh_shape(self.devices, fsdp)
        self._split: frozenset[str] = frozenset()  # names of parameters
        if fsdp > 1:
            names, sizes = zip(*self.mesh_shape.items(), strict=True)
            mesh = dist.init_device_mesh(internals.DEVICE, sizes, mesh_dim_names=names)
            self._copies, self._sharers = mesh.get_all_groups()

    def send(self, arrays: list[HostArray]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(value.array)).to(self.device) for value in arrays]

    def sum(self, value: Tensor) -> Tensor:
        """Records the sum of a tensor over all processes, which must all call it. Returns a new tensor."""
        return functional.all_reduce(value, "sum", dist.group.WORLD)

    def read(self, report: Tensor) -> list[float]:
        """Waits for a report and returns its numbers. Raises LostPeer, or StopRequested after a stop, if the sum over
        all processes fails; waits then for the rendezvous to name the lost host. Out of memory raises RuntimeError."""
        try:
            return report.cpu().tolist()
        except RuntimeError as error:
            raise_lost_peer(self._rendezvous, "adding up gradients", error)

    def set_seed(self, seed: int) -> None:
        """Does nothing: a program starts with the generator's state, which `TorchTpu.step` sets before."""

    def replicate_report(self, report: Tensor) -> Tensor:
        return report

    # --- a split state

    def split_matrices(self, network: Any) -> dict[str, tuple[int, ...]]:
        """Keeps this process's slice (`own_slice`) of each layer's matrix (`weight`) that is split, and makes the layer
        gather the matrix when called, and again in its backward pass. Returns name -> shape of the whole matrix."""
        matrices = set()
        for module in network.modules():
            weight = module._parameters.get("weight")
            if weight is not None and (axes := place("model/", tuple(weight.shape), self.mesh_shape)) and any(axes):
                matrices.add(id(weight))
                module.forward = partial(self._call, module, module.forward, axes.index(FSDP))
        split = {name: value for name, value in network.named_parameters() if id(value) in matrices}
        self._split, shapes = frozenset(split), {name: tuple(value.shape) for name, value in split.items()}
        for name, value in split.items():
            box = self.own_slice(f"model/{name}", shapes[name])
            value.data = value.data[tuple(map(slice, box.offsets, box.ends))].clone()  # the rest is free
        return shapes

    def slices(self, name: str, shape: tuple[int, ...]) -> list[HeldSlice]:
        """Returns the slices of the state's tensor `name`, of whole `shape`; [] if every process holds all of it."""
        is_split = name.partition("/")[2] in self._split
        return placement.slices(name, shape, self.mesh_shape, self.devices) if is_split else []

    def own_slice(self, name: str, shape: tuple[int, ...]) -> Slice:
        """Returns the slice that this process holds of a tensor of the state; all of it if it is not split."""
        held = [each.box for each in self.slices(name, shape) if dist.get_rank() in each.hosts]
        return held[0] if held else whole(shape)

    def add_up(self, gradients: Mapping[str, Tensor], report: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Records the sums of gradients, by parameter, and of a report over all processes; a slice's gradient over
        those that hold it. Returns both, and the sum of all gradients' squares, or None if no matrix is split."""
        split = {name: value for name, value in gradients.items() if name in self._split}
        rest = {name: value for name, value in gradients.items() if name not in self._split}
        *sums, report = _sum([*rest.values(), report], dist.group.WORLD)
        if not split:
            return sums, report, None
        parts = _sum(list(split.values()), self._copies)
        squares = functional.all_reduce(sum_of_squares(parts), "sum", self._sharers)
        squares = squares + sum_of_squares(sums) if sums else squares
        named = dict(zip((*split, *rest), (*parts, *sums), strict=True))
        return [named[name] for name in gradients], report, squares

    def _call(self, module: Any, forward: Callable[[Tensor], Tensor], axis: int, values: Tensor) -> Tensor:
        """Calls a layer's `forward` with the whole matrix, gathered along `axis`, in place of this process's slice, and
        lets the backward pass gather and compute again."""

        def call(values: Tensor, part: Tensor) -> Tensor:
            """Returns the layer's result for the whole matrix, gathered from each process's `part`."""
            own = module.weight  # `part` is a copy in a backward pass
            module._parameters["weight"] = _Gather.apply(part, axis, self._sharers)
            try:
                return forward(values)
            finally:
                module._parameters["weight"] = own

        others = [value for value in module.parameters() if value is not module.weight and value.requires_grad]
        return recompute(call, (values, module.weight), internals.barrier, others)


def _sum(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Records one all-reduce of the tensors, joined in a vector, over a group of processes; returns their sums."""
    flat = functional.all_reduce(torch.cat([value.reshape(-1) for value in tensors]), "sum", group)
    parts = flat.split([value.numel() for value in tensors])
    return [part.view_as(value) for part, value in zip(parts, tensors, strict=True)]


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is not here when types are checked
    """Joins the slices of a group of processes along an axis; the gradient of each is summed over them."""

    @staticmethod
    def forward(context: Any, part: Tensor, axis: int, group: Any) -> Tensor:
        context.axis, context.group = axis, group
        return functional.all_gather_tensor(part, axis, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return functional.reduce_scatter_tensor(gradient, "sum", context.axis, context.group), None, None


class TorchTpuDevices:
    """Tries one process's chip, behind the protocol of `training.device_check.Devices`; the figures are those of all
    processes."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens this process's chip and connects all processes: all call it. Raises BadInput, UnusableTpu."""
        self._chip = Chip(cluster, rendezvous, _SECONDS)
        self.local, self.total = int(os.environ["LOCAL_WORLD_SIZE"]), self._chip.devices

    def memory_bytes(self) -> int | None:
        return None  # no documented call of torch_tpu tells it

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products, added up over all chips; all processes call it.
        Raises as `Chip.read`."""
        # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
        random = np.random.default_rng(0)
        shapes = ((_ROWS, _INNER), (_INNER, _COLUMNS))
        left, right = (random.integers(-1, 2, shape).astype(np.float32) for shape in shapes)
        first, second, product = self._chip.send([rows_of(array) for array in (left, right, left @ right)])
        wrong = (first.to(torch.bfloat16) @ second.to(torch.bfloat16)).to(torch.float32) != product
        return int(self._add_up(wrong.to(torch.float32).sum()))

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each chip; all processes call it. Raises as `Chip.read`."""
        return self._add_up(torch.ones((), device=self._chip.device))

    def _add_up(self, value: torch.Tensor) -> float:
        """Returns the sum of a number over all processes, which all call it. Raises as `Chip.read`."""
        [total] = self._chip.read(self._chip.sum(value.reshape(1)))
        return total
