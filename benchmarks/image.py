"""Measures how long a run waits for its image: unchanged, and after a changed line, without a container engine and with
one.

    make benchmark NAME=image [ARGS="--json --repeat 5 --files 200"]

The registry is the emulated one, over TLS, with real bytes; gcloud gives the credentials; the engine is this machine's.
Each time is that of a process of its own, from its start until the image's digest is known ("pushed"). The program is a
folder of small files beside one of 8 MiB, upon Debian.

  unchanged    the image was made before. Peer: `docker push` of an image that the registry has
  changed      one line of one file changed. Peer: `docker build` and `docker push`
  more         changed less unchanged, both without an engine. Peer: the goal
  sent         bytes that the registry received after the changed line. Peer: those of docker's push
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from launcher.emulator import control
from launcher.images import engine

ROOT = Path(__file__).resolve().parent.parent
GOAL_SECONDS = 3.0
BASE = "debian:bookworm-slim"
REPOSITORY = "us-central2-docker.pkg.dev/p/images/program"
FILE = f"""\
project: p
zone: us-central2-b
slice: {{name: s, accelerator_type: v4-16}}
image: {{repository: {REPOSITORY}, base: {REPOSITORY}:base, code: program}}
run: {{command: [sh, main.sh]}}
"""
MAKE = (
    "from launcher.config import load; from launcher.images import local; "
    "print(local.image(load('run.yaml', (), command=()), print).reference)"
)
LARGE_BYTES = 8 * 2**20


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "emulator"
        control.start(home, full_pushes=True)
        try:
            rows = Measurement(Path(folder), control.environment(home), home).run(options.repeat, options.files)
        finally:
            control.stop(home)
    finish("image", rows, options.json)


class Measurement:
    """Measures one folder with a program on both ways into the registry."""

    def __init__(self, folder: Path, environment: dict[str, str], home: Path) -> None:
        self._folder, self._registry, self._line = folder, home / "registry" / "blobs", 0
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "DOCKER_BUILDKIT": "1"}
        self._docker = engine.client()

    def run(self, repeat: int, files: int) -> list[Row]:
        """Returns the table's rows."""
        program = self._folder / "program"
        program.mkdir()
        for number in range(files):
            (program / f"module{number}.py").write_text(f"value = {number}\n" * 50)
        (program / "table.bin").write_bytes(os.urandom(LARGE_BYTES))
        (self._folder / "run.yaml").write_text(FILE)
        (self._folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY program /\n")
        self._run(self._docker, "tag", BASE, f"{REPOSITORY}:base")
        self._run(self._docker, "push", f"{REPOSITORY}:base")
        self._change()
        self._without_engine()
        self._with_engine()
        unchanged = [self._without_engine() for _ in range(repeat)]
        again = [self._run(self._docker, "push", f"{REPOSITORY}:built") for _ in range(repeat)]
        changed, built = [], []
        for _ in range(repeat):
            before = self._change()
            changed.append(self._without_engine())
            between = self._bytes()
            built.append(self._with_engine())
            sent, pushed = between - before, self._bytes() - between
        self._run(self._docker, "rmi", f"{REPOSITORY}:built", f"{REPOSITORY}:base")
        return [
            row("unchanged, until pushed", "s", min(unchanged), "docker push", min(again), ""),
            row("a changed line, until pushed", "s", min(changed), "docker build and push", min(built), ""),
            row("more than unchanged", "s", min(changed) - min(unchanged), "goal", GOAL_SECONDS, "at most 3 s"),
            row("sent after a changed line", "KiB", sent / 2**10, "docker push", pushed / 2**10, ""),
        ]

    def _change(self) -> int:
        """Changes a line of the program; returns how many bytes the registry has."""
        self._line += 1
        (self._folder / "program" / "main.sh").write_text(f"echo line {self._line}\n")
        return self._bytes()

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self._registry.iterdir())

    def _without_engine(self) -> float:
        return self._run(sys.executable, "-c", MAKE)

    def _with_engine(self) -> float:
        begin = time.monotonic()
        self._run(self._docker, "build", "--quiet", "--tag", f"{REPOSITORY}:built", ".")
        self._run(self._docker, "push", f"{REPOSITORY}:built")
        return time.monotonic() - begin

    def _run(self, *command: str) -> float:
        """Runs a command with the emulator's environment; returns its seconds."""
        begin = time.monotonic()
        ended = subprocess.run(command, cwd=self._folder, env=self._environment, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        return time.monotonic() - begin


if __name__ == "__main__":
    main()
