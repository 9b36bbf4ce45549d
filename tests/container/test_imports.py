"""What the trainer's import leaves out, and that it still comes when something asks for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, sys
importlib.import_module("training.backends.torch_xla.backend")
importlib.import_module("transformers.models.bert.modeling_bert")
for package in ("torch._inductor", "torch._functorch.aot_autograd", "sympy", "triton", "scipy.optimize", "accelerate"):
    assert package not in sys.modules, f"{package} was imported"

import torch
double = torch.compile(lambda value: value * 2, backend="eager")
assert double(torch.tensor(4)).item() == 8
assert torch._dynamo.config.specialize_float, "set by torch_xla before the package was imported"
assert torch._dynamo.utils.counters["frames"]["ok"] == 1, "not compiled"
assert torch.nn.GRU(2, 3)(torch.zeros(1, 1, 2))[0].shape == (1, 1, 3)
"""


def test_torch_compile_is_imported_only_when_it_is_asked_for() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
