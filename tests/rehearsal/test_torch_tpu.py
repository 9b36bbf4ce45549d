"""TorchTPU on an emulated v4-16: eight processes on two hosts, each with one virtual device. Two minutes."""

import json
import re
import shutil
import time
from collections.abc import Iterator

import pytest

from launcher.images.build import ensure_image
from launcher.images.specification import default_spec
from tests.nightly import others_at_night
from tests.rehearsal.workstation import ROOT, EmulatedSlice, Running, Workstation, docker

pytestmark = pytest.mark.alone

STEPS, ROWS = 5, 16
WAITING = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('tpu_dist')\nvalue = torch.ones(3).to('tpu')\n"
    "for step in range(10**9):\n"
    "    dist.all_reduce(value)\n    value.cpu()\n"
    "    if step == 5:\n        print('pid', os.getpid(), flush=True)\n"
)


@pytest.fixture(scope="module")
def work(emulator: Workstation) -> Iterator[EmulatedSlice]:
    """The example's slice."""
    shutil.copytree(ROOT / "examples" / "torch-tpu", emulator.folder / "torch-tpu")
    emulator.file("torch-tpu/waiting.py", WAITING)
    with emulator.slice_of("torch-tpu/run.yaml") as made:
        yield made


def begin(work: EmulatedSlice, *words: str) -> Running:
    return work.begin_on_slice("run", "--new", "--", "tpu-train", "exec", "--runtime", "torch-tpu", *words)


def losses_of_one_process() -> list[float]:
    """The losses of one CPU process on the whole batches, in the image."""
    image = ensure_image(default_spec("torch-tpu", target="test"), print).reference
    mounts = [f"--volume={ROOT / name}:/src/{name}:ro" for name in ("examples", "tests")]
    program = ["/opt/venv/bin/python", "/src/tests/torch_tpu/one_process.py", "/src/examples/torch-tpu"]
    out = docker("run", "--rm", *mounts, image, *program, str(STEPS), str(ROWS))
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("sharding", others_at_night([(), ("--fsdp",)], [()]), ids=["ddp", "fsdp"])
def test_eight_processes_on_two_hosts_have_the_losses_of_one(work: EmulatedSlice, sharding: tuple[str, ...]) -> None:
    ended = begin(work, "train.py", f"--steps={STEPS}", f"--rows={ROWS}", *sharding).end(600).require(0)
    stored = re.findall(r"^\[(\d)\] rank (\d): process (\d) of 8 stores \d+ numbers$", ended.output, re.MULTILINE)
    assert sorted(stored) == [(str(rank // 4), str(rank), str(rank)) for rank in range(8)], ended.output
    losses = re.findall(r"^\[0\] rank 0: step \d+: loss ([\d.]+)$", ended.output, re.MULTILINE)
    assert [float(loss) for loss in losses] == pytest.approx(losses_of_one_process(), rel=1e-6)


def test_a_killed_rank_is_the_first_cause_on_both_hosts_within_10_s(work: EmulatedSlice) -> None:
    running = begin(work, "waiting.py")
    running.wait_for(r"^\[0\] rank 0: pid \d+$", 300)
    line = running.wait_for(r"^\[1\] rank 6: pid \d+$", 300)
    (container,) = work.containers(1)
    docker("exec", "--user=0", container, "sh", "-c", f"kill -9 {line.split()[-1]}")
    killed = time.monotonic()
    ended = running.end(60)
    assert time.monotonic() - killed < 10
    ended.require(10, "rank 6 was killed by SIGKILL (exit code 137)")
    assert re.search(r"host 1.*137|137.*host 1", ended.output), ended.output
    assert work.containers_of_runs() == []
