"""What the trainer's import leaves out, and that it still comes when something asks for it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PROGRAM = """
import importlib, sys
importlib.import_module("training.backends.torch_xla.backend")
importlib.import_module("transformers.models.bert.modeling_bert")
unused = ("torch._inductor", "torch._functorch.aot_autograd", "sympy.core", "triton", "scipy.optimize", "accelerate")
for package in unused:
    assert package not in sys.modules, f"{package} was imported"

import torch, torch_xla
from torch.fx.experimental.symbolic_shapes import guard_or_false as is_true
weight = torch.ones(3, 4, device=torch_xla.device(), requires_grad=True)
loss = (weight * 2 + weight[0]).sum()
(gradient,) = torch.autograd.grad([loss], [weight], [torch.ones_like(loss)])
with torch.no_grad():
    weight.mul_(0.5).addcmul_(gradient, gradient, value=0.5)
assert weight.sum().item() == 4 * (0.5 * 3 + 0.5 * (5 * 5 + 2 * 2 + 2 * 2)), "a step's operations"
assert "sympy.core" not in sys.modules, "for sizes that are numbers"
assert "jax" not in sys.modules

double = torch.compile(lambda value: value * 2, backend="eager")
assert double(torch.tensor(4)).item() == 8
assert torch._dynamo.config.specialize_float, "set by torch_xla before the package was imported"
assert torch._dynamo.utils.counters["frames"]["ok"] == 1, "not compiled"
either = torch.compile(lambda value: value * value.shape[0], backend="eager", dynamic=True)
assert [either(torch.ones(size)).sum().item() for size in (4, 5, 6)] == [16, 25, 36], "sizes that are symbols"
from torch.fx.experimental.symbolic_shapes import ShapeEnv
assert is_true(ShapeEnv().create_unbacked_symint() == 3) is False, "a size that is a symbol"
import sympy
assert isinstance(sympy.Integer(3), sympy.Basic), "SymPy's own"
assert torch.nn.GRU(2, 3)(torch.zeros(1, 1, 2))[0].shape == (1, 1, 3)
"""


def test_torch_compile_and_sympy_are_imported_only_when_they_are_asked_for() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "AttributeError" not in ended.stderr


FAMILIES_PROGRAM = """
import importlib, os, sys, typing
listed, list_folder = [], os.listdir
os.listdir = lambda folder=".": listed.append(str(folder)) or list_folder(folder)
importlib.import_module("training.run_setup").import_backend("torch-xla")
for family in ("bert", "roberta"):
    importlib.import_module("training.backends.torch_xla.model")._classes(family)
folders = [folder.rpartition("/transformers/models/")[2] for folder in listed if "/transformers/models/" in folder]
others = {*folders} - {"auto", "bert", "roberta"}
assert not others, f"read for the names in them: {sorted(others)[:3]}"
assert "transformers.models.bert.modeling_bert" in sys.modules

import transformers
import transformers.models.bert
from transformers import AutoModelForMaskedLM, BertConfig
from transformers.models.bert.configuration_bert import BertConfig as Own
assert BertConfig is Own is transformers.models.bert.BertConfig, "a class of one family, by each of its names"
assert any("/transformers/models/albert" in folder for folder in listed), "the test does not see what is read"
from transformers.utils import is_torch_available
from importlib.metadata import version
assert transformers.__version__ == version("transformers")
network = AutoModelForMaskedLM.from_config(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
assert type(network) is transformers.models.bert.modeling_bert.BertForMaskedLM
from transformers.processing_utils import ProcessorMixin, Unpack
assert isinstance(ProcessorMixin, type) and Unpack is typing.Unpack
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
assert "bert" in GGUF_SUPPORTED_ARCHITECTURES or "llama" in GGUF_SUPPORTED_ARCHITECTURES
"""


def test_files_of_other_model_families_are_read_only_when_they_are_asked_for() -> None:
    command = [sys.executable, "-c", FAMILIES_PROGRAM]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_image_has_no_library_of_cuda_and_torch_says_that_there_is_no_device() -> None:
    """PyPI's torch is the build for CUDA; images/torch-xla/cuda_absent.py makes it load without."""
    program = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count()); torch.ones(1).cuda()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert ended.stdout == "False 0\n", ended.stderr
    assert "No CUDA GPUs are available" in ended.stderr
    packages = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert not [name for name in packages if name.startswith(("nvidia", "triton"))]
    files = (path for path in Path(sysconfig.get_path("purelib")).rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) < 3.9e9, "an image of 4 GB at most"
