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
import importlib.util

from training.machine.deferred_imports import add_stand_in, defer_functions, defer_package


def _leave_out_unused_packages() -> None:
    # torch_xla's import sets two values in torch._dynamo.config; transformers' marks a class and a function.
    marks = ("disable", "allow_in_graph")
    defer_package("torch._dynamo", submodules=("config",), decorators=marks, before="torch._inductor")
    # Its import needs torch._inductor.
    defer_functions("torch_xla.stablehlo", ("save_as_stablehlo", "save_torch_model_as_stablehlo"))
    # A GRU as a scan, which needs functorch's compiler. torch_xla puts it in the place of torch's.
    torch = importlib.import_module("torch")
    add_stand_in("torch_xla.experimental.gru", {"GRU": type("GRU", (torch.nn.GRU,), {})})
    # SciPy: losses of object detection. accelerate: models over several devices, from one process.
    if importlib.util.find_spec("transformers"):
        available = vars(importlib.import_module("transformers.utils.import_utils"))
        available.update(_scipy_available=False, _accelerate_available=False)


if importlib.util.find_spec("torch"):
    _leave_out_unused_packages()
