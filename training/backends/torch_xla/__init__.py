"""PyTorch/XLA. Beside the files that every backend has:

attention.py, dropout.py    modules that take the place of Hugging Face's
programs/                   steps that are traced for the first batches of a shape, and run by position from then on
gloo.py                     sums across CPU hosts
counters.py                 torch_xla's own counts
tracer.py, tracing.py       the step's program for preflight, not run
lint.py                     what the operations of a step cost on a TPU, for `tpu-train check`

torch_xla and transformers import torch.compile's packages, SciPy and accelerate for what the trainer does not use:
nearly half of a start's processor time. They are left out here, before a module of this package imports torch_xla.
"""

import importlib
import importlib.metadata
import importlib.util
import typing
from collections.abc import Callable
from typing import Any

from training.machine.deferred_imports import (
    Unanswered,
    add_stand_in,
    defer_functions,
    defer_initialization,
    defer_module,
    defer_package,
    uncollected,
)


def _leave_out_unused_packages() -> None:
    # torch_xla's import sets two values in torch._dynamo.config; transformers' marks a class and a function.
    marks = ("disable", "allow_in_graph")
    defer_package("torch._dynamo", submodules=("config",), decorators=marks, before="torch._inductor")
    # Its import needs torch._inductor.
    defer_functions("torch_xla.stablehlo", ("save_as_stablehlo", "save_torch_model_as_stablehlo"))
    # A GRU as a scan, which needs functorch's compiler. torch_xla puts it in the place of torch's.
    torch = importlib.import_module("torch")
    add_stand_in("torch_xla.experimental.gru", {"GRU": type("GRU", (torch.nn.GRU,), {})})
    # What asks whether sizes are symbols of torch.compile, and needs SymPy for those that are.
    for parent in ("torch.fx.experimental", "torch.utils._sympy"):
        importlib.import_module(parent)
    defer_module("torch.fx.experimental.symbolic_shapes", _OF_PLAIN_SIZES)
    defer_module("torch.utils._sympy.functions", {"Max": _unanswered})  # imported where it is not called
    defer_module("sympy", {"Basic": type("Basic", (), {})})  # which no number and no tensor is
    if importlib.util.find_spec("transformers"):
        _leave_out_unused_transformers()


def _leave_out_unused_transformers() -> None:
    # The initialization of either package reads the files of all models for the names in them; a family's module is
    # found by its path. processing_utils reads them once more, and is imported for a type.
    defer_initialization("transformers", {"__version__": importlib.metadata.version("transformers")})
    defer_initialization("transformers.models", {})
    defer_module("transformers.processing_utils", {"Unpack": typing.Unpack})
    defer_module("transformers.modeling_gguf_pytorch_utils", {"load_gguf_checkpoint": _unanswered})
    # SciPy: losses of object detection. accelerate: models over several devices, from one process.
    available = vars(importlib.import_module("transformers.utils.import_utils"))
    available.update(_scipy_available=False, _accelerate_available=False)


def _unanswered(*_values: object) -> Any:
    raise Unanswered


def _truth(value: object, *_skip: object) -> Any:
    return value if isinstance(value, bool) else _unanswered()


def _is_nested(size: object) -> Any:
    return False if type(size) is int else _unanswered()


def _all(*values: object) -> bool:
    truths = [_truth(value) for value in values]
    return all(truths)


def _any(*values: object) -> bool:
    truths = [_truth(value) for value in values]
    return any(truths)


def _are_equal(shape: object, other: object) -> Any:
    shapes = [list(item) if isinstance(item, tuple | list) else _unanswered() for item in (shape, other)]
    return shapes[0] == shapes[1] if all(type(size) is int for item in shapes for size in item) else _unanswered()


# Functions of torch.fx.experimental.symbolic_shapes, for sizes that are numbers and not symbols.
_OF_PLAIN_SIZES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _truth),
    "is_nested_int": _is_nested,
    "sym_and": _all,
    "sym_or": _any,
    "sym_eq": _are_equal,
}

if importlib.util.find_spec("torch"):
    with uncollected():
        _leave_out_unused_packages()
