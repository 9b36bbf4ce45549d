"""The real libtpu of the torch-xla image understands what a container is told, and without chips says so."""

from pathlib import Path

import pytest

from tests.oracle import libtpu, no_chips
from tests.processes import run_python
from training.distributed.cluster import Cluster, torch_xla_environment, tpu_environment


def test_libtpu_reads_our_environment_as_gkes_device_plugins() -> None:
    assert libtpu.compare() == []


@pytest.mark.parametrize("name", no_chips.MESSAGES)
def test_training_without_chips_ends_with_one_message(name: str, tmp_path: Path) -> None:
    no_chips.require_one_message(tmp_path, "torch-xla", name)


FLAGS_OF_TORCH_XLA = """
import os, torch_xla
torch_xla._setup_libtpu_flags()
print(os.environ["LIBTPU_INIT_ARGS"])
"""


@pytest.mark.parametrize("name", ["v2-8", "v3-8", "v4-8", "v5litepod-8", "v5p-8", "v6e-8"])
def test_the_compilers_flags_are_torch_xlas_own(name: str) -> None:
    """On chips torch_xla adds flags when imported. A run's environment has them all, and libtpu understands them."""
    variables = tpu_environment(Cluster(0, ("localhost",), name))
    added = run_python("-c", FLAGS_OF_TORCH_XLA, **variables, PJRT_DEVICE="CPU")
    ours = torch_xla_environment(Cluster(0, ("localhost",), name), {})
    assert set(ours["LIBTPU_INIT_ARGS"].split()) == set(added.split())
    understood = libtpu.ask(ours).flags
    for flag in ours["LIBTPU_INIT_ARGS"].split():
        variable, _, value = flag.removeprefix("--").partition("=")
        assert understood[variable] == value


CACHE_BEFORE_THE_COMPILER = """
import ctypes, libtpu, sys
from pathlib import Path
from training.backends.compile_cache import open_cache
library = libtpu.get_library_path()
environment = {"PJRT_DEVICE": "TPU", "TPU_LAUNCH_COMPILE_CACHE": sys.argv[1]}
tpu = ctypes.CDLL(library)
tpu.GetPjrtApi.restype = ctypes.c_void_p
compiler = ctypes.c_void_p.from_address(tpu.GetPjrtApi() + 40 + 8 * 20)
before = compiler.value
assert open_cache(environment, library, "test", sys.exit), "libtpu's table is of another version"
assert compiler.value != before, "the framework would get libtpu's own"
"""


def test_the_compilation_cache_hooks_into_libtpus_table(tmp_path: Path) -> None:
    run_python("-c", CACHE_BEFORE_THE_COMPILER, str(tmp_path))
