"""The virtual TPU: the devices of one TPU host on this machine's CPU, for containers whose PyTorch can load it.

images/virtual-tpu holds a library that frameworks load as libtpu.so, and the CPU plugin behind it. Both are copied once
for each version of that image into a volume of the engine, which containers mount: their image is the one that would
run on a slice.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from launcher import shell
from launcher.errors import LaunchError
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import folder_spec

MOUNTED_AT = "/opt/virtual-tpu"
LABEL = "tpu-launch.virtual-tpu"  # of the volumes
# The label that names the framework in an image. Both frameworks can load the library; the processes of torch-tpu, one
# a chip, exchange data over any number of hosts, and torch-xla's process has all devices of one host.
FRAMEWORK_LABEL = "tpu-launch.framework"
ANY_HOSTS = "torch-tpu"
ONE_HOST = "torch-xla"
_COPY_SECONDS = 120.0


def ensure_volume(source: Path, say: Callable[[str], None]) -> str:
    """Returns the name of the volume with libtpu.so and the CPU plugin; makes it from `source`, images/virtual-tpu, if
    it is missing. `say` receives the steps. Raises BadInput without an engine, LaunchError if a build or copy fails."""
    image = ensure_image(folder_spec("tpu-launch/virtual-tpu", source), say)
    volume = f"tpu-launch-virtual-tpu-{image.digest.removeprefix('sha256:')[:16]}"
    docker = engine.client()
    if shell.run([docker, "volume", "inspect", volume], timeout=_COPY_SECONDS).ok:
        return volume
    _docker(docker, "volume", "create", "--label", f"{LABEL}=1", volume)
    try:
        # The engine fills an empty volume with the image's files at the path where the volume is mounted.
        container = _docker(docker, "create", "--volume", f"{volume}:{MOUNTED_AT}", image.reference)
        _docker(docker, "rm", container)
    except BaseException:
        shell.run([docker, "volume", "rm", "--force", volume], timeout=_COPY_SECONDS)
        raise
    return volume


def serves(image_labels: Mapping[str, str] | None, hosts: int) -> bool:
    """Returns whether the framework of an image with these labels can load the virtual TPU on so many hosts."""
    framework = (image_labels or {}).get(FRAMEWORK_LABEL)
    return framework == ANY_HOSTS or (framework == ONE_HOST and hosts == 1)


def container_environment() -> dict[str, str]:
    """Returns the variables that make PyTorch/XLA and TorchTPU load the virtual TPU; the TPU_* variables, which every
    container on a slice gets, give the number of devices."""
    return {"PJRT_DEVICE": "TPU", "TPU_LIBRARY_PATH": f"{MOUNTED_AT}/libtpu.so"}


def _docker(docker: str, *arguments: str) -> str:
    """Runs docker, for 120 s at most, and returns its output. Raises LaunchError when it fails."""
    result = shell.run([docker, *arguments], timeout=_COPY_SECONDS)
    if not result.ok:
        raise LaunchError(f"the virtual TPU could not be copied into a volume: {result.stderr.strip()}")
    return result.stdout.strip()
