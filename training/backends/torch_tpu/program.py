"""Compiles a step into one program: forward, backward, the sum over all processes, clipping and the optimizer's update.

A step is traced once for each shape of its batch, as a pure function of the state, of constants (the network's buffers
and dropout's table) and of the step's inputs. torch_tpu compiles it, and the program runs on the newest tensors of the
state, whose memory it reuses for the updated ones. All other Python values that the network reads become constants of
the program, as they were when it was traced.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

from training.backends.torch.state import HostState
from training.backends.torch.step import StepInputs
from training.backends.torch_tpu import internals
from training.models.torch.move import move

Trace = Callable[[StepInputs[Tensor]], Tensor]  # records the operations of a step, and returns its report
Shapes = tuple[tuple[int, ...], ...]  # of a step's inputs


class DeviceState:
    """The state of a run, on the device after `upload`. The tensors of the network are then stale: `tensors` has the
    newest ones."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self.tensors = host.tensors()
        self._trained = {f"model/{name}" for name in host.trained}
        self.changed = [name for name in self.tensors if name in self._trained or not name.startswith("model/")]

    def upload(self, device: Any) -> None:
        """Moves the state to the device; later calls do nothing."""
        host = self._host
        if host.is_uploaded:
            return
        move(host.network, device)
        host.name_parameters()
        host.optimizer.move_state(lambda value: value.to(device))
        if host.noise:
            host.noise.table = host.noise.table.to(device)
        self.tensors = {name: value.detach() for name, value in host.tensors().items()}
        self._buffers = dict(host.network.named_buffers())
        host.is_uploaded = True

    def leaves(self) -> list[Tensor]:
        """Returns the first arguments of every program: the state's tensors, the buffers, and dropout's table."""
        table = [self._host.noise.table] if self._host.noise else []
        return [*self.tensors.values(), *self._buffers.values(), *table]

    @contextmanager
    def replaced(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Makes network, optimizer and dropout use `leaves`, in the order of `leaves()`, within the block."""
        host, values = self._host, iter(leaves)
        own = host.tensors()
        new = {name: next(values).detach().requires_grad_(name in self._trained) for name in own}
        model = {name: new[f"model/{name}"] for name in host.parameters}
        model |= {name: next(values) for name in self._buffers}
        with stateless._reparametrize_module(host.network, model, tie_weights=True):
            host.name_parameters()
            _replace_moments(host, own, new)
            if host.noise:
                table, host.noise.table = host.noise.table, next(values)
            try:
                yield
            finally:
                _replace_moments(host, new, own)
                if host.noise:
                    host.noise.table = table
        host.name_parameters()


class StepProgram:
    """One kind of step, compiled for each shape of its inputs."""

    def __init__(self, state: DeviceState, host: HostState, trace: Trace, *, changes: bool) -> None:
        """Compiles nothing yet. `trace`: records the step; `changes`: whether the step changes the state."""
        self._state, self._host, self._trace = state, host, trace
        self._changed = state.changed if changes else []
        self._compiled: dict[Shapes, Callable[..., Sequence[Tensor]]] = {}
        self.seconds = 0.0  # of all compilations

    @property
    def count(self) -> int:
        """Returns how many programs were compiled."""
        return len(self._compiled)

    def run(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Starts a step, compiled first for new shapes, keeps its new state, and returns its report without waiting."""
        arguments = [*self._state.leaves(), *inputs.leaves()]
        shapes = tuple(tuple(value.shape) for value in inputs.leaves())
        if shapes not in self._compiled:
            began = time.monotonic()
            self._compiled[shapes] = self._compile(arguments, inputs)
            self.seconds += time.monotonic() - began
        *values, report = self._compiled[shapes](arguments)
        self._state.tensors.update(zip(self._changed, values, strict=True))
        return report

    def _compile(self, arguments: Sequence[Tensor], inputs: StepInputs[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """Returns the compiled program: arguments -> the changed tensors of the state (in its memory) and report."""
        first = len(arguments) - len(inputs.leaves())

        def step(*leaves: Tensor) -> list[Tensor]:
            with self._state.replaced(leaves[:first]):
                report = self._trace(inputs.with_leaves(leaves[first:]))
                tensors = self._host.tensors()
                return [*(tensors[name].detach() for name in self._changed), report]

        graph = make_fx(step, {torch.ops.aten.cumsum.default: _cumsum}, tracing_mode="fake")(*arguments)
        names = list(self._state.tensors)
        return internals.compile_graph(graph, arguments, [names.index(name) for name in self._changed])


def _cumsum(values: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Returns the cumulative sum along the last axis, as masked sums over all values; NotImplemented for other axes.
    torch_tpu's own aborts the compiler behind a virtual TPU. transformers finds borders of documents with it."""
    if dim not in (-1, values.ndim - 1):
        return NotImplemented
    place = torch.arange(values.shape[-1], device=values.device)
    return torch.where(place <= place.unsqueeze(-1), values.unsqueeze(-2), 0).sum(-1, dtype=dtype)


def _replace_moments(host: HostState, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Replaces each tensor of the optimizer in `old` by that of the same name in `new`."""
    names = {id(value): name for name, value in old.items()}
    host.optimizer.move_state(lambda value: new[names[id(value)]])
