"""What the operations of a step are on an XLA device, each with the line of Python that did it: for `tpu-train check`.

A dispatch mode sees every operation, forward and backward, before torch_xla records it. PyTorch itself marks those
whose result's shape or value depends on data (`torch.Tag`); torch_xla's counters tell which ran on the host, transfers
and compilations. Nothing here may keep a tensor: what is alive at a sync is computed, and would be another program.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from training.backends.torch_xla.counters import fallbacks
from training.errors import BadInput
from training.lint.rules import HOST, SHAPE, VALUE, Finding, Judge, Operation, Watched

_NOT_THE_USERS = (*(f"{Path(module.__file__).parent}{os.sep}" for module in (torch, torch_xla)), __file__, "<")
_BOOKKEEPING = (
    "detach",
    "detach_copy",
    "_propagate_xla_data",
    "alias",
    "alias_copy",
    "t_copy",
    "view_copy",
)  # views after an update in place: no work
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class TorchWatch:
    @contextmanager
    def step(self) -> Iterator[Watched]:
        torch_xla.sync()
        watched, compiled, transfers = Watched(), _count("CompileTime"), _count("TransferFromDeviceTime")
        with (
            warnings.catch_warnings(),
            _Prints(watched),
            _Mode(watched),
            torch.autograd.set_multithreading_enabled(False),
        ):
            warnings.filterwarnings("ignore", message="Anomaly Detection")
            with torch.autograd.set_detect_anomaly(
                True, check_nan=False
            ):  # keeps the forward line of each backward operation
                yield watched
        torch_xla.sync(wait=True)
        watched.compilations = _count("CompileTime") - compiled
        watched.transfers = _count("TransferFromDeviceTime") - transfers


class _Mode(TorchDispatchMode):  # type: ignore[misc]  # torch is not here when types are checked
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name, values = function._schema.name, [*_flat(args), *_flat(list(named.values()))]
        if not any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in values):
            return function(*args, **named)
        place, short = _place(), name.removeprefix("aten::")
        if short not in _BOOKKEEPING:
            self._watched.operations.append(Operation(short, _operands(values), place))
        found = _judge(function, name, args, named)
        before = None if found else fallbacks()
        result = function(*args, **named)
        if before is not None and fallbacks() != before:
            found = Finding(
                HOST, place, f"{short} has no XLA form and runs on the host: both wait for each other in each step"
            )
        if found:
            self._watched.findings.append(Finding(found.rule, place, found.message))
        return result


class _Prints(TorchFunctionMode):  # type: ignore[misc]
    """Sees tensors that are printed: the dispatch mode does not, because printing switches it off."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__repr__ and args[0].device.type == "xla":
            message = "a tensor is printed: the program ends here and waits for the device; print what a step returns, after it"
            self._watched.findings.append(Finding(VALUE, _place(), message))
        return function(*args, **(kwargs or {}))


def _judge(function: Any, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Finding | None:
    short = name.removeprefix("aten::")
    if torch.Tag.data_dependent_output in function.tags:
        what = (
            "a tensor's value is asked for (if, while, int(), .item(), range(), a slice up to a tensor)"
            if short == "_local_scalar_dense"
            else short
        )
        return Finding(VALUE, "", f"{what}: the program ends here and waits for the device; use torch.where, or masks")
    target = named.get("device")
    copied_out = short == "_to_copy" and target is not None and torch.device(target).type == "cpu"
    if copied_out or (short == "copy_" and args[0].device.type == "cpu"):
        return Finding(
            VALUE,
            "",
            "a tensor is copied to the host (.cpu(), .numpy(), .tolist()): the program ends here and waits for the device",
        )
    by_mask = name in _INDEXING and any(
        isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in _flat(args[1])
    )
    if by_mask or (torch.Tag.dynamic_output_shape in function.tags and name not in _INDEXING):
        what = f"{short} with a mask" if by_mask else short
        return Finding(
            SHAPE,
            "",
            f"the shape of what {what} gives depends on values; use torch.where, weights or topk with a fixed size",
        )
    return None


def check_module(build: Any, batches: Any, steps: int, shapes: int) -> list[Finding]:
    """Trains a user's module for a few steps of plain SGD. `build()` gives the module and `batches()` its inputs, on
    the CPU: dicts are keywords, tuples and lists positions. Its loss is what it returns: `.loss`, a single number, or
    else the mean of all there is. Raises BadInput."""
    device, judge, watch = torch_xla.device(), Judge(shapes), TorchWatch()
    torch.manual_seed(0)  # what is found is found again
    network = build()
    if not isinstance(network, torch.nn.Module):
        raise BadInput(f"--module must give a torch.nn.Module, not {type(network).__name__}")
    inputs = [batch for batch, _ in zip(batches(), range(steps), strict=False)]
    if not inputs:
        raise BadInput("--inputs gave no batch")
    network.to(device).train()
    for number in range(steps):
        batch = _named(inputs[number % len(inputs)])
        xm.set_rng_state(number, device)
        sent = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        with watch.step() as watched:
            _train(network, sent)
        judge.see(
            number,
            {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)},
            watched,
        )
    return judge.findings()


def _train(network: Any, batch: Mapping[str, Any]) -> None:
    positions = [value for name, value in batch.items() if name.isdigit()]
    loss = _loss(network(*positions, **{name: value for name, value in batch.items() if not name.isdigit()}))
    parameters = [value for value in network.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for value, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                value.sub_(1e-3 * gradient)


def _loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        tensors = [
            value.float().mean()
            for value in _flat([output])
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        loss = sum(tensors[1:], start=tensors[0]) if tensors else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise BadInput(
            "what the module returns is nothing to train on: it must have .loss, or be or hold floating-point tensors that depend on its weights"
        )
    return loss


def _named(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    return {str(index): value for index, value in enumerate(batch if isinstance(batch, tuple | list) else [batch])}


def _operands(values: Sequence[Any]) -> str:
    """Shapes and numbers: what is built into the program."""
    return (
        "("
        + ", ".join(str(list(value.shape)) if isinstance(value, torch.Tensor) else str(value) for value in values)
        + ")"
    )


def _flat(values: Any) -> list[Any]:
    if isinstance(values, Mapping):
        values = list(values.values())
    return [inner for value in values for inner in _flat(value)] if isinstance(values, list | tuple) else [values]


def _place() -> str:
    """file:line of the innermost frame that is neither the framework's nor ours; in a backward pass of the forward line
    that it belongs to."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (
        frame.f_code.co_filename == __file__ and frame.f_code.co_name in ("_train", "step")
    ):
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return _shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    for entry in reversed(node.metadata.get("traceback_", ()) if node is not None else ()):
        match = re.match(r'\s*File "(.+)", line (\d+)', entry)
        if match and not match[1].startswith(_NOT_THE_USERS):
            return f"{_shown(match[1], int(match[2]))} (backward)"
    return ""


def _shown(file: str, line: int) -> str:
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{line}"


def _count(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return int(data[0]) if data else 0
