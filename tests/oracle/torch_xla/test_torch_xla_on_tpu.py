"""PyTorch/XLA on TPUs: the real libtpu of the torch-xla image understands what a container is told, and without chips
it ends with a message."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.oracle import libtpu
from training.distributed.cluster import Cluster, torch_xla_environment, tpu_environment

# Without hardware libtpu takes the machine for a v2, which has no configuration named as later generations' are.
NO_CHIPS = {
    "v3-8": "No .* device found",
    "v4-8": "Failed to get global TPU topology",
    "v6e-8": "Failed to get global TPU topology",
}

PROGRAM = "import torch_xla; print(torch_xla.device())"


def test_libtpu_understands_every_accelerator_type_as_the_device_plugin_means_it() -> None:
    assert libtpu.compare("torch-xla") == []


@pytest.mark.parametrize("name", NO_CHIPS)
def test_initialisation_without_chips_ends_with_a_message(name: str) -> None:
    environment = {**os.environ, "PJRT_DEVICE": "TPU", **tpu_environment(Cluster(0, ("localhost",), name))}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1, ended.stderr
    assert re.search(NO_CHIPS[name], ended.stderr), ended.stderr


FLAGS_OF_TORCH_XLA = """
import os, torch_xla
torch_xla._setup_libtpu_flags()
print(os.environ["LIBTPU_INIT_ARGS"])
"""


@pytest.mark.parametrize("name", ["v2-8", "v3-8", "v4-8", "v5litepod-8", "v5p-8", "v6e-8"])
def test_the_compilers_flags_are_torch_xlas_own(name: str) -> None:
    """On chips torch_xla adds flags when it is imported. The environment of a run has them all before, so none is
    added, and libtpu understands them."""
    variables = tpu_environment(Cluster(0, ("localhost",), name))
    added = subprocess.run(
        [sys.executable, "-c", FLAGS_OF_TORCH_XLA],
        env={**os.environ, **variables, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    ours = torch_xla_environment(Cluster(0, ("localhost",), name), {})
    assert set(ours["LIBTPU_INIT_ARGS"].split()) == set(added.split())
    understood = libtpu.ask(ours).flags
    for flag in ours["LIBTPU_INIT_ARGS"].split():
        variable, _, value = flag.removeprefix("--").partition("=")
        assert understood[variable] == value
