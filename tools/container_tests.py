"""Runs tests inside the `test` stage of an image: container_tests.py [torch-xla | tensorflow | beam] [pytest's
arguments]

  torch-xla   tests/container in the torch-xla image (also when no place is named)
  tensorflow  tests/tensorflow in the tensorflow image
  beam        tests/beam in the environment with Apache Beam that the tensorflow image's test stage has beside its own

The image is built by the launcher's own code when anything in it changed. The tests run as the image's user and import
the `training` package that is in the image; only what the tests read is mounted, read-only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LaunchError
from launcher.images import build as images
from launcher.images import engine

HOUSE = Path(__file__).resolve().parent.parent
MOUNTED = ("tests", "examples", "launcher", "pyproject.toml")  # of the launcher tests use the emulated bucket


@dataclass(frozen=True)
class Place:
    """Where tests run: an image, the interpreter in it, and the tests that belong there."""

    image: str
    python: str
    tests: str


PLACES = {
    "torch-xla": Place("torch-xla", "/opt/venv/bin/python", "tests/container"),
    "tensorflow": Place("tensorflow", "/opt/venv/bin/python", "tests/tensorflow"),
    "beam": Place("tensorflow", "/opt/beam/bin/python", "tests/beam"),
}


def main(arguments: list[str]) -> int:
    name, *rest = arguments if arguments and arguments[0] in PLACES else ["torch-xla", *arguments]
    place = PLACES[name]
    try:
        image = images.ensure(images.default_spec(place.image, target="test"), lambda line: print(line, flush=True))
        docker = engine.client()
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    mounts = [f"--volume={HOUSE / name}:/src/{name}:ro" for name in MOUNTED if (HOUSE / name).exists()]
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
        "--env=PJRT_DEVICE=CPU",
        "--env=HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis",
    ]
    pytest = [place.python, "-m", "pytest", "-p", "no:cacheprovider", "--durations=10", *(rest or [place.tests])]
    return subprocess.run([*container, image.reference, *pytest], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
