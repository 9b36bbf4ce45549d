"""Traces programs with torch_xla for a slice that is not there: for `tpu-train preflight`.

It uses torch_xla's private module `_XLAC`, with the version that `training.preflight.compiler` names. Nothing is
executed: tensors stay uncomputed, and the program that would compute them is read.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla.runtime
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch_xla import _XLAC

from training.preflight.compiler import (
    COMPILER_VERSIONS,
    TRACING_VERSIONS,
    DataDependentProgram,
    Program,
    hash_hlo,
    require_versions,
)
from training.preflight.hlo import BACKWARD

_DATA_DEPENDENT_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def buffer_names(state: Mapping[str, Any]) -> dict[int, str]:
    """Handle -> name of the device buffers of tensors whose values are on the device. Call it before a program that
    changes them is traced.

    A buffer stays the same whichever program reads it. A tensor's number, by which torch_xla itself finds donors, does
    not: an evaluation that was traced before leaves other numbers in the arguments.
    """
    names = {}
    for name, tensor in state.items():
        # A tensor that was moved, and not computed yet, has no buffer of its own: the one that it comes from counts.
        _, values = _XLAC._get_tensors_xla_device_data_node([tensor])
        if len(values) == 1:
            names[_XLAC._get_tensors_handle(values)[0]] = name
    return names


def simulate_devices(count: int) -> None:
    """From here on, torch_xla traces programs for `count` devices in this process, which has one CPU device.

    Only the first part of each array is ever kept. The programs are those of a process that has the devices, but they
    can't be run here.
    """
    torch_xla.runtime.use_spmd()
    torch_xla.runtime.global_runtime_device_count = lambda: count


@contextmanager
def record_module_names(network: Any) -> Iterator[None]:
    """Operations that are traced in this block carry the name of the network's module that they belong to; those of
    the backward pass, of the module whose gradient they compute. The names are metadata of the program, and change
    nothing else."""
    names = {id(module): name for name, module in network.named_modules()}
    scopes: list[Any] = []
    nodes: list[Any] = []  # of the backward graph, kept alive so that their ids are not used again
    backward_scope: list[Any] = []  # of the gradient under way, at most one

    def enter(module: Any, _arguments: Any) -> None:
        scopes.append(_XLAC.profiler.scope_pusher(names.get(id(module), type(module).__name__)))

    def leave(module: Any, _arguments: Any, outputs: Any) -> None:
        scopes.pop()
        node = getattr(outputs, "grad_fn", None)
        if node is None or any(node is known for known in nodes[-8:]):  # an outer module returns the inner one's result
            return
        nodes.append(node)

        def begin_gradient(_gradients: Any) -> None:
            backward_scope.clear()
            backward_scope.append(_XLAC.profiler.scope_pusher(BACKWARD + names.get(id(module), "")))

        node.register_prehook(begin_gradient)

    debug_before = _XLAC._get_ir_debug()
    _XLAC._set_ir_debug(True)
    hooks = [
        torch_modules.register_module_forward_pre_hook(enter),
        torch_modules.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        backward_scope.clear()
        for hook in hooks:
            hook.remove()
        _XLAC._set_ir_debug(debug_before)


@contextmanager
def forbid_data_dependence() -> Iterator[None]:
    """Raises DataDependentProgram in this block for the first operation whose shape, or whose result in Python, depends
    on data."""
    with _DataDependenceGuard():
        yield


class _DataDependenceGuard(TorchDispatchMode):  # type: ignore[misc]  # torch is not here when types are checked
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if _depends_on_data(function, arguments):
            raise DataDependentProgram(
                f"{function} depends on the values of a tensor, not on its shape alone: a TPU would stop there every "
                f"step, and compile again whenever the values give another shape{_model_place()}; use torch.where or a "
                "mask of a fixed shape instead"
            )
        return function(*arguments, **(options or {}))


def _depends_on_data(function: Any, arguments: Any) -> bool:
    if not _DATA_DEPENDENT_TAGS & set(function.tags):
        return False
    if function is torch.ops.aten.index.Tensor:  # with a mask; with numbers its shape is known
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in arguments)


def _model_place() -> str:
    """The innermost place in the model's code, outside torch."""
    for frame in reversed(traceback.extract_stack()):
        if "site-packages/torch" not in frame.filename and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


def extract_program(outputs: Sequence[Any], state: Mapping[int, str]) -> Program:
    """The program that a `torch_xla.sync()` would run to compute `outputs`; it is not run.

    Args:
        outputs: tensors on the device.
        state: of `buffer_names`: tensors that the program may overwrite.

    Raises:
        CompilerUnavailable: jaxlib is not here, or another version.
    """
    require_versions({**COMPILER_VERSIONS, **TRACING_VERSIONS})
    from jaxlib import xla_client

    outputs = list(outputs)
    _, values = _XLAC._get_tensors_xla_device_data_node(outputs)  # in the order of the arguments
    handles = _XLAC._get_tensors_handle(values)
    arguments = {number: state[handle] for number, handle in enumerate(handles) if handle in state}
    computation = xla_client.XlaComputation(_XLAC._get_xla_tensors_hlo_proto(outputs))
    text: str = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    return Program(text, frozenset(arguments), arguments, hash_program(outputs))


def hash_program(outputs: Sequence[Any]) -> str:
    """The hash of the program that a `torch_xla.sync()` would run for these tensors."""
    return hash_hlo(_XLAC._get_xla_tensors_hlo(list(outputs)))
