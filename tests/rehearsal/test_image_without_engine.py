"""A run whose image is made in the registry, with no docker on PATH: the real engine made the base and pushed it into
the emulated registry, and pulls what was put together, onto both hosts. Starts a slice of two hosts; half a minute."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.images.appended import make_base
from launcher.images.specification import ImageSpec, folder_spec
from tests.rehearsal.workstation import Workstation, docker

pytestmark = pytest.mark.alone

REPOSITORY = "us-central2-docker.pkg.dev/rehearsal-project/images/bare"
# A shell and what the start of a run uses, in 5 MB: the whole of Debian takes 10 s to push.
DOCKERFILE = r"""
FROM debian:bookworm-slim AS files
RUN mkdir /small && for program in sh cat date env head mkdir mkfifo mv rm sleep tail timeout; do \
    for file in "/bin/$program" $(ldd "/bin/$program" | grep -o '/[^ ]*'); do cp -L --parents "$file" /small; done; done
FROM scratch AS platform
COPY --from=files /small /
WORKDIR /work
"""
FILE = f"""\
project: rehearsal-project
zone: us-central2-b
slice: {{name: bare, accelerator_type: v4-16}}
image: {{repository: {REPOSITORY}, base: BASE, code: own}}
run: {{command: [sh, program.sh]}}
"""


@pytest.fixture
def spec(tmp_path: Path) -> ImageSpec:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return replace(folder_spec("tpu-launch-test/bare", tmp_path), repository=REPOSITORY)


def path_without_docker(folder: Path) -> str:
    """A PATH with every program of this machine but docker."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not program.name.startswith("docker") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def test_changes_run_without_docker(workstation: Workstation, spec: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    workstation.good("emulator", "start", "--full-pushes")
    exported = workstation.good("emulator", "start", "--environment").output
    with monkeypatch.context() as patch:
        for name, value in re.findall(r"^export (\w+)=(.*)$", exported, re.MULTILINE):
            patch.setenv(name, value)
        patch.setenv("TPU_LAUNCH_HOME", str(workstation.home))
        pushed = make_base(spec, print)
    for image in docker("images", "--quiet", "tpu-launch-test/bare").split():
        docker("rmi", "--force", image)

    (workstation.folder / "own").mkdir()
    program = workstation.folder / "own" / "program.sh"
    file = workstation.file("run.yaml", FILE.replace("BASE", pushed))
    workstation.good("--emulated", "up", "-f", file)
    workstation.environment["PATH"] = path_without_docker(workstation.folder / "bin")
    for words in ("first", "changed"):
        program.write_text(f"echo {words} line of $TPU_WORKER_ID\n")
        ended = workstation.good("--emulated", "run", "--new", "-f", file)
        assert set(re.findall(rf"{words} line of (\d)$", ended.output, re.MULTILINE)) == {"0", "1"}, ended.output
        assert re.search(r"sent [\d,.]+ KiB", ended.output), ended.output
