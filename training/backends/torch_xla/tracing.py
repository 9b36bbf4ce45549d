"""Traces the backend's own step for a slice that is not there, for `tpu-train preflight`.

Nothing is executed: tensors stay uncomputed, and the program that would compute them is read. It uses private names of
torch_xla (`internals`), of the version that `training.preflight.compiler` names.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from training.accelerators import Accelerator
from training.backends.placement import bytes_on_device
from training.backends.protocol import BuildBackend
from training.backends.torch_xla import internals
from training.backends.torch_xla.backend import TorchXla
from training.batch import Arrays
from training.preflight.compiler import DataDependentProgram, Program, model_place, require_versions
from training.preflight.hlo import BACKWARD

_DATA_DEPENDENT_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class TorchTracer:
    """Traces one program for all devices of a slice, which the compiler partitions."""

    def __init__(self, open_backend: BuildBackend, slice_: Accelerator) -> None:
        """Makes torch_xla trace for the slice's devices, in this process from here on. Raises CompilerUnavailable."""
        require_versions(tracing=True)
        self._open_backend = open_backend
        self._backend: TorchXla | None = None
        internals.simulate_devices(slice_.devices)

    def open(self) -> dict[str, int]:
        """Builds the model unless it is built. Returns the bytes that each device holds of each of the state's tensors
        and packed buffers."""
        if self._backend is None:
            gc.collect()
            self._backend = self._open_backend(partial(TorchXla, only_traces=True))
        self._backend.upload()
        buffers, mesh = self._backend.state.buffers(), self._backend.sharding.mesh_shape
        return {name: bytes_on_device(name, tuple(value.shape), mesh) for name, value in buffers.items()}

    def trace(self, kind: str, batch: Arrays) -> Program:
        """Traces the step (`kind` is "training") or the evaluation for a global batch. Call `open` before each: a step
        leaves the state uncomputed, so its model is released. Raises DataDependentProgram."""
        backend, trains = self._backend, kind == "training"
        assert backend is not None
        if trains:
            self._backend = None
        state, sharding = backend.state, backend.sharding
        buffers = state.buffers()
        names = dict(zip(internals.handles(list(buffers.values())), buffers, strict=True))
        assert len(names) == len(buffers), "each buffer has a handle of its own"
        shardings = {name: sharding.describe(name, tuple(value.shape)) for name, value in buffers.items()}

        def declare(tensor: Any) -> None:
            """Declares the placement of a placeholder that a traced operation has just changed for the first time."""
            if name := state.undeclared.pop(id(tensor), None):
                sharding.declare_state({name: tensor})

        with record_module_names(state.network), DataDependenceGuard(), MutationWatcher(declare):
            outputs = [backend.trace(kind, batch)]
            if trains:
                buffers = state.buffers()
                made = internals.order_outputs({handle: buffers[name] for handle, name in names.items()}, outputs[0])
                outputs = [*made.values(), *outputs]
            return replace(extract_program(outputs, names, shardings), hash=backend.hash_program(outputs))

    def close(self) -> None:
        """Releases the model and its memory; `open` builds it again."""
        self._backend = None
        gc.collect()


@contextmanager
def record_module_names(network: Any) -> Iterator[None]:
    """Gives operations that are traced in this block the name of their module in the network; those of the backward
    pass get that of the module whose gradient they compute. The names are metadata and change nothing else."""
    names = {id(module): name for name, module in network.named_modules()}
    scopes: list[Any] = []
    nodes: list[Any] = []  # of the backward graph, kept alive so that their ids are not used again
    backward_scope: list[Any] = []  # of the gradient under way, at most one

    def enter(module: Any, _arguments: Any) -> None:
        scopes.append(internals.push_scope(names.get(id(module), type(module).__name__)))

    def leave(module: Any, _arguments: Any, outputs: Any) -> None:
        """Ends the module's name; in the backward pass, the gradient of a tensor that it returned begins it again."""
        scopes.pop()
        node = getattr(outputs, "grad_fn", None)
        if node is None or any(node is known for known in nodes[-8:]):  # an outer module returns the inner one's result
            return
        nodes.append(node)

        def begin_gradient(_gradients: Any) -> None:
            """Names what is traced from here on, until another gradient begins."""
            backward_scope.clear()
            backward_scope.append(internals.push_scope(BACKWARD + names.get(id(module), "")))

        node.register_prehook(begin_gradient)

    hooks = [
        torch_modules.register_module_forward_pre_hook(enter),
        torch_modules.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with internals.operation_metadata():
            yield
    finally:
        backward_scope.clear()
        for hook in hooks:
            hook.remove()


class MutationWatcher(TorchFunctionMode):  # type: ignore[misc]  # torch is not here when types are checked
    """Calls a function in this block with each tensor that an operation has changed in place. (A dispatch mode would
    see other objects than the state's.)"""

    def __init__(self, see: Callable[[Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Runs a function and returns its result; if its name ends in one "_", passes its first argument to `see`."""
        result = function(*arguments, **(options or {}))
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            self._see(arguments[0])
        return result


class DataDependenceGuard(TorchDispatchMode):  # type: ignore[misc]
    """Raises DataDependentProgram in its block for an operation whose shape, or result in Python, depends on data."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Runs an operation. Raises DataDependentProgram, with its line of Python, if it depends on data."""
        if _depends_on_data(function, arguments):
            place = model_place(traceback.extract_stack())
            raise DataDependentProgram(
                f"{function} depends on the values of a tensor, not on its shape alone: a TPU would stop there every "
                f"step, and compile again whenever the values give another shape{place}; use torch.where or a mask of "
                "a fixed shape instead"
            )
        return function(*arguments, **(options or {}))


def _depends_on_data(function: Any, arguments: Any) -> bool:
    """Returns whether an operation on these arguments reads a tensor's values, as for a result's shape, on the host."""
    if not _DATA_DEPENDENT_TAGS & set(function.tags):
        return False
    if function is torch.ops.aten.index.Tensor:  # with a mask; with numbers its shape is known
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in arguments)


def extract_program(
    outputs: Sequence[Any], state: Mapping[int, str], shardings: Mapping[str, str] = MappingProxyType({})
) -> Program:
    """Returns the program that a `torch_xla.sync()` would run to compute `outputs`, without its hash. `state` names
    the tensors that the program may overwrite, by their handles before it was traced; `shardings`: their placements by
    name, which the program of placeholders lacks."""
    from jaxlib import xla_client

    outputs = list(outputs)
    handles = internals.handles(internals.arguments_of(outputs))
    arguments = {number: state[handle] for number, handle in enumerate(handles) if handle in state}
    computation = xla_client.XlaComputation(internals.program_proto(outputs))
    text: str = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    placed = {number: shardings[name] for number, name in arguments.items() if name in shardings}
    return Program(text, frozenset(arguments), arguments, shardings=placed)
