"""What the trainer's import leaves out, and that it still comes when something asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
from training.registry import BACKENDS, MASKED_LM
from training.run_setup import import_backend
import_backend("tensorflow")
from training.backends.tensorflow import model
model._network({"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}, MASKED_LM)
for package in BACKENDS["tensorflow"].unused:
    assert package not in sys.modules, f"{package} was imported"
import pandas, scipy.linalg
"""


@pytest.mark.nightly
def test_optional_packages_of_tensorflow_are_not_imported() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
