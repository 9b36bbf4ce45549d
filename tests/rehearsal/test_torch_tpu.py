"""TorchTPU on an emulated v4-16: eight processes on two hosts, each with one virtual device."""

import json
import re
import shutil
from collections.abc import Iterator

import pytest

from launcher.images.build import ensure_image
from launcher.images.specification import default_spec
from tests.nightly import others_at_night
from tests.rehearsal.workstation import ROOT, EmulatedSlice, Workstation, docker

pytestmark = pytest.mark.alone

STEPS, ROWS = 5, 16


@pytest.fixture(scope="module")
def work(emulator: Workstation) -> Iterator[EmulatedSlice]:
    """The example's slice."""
    shutil.copytree(ROOT / "examples" / "torch-tpu", emulator.folder / "torch-tpu")
    with emulator.slice_of("torch-tpu/run.yaml") as made:
        yield made


def losses_of_one_process() -> list[float]:
    """The losses of one CPU process on the whole batches, in the image."""
    image = ensure_image(default_spec("torch-tpu", target="test"), print).reference
    mounts = [f"--volume={ROOT / name}:/src/{name}:ro" for name in ("examples", "tests")]
    program = ["/opt/venv/bin/python", "/src/tests/torch_tpu/one_process.py", "/src/examples/torch-tpu"]
    return json.loads(docker("run", "--rm", *mounts, image, *program, str(STEPS), str(ROWS)).splitlines()[-1])


@pytest.mark.parametrize("sharding", others_at_night([(), ("--fsdp",)], [()]), ids=["ddp", "fsdp"])
def test_eight_processes_on_two_hosts_have_the_losses_of_one(work: EmulatedSlice, sharding: tuple[str, ...]) -> None:
    program = (
        "tpu-train",
        "exec",
        "--runtime",
        "torch-tpu",
        "train.py",
        f"--steps={STEPS}",
        f"--rows={ROWS}",
        *sharding,
    )
    ended = work.good_on_slice("run", "--new", "--", *program)
    stored = re.findall(r"^\[(\d)\] rank (\d): process (\d) of 8 stores \d+ numbers$", ended.output, re.MULTILINE)
    assert sorted(stored) == [(str(rank // 4), str(rank), str(rank)) for rank in range(8)], ended.output
    losses = re.findall(r"^\[0\] rank 0: step \d+: loss ([\d.]+)$", ended.output, re.MULTILINE)
    assert [float(loss) for loss in losses] == pytest.approx(losses_of_one_process(), rel=1e-6)
