"""The virtual TPU: the devices of one TPU host on this machine's CPU, for containers whose PyTorch/XLA loads it.

images/virtual-tpu builds two files, a library that frameworks load as libtpu.so and the CPU plugin behind it. They are
copied out of that image once, to a folder of this machine, and mounted into containers; the image that runs is the one
that would run on a slice. A copy that breaks off leaves a folder without its final name, and the next copies again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from launcher import shell
from launcher.errors import LaunchError
from launcher.home import home
from launcher.images import build as images
from launcher.images import engine

MOUNTED_AT = "/opt/virtual-tpu"
FILES = ("libtpu.so", "pjrt_c_api_cpu_plugin.so")
_COPY_SECONDS = 120.0


def library_folder(source: Path, say: Callable[[str], None]) -> Path:
    """The folder with the two files, made when it is not there. `source` is images/virtual-tpu. Raises LaunchError."""
    image = images.ensure(images.folder_spec("tpu-launch/virtual-tpu", source), say)
    folder = home() / "virtual-tpu" / image.digest.removeprefix("sha256:")[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".copy-", dir=folder.parent))
    try:
        _copy_files(image.reference, unfinished)
        unfinished.chmod(0o755)
        if not folder.is_dir():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def container_environment() -> dict[str, str]:
    """What makes PyTorch/XLA in a container load the virtual TPU. How many devices it has follows from the TPU_*
    variables that every container on a slice gets."""
    return {"PJRT_DEVICE": "TPU", "TPU_LIBRARY_PATH": f"{MOUNTED_AT}/libtpu.so"}


def _copy_files(image: str, folder: Path) -> None:
    docker = engine.client()
    container = _docker(docker, "create", image).strip()
    try:
        for name in FILES:
            _docker(docker, "cp", f"{container}:/{name}", str(folder))
    finally:
        shell.run([docker, "rm", "--force", container], timeout=_COPY_SECONDS)


def _docker(docker: str, *arguments: str) -> str:
    result = shell.run([docker, *arguments], timeout=_COPY_SECONDS)
    if not result.ok:
        raise LaunchError(f"the files of the virtual TPU could not be copied out of its image: {result.stderr.strip()}")
    return result.stdout
