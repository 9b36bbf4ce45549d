"""Watches the operations of a step on an XLA device, each with its line of Python: for `tpu-train check`.

A dispatch mode sees every operation, forward and backward, before torch_xla records it. PyTorch itself marks those
whose result's shape or value depends on data (`torch.Tag`); torch_xla's counters give the operations that ran on the
host, the transfers and the compilations. Nothing here may keep a tensor: a tensor that is alive at a sync is computed,
and that would be another program.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from training.backends.torch_xla.backend import COMPILATIONS, TRANSFERS, count_fallbacks, read_counts
from training.errors import BadInput
from training.lint import HOST, SHAPE, VALUE, LintFinding, StepChecker, StepTrace, TracedOperation

_NOT_USER_CODE = (*(f"{Path(module.__file__).parent}{os.sep}" for module in (torch, torch_xla)), __file__, "<")
# Views that autograd and in-place updates make: no work, and not the same in each step.
_BOOKKEEPING = ("detach", "detach_copy", "_propagate_xla_data", "alias", "alias_copy", "t_copy", "view_copy")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_PROGRAM_ENDS = "the program ends here and waits for the device"


@contextmanager
def _watch_step() -> Iterator[StepTrace]:
    """Records the operations of the step that runs in the block, and their findings; slowly: with anomaly detection, on
    one autograd thread. The trace is complete when the block has ended: compilations and transfers are counted then."""
    torch_xla.sync()
    trace, before = StepTrace(), read_counts()
    with (
        warnings.catch_warnings(),
        _PrintWatcher(trace),
        _OperationWatcher(trace),
        torch.autograd.set_multithreading_enabled(False),
    ):
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        # Anomaly detection keeps the forward line of each backward operation.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            yield trace
    torch_xla.sync(wait=True)
    counted = read_counts() - before
    trace.compilations, trace.transfers = counted[COMPILATIONS], counted[TRANSFERS]


class _OperationWatcher(TorchDispatchMode):  # type: ignore[misc]  # torch is not here when types are checked
    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation. Adds it and the rule that it breaks to the trace if it reads a tensor on an XLA device."""
        keywords, short = dict(kwargs or {}), function._schema.name.removeprefix("aten::")
        values = [*_flatten(args), *_flatten(keywords)]
        if not any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in values):
            return function(*args, **keywords)
        place = _user_place()
        if short not in _BOOKKEEPING:
            self._trace.operations.append(TracedOperation(short, _format_operands(values), place))
        finding = _check_operation(function, short, args, keywords, place)
        fallbacks_before = None if finding else count_fallbacks()
        result = function(*args, **keywords)
        if fallbacks_before is not None and count_fallbacks() != fallbacks_before:
            message = f"{short} has no XLA form and runs on the host: both wait for each other in each step"
            finding = LintFinding(HOST, place, message)
        if finding:
            self._trace.findings.append(finding)
        return result


class _PrintWatcher(TorchFunctionMode):  # type: ignore[misc]
    """Finds printed tensors: the dispatch mode does not, because printing switches it off."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function; adds a finding to the trace if it prints a tensor on an XLA device."""
        if function is torch.Tensor.__repr__ and args[0].device.type == "xla":
            message = f"a tensor is printed: {_PROGRAM_ENDS}; print what a step returns, after it"
            self._trace.findings.append(LintFinding(VALUE, _user_place(), message))
        return function(*args, **(kwargs or {}))


def _check_operation(
    function: Any, short: str, args: Sequence[Any], keywords: Mapping[str, Any], place: str
) -> LintFinding | None:
    """Returns a finding if the operation named `short`, which has not run yet, breaks a rule; otherwise None. It breaks
    VALUE if it reads a tensor's value or copies a tensor to the host, SHAPE if its result's shape depends on values."""
    if torch.Tag.data_dependent_output in function.tags:
        asked = "a tensor's value is asked for (if, while, int(), .item(), range(), a slice up to a tensor)"
        cause = asked if short == "_local_scalar_dense" else short
        return LintFinding(VALUE, place, f"{cause}: {_PROGRAM_ENDS}; use torch.where, or masks")
    target = keywords.get("device")
    copied_out = short == "_to_copy" and target is not None and torch.device(target).type == "cpu"
    if copied_out or (short == "copy_" and args[0].device.type == "cpu"):
        message = f"a tensor is copied to the host (.cpu(), .numpy(), .tolist()): {_PROGRAM_ENDS}"
        return LintFinding(VALUE, place, message)
    by_mask = short in _INDEXING and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in _flatten(args[1])
    )
    if by_mask or (torch.Tag.dynamic_output_shape in function.tags and short not in _INDEXING):
        operation = f"{short} with a mask" if by_mask else short
        advice = "use torch.where, weights or topk with a fixed size"
        return LintFinding(SHAPE, place, f"the shape of what {operation} gives depends on values; {advice}")
    return None


