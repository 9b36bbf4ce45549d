"""Runs one benchmark, here or in an image: benchmark.py NAME [the benchmark's arguments]

A benchmark that needs a framework declares it in a line, `RUNS_IN = "tensorflow"` (or "torch-xla"): it then runs
in that image's test stage, from this checkout, as the current user, without a network. Otherwise it runs here. Either
way it writes .tpu-launch/benchmarks/NAME.json. With the line `VIRTUAL_TPU = True` the container also has the virtual
TPU, for processes with PJRT_DEVICE=TPU.

The container has real data at /data: the folder that BENCHMARK_DATA names, or ../shared/data, if it exists. Packages
that only the benchmark needs (`PACKAGES = "name==1.0 other==2.0"`) are installed into .tpu-launch/benchmarks/packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from launcher.emulator.vm import virtual_tpu
from launcher.errors import LaunchError
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import default_spec

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = (
    "HOME=/tmp",
    "PYTHONPATH=/src:/out/benchmarks/packages",
    "PYTHONDONTWRITEBYTECODE=1",
    "PJRT_DEVICE=CPU",
    "TPU_LAUNCH_HOME=/out",
)
MOUNTED = ("benchmarks", "training", "launcher", "examples")


def main(arguments: list[str]) -> int:
    name, rest = chosen(*arguments)
    script = ROOT / "benchmarks" / f"{name}.py"
    place = re.search(r'^RUNS_IN = "([\w-]+)"', script.read_text(), re.MULTILINE)
    if place is None:
        return subprocess.run([sys.executable, str(script), *rest], check=False).returncode
    has_virtual_tpu = re.search(r"^VIRTUAL_TPU = True", script.read_text(), re.MULTILINE) is not None
    wanted = re.search(r'^PACKAGES = "([^"]+)"', script.read_text(), re.MULTILINE)
    out = ROOT / ".tpu-launch"
    (out / "benchmarks").mkdir(mode=0o700, parents=True, exist_ok=True)
    mounts, variables = [], list(VARIABLES)
    try:
        image = ensure_image(default_spec(place.group(1), target="test"), say)
        docker = engine.client()
        if has_virtual_tpu:
            volume = virtual_tpu.ensure_volume(ROOT / "images" / "virtual-tpu", say)
            mounts.append(f"--volume={volume}:{virtual_tpu.MOUNTED_AT}:ro")
            library = virtual_tpu.container_environment()["TPU_LIBRARY_PATH"]
            variables.append(f"TPU_LIBRARY_PATH={library}")
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if wanted and not fetch(wanted.group(1).split(), out / "benchmarks" / "packages"):
        return 1
    data = Path(os.environ.get("BENCHMARK_DATA", ROOT.parent / "shared" / "data"))
    mounts += [f"--volume={ROOT / each}:/src/{each}:ro" for each in MOUNTED]
    mounts += [f"--volume={data.absolute()}:/data:ro"] if data.is_dir() else []
    container = [
        docker,
        "run",
        "--rm",
        "--init",
        "--network=none",
        "--shm-size=1g",
        "--workdir=/src",
        *mounts,
        f"--volume={out}:/out",
    ]
    container += [f"--user={os.getuid()}:{os.getgid()}", "--label=tpu-launch.tests=benchmark"]
    container += [f"--env={variable}" for variable in variables]
    return subprocess.run(
        [*container, image.reference, "/opt/venv/bin/python", f"benchmarks/{name}.py", *rest], check=False
    ).returncode


def say(line: str) -> None:
    """Prints a line of a build."""
    print(line, file=sys.stderr, flush=True)


def chosen(name: str, *rest: str) -> tuple[str, list[str]]:
    """Returns the script and its arguments: with `--backend tensorflow`, NAME_tensorflow if it exists, because that
    backend is in another image."""
    if "--backend" in rest[:-1]:
        at = rest.index("--backend")
        other = f"{name}_{rest[at + 1].replace('-', '_')}"
        if (ROOT / "benchmarks" / f"{other}.py").exists():
            return other, [*rest[:at], *rest[at + 2 :]]
    return name, list(rest)


def fetch(packages: list[str], folder: Path) -> bool:
    """Installs the packages into `folder`, without their dependencies, once. Returns whether pip succeeded."""
    mark = folder / (" ".join(packages) + ".fetched")
    if not mark.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(folder),
            *packages,
        ]
        if subprocess.run(command, check=False).returncode:
            return False
        mark.touch()
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
