"""The image's packages."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path


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


def test_the_image_allocates_with_jemalloc() -> None:
    assert "/libjemalloc.so.2" in Path("/proc/self/maps").read_text()