def check_module(
    build: Callable[[], Any], load_batches: Callable[[], Iterable[Any]], steps: int, shapes: int
) -> list[LintFinding]:
    """Trains a user's module for a few steps of plain SGD, and returns the findings.

    The loss is `.loss` of what it returns, or else the sum of the means of all floating-point tensors in that.

    Args:
        build: returns the torch.nn.Module.
        load_batches: returns its inputs, on the CPU: a dict is passed as keywords, a tuple or list as positions.
        steps: number to run; batches repeat.
        shapes: number of different shapes that the batches may have.

    Raises:
        BadInput: `build` returns no module, `load_batches` no batch, or the output depends on no weights.
    """
    device, checker = torch_xla.device(), StepChecker(shapes)
    torch.manual_seed(0)  # the same findings each time
    network = build()
    if not isinstance(network, torch.nn.Module):
        raise BadInput(f"--module must give a torch.nn.Module, not {type(network).__name__}")
    inputs = [batch for batch, _ in zip(load_batches(), range(steps), strict=False)]
    if not inputs:
        raise BadInput("--inputs gave no batch")
    network.to(device).train()
    for number in range(steps):
        batch = _name_inputs(inputs[number % len(inputs)])
        xm.set_rng_state(number, device)
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        sent = batch | {name: value.to(device) for name, value in tensors.items()}
        with _watch_step() as trace:
            _train(network, sent)
        checker.add_step(number, {name: tuple(value.shape) for name, value in tensors.items()}, trace)
    return checker.findings()


def _train(network: Any, batch: Mapping[str, Any]) -> None:
    """Changes a network by a step of SGD; inputs named by a number are passed by place. Raises BadInput if the output
    gives no loss. `_user_place` searches the stack for this function's name."""
    positions = [value for name, value in batch.items() if name.isdigit()]
    loss = _loss(network(*positions, **{name: value for name, value in batch.items() if not name.isdigit()}))
    parameters = [value for value in network.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for value, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                value.sub_(1e-3 * gradient)


def _loss(output: Any) -> Any:
    """Returns an output's `.loss`, or the sum of its tensors' means. Raises BadInput if that depends on no weights."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        tensors = [
            value.float().mean()
            for value in _flatten([output])
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        loss = sum(tensors[1:], start=tensors[0]) if tensors else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise BadInput(
            "the module's output can't be trained on: it must have .loss, or be or hold floating-point tensors that "
            "depend on the weights"
        )
    return loss


def _name_inputs(batch: Any) -> dict[str, Any]:
    """Returns a user's batch as a dict; positional inputs have their number as name."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    return {str(index): value for index, value in enumerate(batch if isinstance(batch, tuple | list) else [batch])}


def _format_operands(values: Sequence[Any]) -> str:
    """Returns the shapes and numbers that are compiled into the program, as text."""
    operands = [str(list(value.shape)) if isinstance(value, torch.Tensor) else str(value) for value in values]
    return f"({', '.join(operands)})"


def _flatten(values: Any) -> list[Any]:
    """Returns the leaves of nested lists, tuples and mappings."""
    if isinstance(values, Mapping):
        values = list(values.values())
    return [leaf for value in values for leaf in _flatten(value)] if isinstance(values, list | tuple) else [values]


def _user_place() -> str:
    """Returns file:line of the innermost user code; in a backward pass that of the forward operation, followed by
    " (backward)"; "" if none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (frame.f_code.co_filename == __file__ and frame.f_code.co_name == "_train"):
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            return _format_place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    for entry in reversed(node.metadata.get("traceback_", ()) if node is not None else ()):
        match = re.match(r'\s*File "(.+)", line (\d+)', entry)
        if match and not match[1].startswith(_NOT_USER_CODE):
            return f"{_format_place(match[1], int(match[2]))} (backward)"
    return ""


def _format_place(file: str, line: int) -> str:
    """Returns file:line, with the file relative to the working directory if it is below."""
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{line}"
