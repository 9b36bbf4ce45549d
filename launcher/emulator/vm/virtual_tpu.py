"""The virtual TPU: the devices of one TPU host on this machine's CPU, for containers whose PyTorch/XLA loads it.

images/virtual-tpu holds two files: a library that frameworks load as libtpu.so, and the CPU plugin behind it. A volume
of the engine gets a copy of them, once for each version of that image, and containers mount it: what runs is the image
that would run on a slice. A volume whose making broke off is removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from launcher import shell
from launcher.errors import LaunchError
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import folder_spec

MOUNTED_AT = "/opt/virtual-tpu"
LABEL = "tpu-launch.virtual-tpu"  # of the volumes
# The label by which an image says what is in it, and the frameworks that can load the library.
FRAMEWORK_LABEL = "tpu-launch.framework"
FRAMEWORKS = ("torch-xla",)
_COPY_SECONDS = 120.0


def ensure_volume(source: Path, say: Callable[[str], None]) -> str:
    """The name of the volume with the two files, made when it is not there.

    Args:
        source: the folder images/virtual-tpu.
        say: gets a line for each step of a build.

    Raises:
        LaunchError: the image could not be built, or the files not be copied.
    """
    image = ensure_image(folder_spec("tpu-launch/virtual-tpu", source), say)
    volume = f"tpu-launch-virtual-tpu-{image.digest.removeprefix('sha256:')[:16]}"
    docker = engine.client()
    if shell.run([docker, "volume", "inspect", volume], timeout=_COPY_SECONDS).ok:
        return volume
    _docker(docker, "volume", "create", "--label", f"{LABEL}=1", volume)
    try:
        # The engine fills an empty volume with what the image has at the place where it is mounted.
        container = _docker(docker, "create", "--volume", f"{volume}:{MOUNTED_AT}", image.reference)
        _docker(docker, "rm", container)
    except BaseException:
        shell.run([docker, "volume", "rm", "--force", volume], timeout=_COPY_SECONDS)
        raise
    return volume


def serves(image_labels: Mapping[str, str] | None) -> bool:
    """Whether the image with these labels has a framework that can load the virtual TPU."""
    return (image_labels or {}).get(FRAMEWORK_LABEL) in FRAMEWORKS


def container_environment() -> dict[str, str]:
    """What makes PyTorch/XLA in a container load the virtual TPU. How many devices it has follows from the TPU_*
    variables that every container on a slice gets."""
    return {"PJRT_DEVICE": "TPU", "TPU_LIBRARY_PATH": f"{MOUNTED_AT}/libtpu.so"}


def _docker(docker: str, *arguments: str) -> str:
    result = shell.run([docker, *arguments], timeout=_COPY_SECONDS)
    if not result.ok:
        raise LaunchError(f"the virtual TPU could not be copied into a volume: {result.stderr.strip()}")
    return result.stdout.strip()
