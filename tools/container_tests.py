"""Runs tests inside the `test` stage of an image: container_tests.py [PLACE] [pytest's arguments]

  torch-xla           tests/container in the torch-xla image (also when no place is named)
  virtual-tpu         tests/virtual_tpu in the torch-xla image, on a virtual v3-8 with 8 devices
  torch-tpu           tests/torch_tpu in the torch-tpu image, on a virtual v4-8 with 4 devices
  tensorflow          tests/tensorflow in the tensorflow image
  oracle-torch-xla    tests/oracle/torch_xla: settings that the torch-xla image's libtpu accepts
  oracle-torch-xla-2.8  the same, and preflight, in the image with torch_xla 2.8, the advice for some v2 and v3 hosts
  oracle-tensorflow   tests/oracle/tensorflow: the same in the tensorflow image for TPUs

  --build-only        runs no tests: builds the images of all places that are not nightly, and the launcher's

The launcher's own code builds the image if anything in it changed. The tests run as the image's user and import the
`training` package of the image; only files that the tests read are mounted, read-only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from launcher.emulator.vm import virtual_tpu
from launcher.errors import LaunchError
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import default_spec, launcher_spec

ROOT = Path(__file__).resolve().parent.parent
MOUNTED = ("tests", "examples", "launcher", "pyproject.toml")  # tests use the launcher's emulated bucket


@dataclass(frozen=True)
class Place:
    """Where tests run: an image, the interpreter in it, and the tests that belong there."""

    image: str
    tests: tuple[str, ...]
    python: str = "/opt/venv/bin/python"
    build_args: dict[str, str] = field(default_factory=dict)
    virtual_tpu: str = ""  # accelerator type of the virtual TPU; "": the CPU
    nightly: bool = False  # `make test` leaves it out


PLACES = {
    "torch-xla": Place("torch-xla", ("tests/container",)),
    "virtual-tpu": Place("torch-xla", ("tests/virtual_tpu",), virtual_tpu="v3-8"),
    "torch-tpu": Place("torch-tpu", ("tests/torch_tpu",), virtual_tpu="v4-8"),
    "tensorflow": Place("tensorflow", ("tests/tensorflow",)),
    "oracle-torch-xla": Place("torch-xla", ("tests/oracle/torch_xla",)),
    "oracle-torch-xla-2.8": Place(
        "torch-xla",
        ("tests/oracle/torch_xla", "tests/container/test_preflight.py"),
        build_args={"REQUIREMENTS": "requirements-2.8.txt"},
        nightly=True,
    ),
    "oracle-tensorflow": Place(
        "tensorflow", ("tests/oracle/tensorflow",), build_args={"REQUIREMENTS": "requirements-tpu.txt"}, nightly=True
    ),
}


def build_images() -> int:
    """Builds the images that `make test` needs, and the volume of the virtual TPU."""
    try:
        for place in (place for place in PLACES.values() if not place.nightly):
            ensure_image(default_spec(place.image, target="test", build_args=place.build_args), say)
        virtual_tpu.ensure_volume(ROOT / "images" / "virtual-tpu", say)
        subprocess.run([ROOT / "tools" / "gcloud-image.sh"], check=False)  # else the base is pulled
        ensure_image(launcher_spec(), say)  # tests/rehearsal/test_launcher_image.py starts it
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def main(arguments: list[str]) -> int:
    """Runs the tests. Returns pytest's exit code, or the launcher's if the image can't be built."""
    if arguments == ["--build-only"]:
        return build_images()
    name, *rest = arguments if arguments and arguments[0] in PLACES else ["torch-xla", *arguments]
    place = PLACES[name]
    device = {"PJRT_DEVICE": "CPU"}
    mounts = [f"--volume={ROOT / name}:/src/{name}:ro" for name in MOUNTED if (ROOT / name).exists()]
    try:
        spec = default_spec(place.image, target="test", build_args=place.build_args)
        image = ensure_image(spec, say)
        docker = engine.client()
        if place.virtual_tpu:
            volume = virtual_tpu.ensure_volume(ROOT / "images" / "virtual-tpu", say)
            mounts.append(f"--volume={volume}:{virtual_tpu.MOUNTED_AT}:ro")
            device = {**virtual_tpu.container_environment(), "TPU_ACCELERATOR_TYPE": place.virtual_tpu}
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    passed_on = [f"--env={name}" for name in ("CI", "TPU_LAUNCH_NO_SKIPS", "TPU_LAUNCH_KILLS") if name in os.environ]
    # No network but loopback: a test that needs more isn't a single-host test.
    container = [
        docker,
        "run",
        "--rm",
        "--init",
        "--network=none",
        "--shm-size=1g",
        "--workdir=/src",
        *mounts,
        *passed_on,
    ]
    container += [
        "--label=tpu-launch.tests=container",
        "--env=PYTHONDONTWRITEBYTECODE=1",
        *(f"--env={variable}={value}" for variable, value in device.items()),
        "--env=HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis",
    ]
    pytest = [
        place.python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--durations=25",
        "--timeout=1200",
        *rest,
        *(() if any(argument.startswith("tests/") for argument in rest) else place.tests),
    ]
    return subprocess.run([*container, image.reference, *pytest], check=False).returncode


def say(line: str) -> None:
    """Prints a line of a build."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
