"""The real libtpu of the tensorflow image understands what a container is told, and without chips says so."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.container import small_runs
from tests.oracle import libtpu, no_chips
from tests.tensorflow import test_tensorflow_preflight
from training.cli.main import tpu_train
from training.preflight.compiler import CompilerUnavailable


def test_libtpu_reads_our_environment_as_gkes_device_plugins() -> None:
    assert libtpu.compare() == []


@pytest.mark.parametrize("name", no_chips.MESSAGES)
def test_training_without_chips_ends_with_one_message(name: str, tmp_path: Path) -> None:
    """With tensorflow-tpu 2.20.0 the process ended with a segmentation fault."""
    no_chips.require_one_message(tmp_path, "tensorflow", name)


@pytest.mark.parametrize(("name", "hosts"), [("v4-16", 2), ("v3-32", 4)])
def test_workers_of_a_slice_connect_and_end_with_a_message(name: str, hosts: int, tmp_path: Path) -> None:
    """Every worker loads its plugin, and on v3 the client connects to all of them; then each looks for its chips."""
    folder = small_runs.prepare(tmp_path)
    config = small_runs.document(folder, backend="tensorflow", train__global_batch_size=64)
    ports = small_runs.free_ports()
    trainers = []
    for worker in range(hosts):
        variables = {
            "PJRT_DEVICE": "TPU",
            "TPU_ACCELERATOR_TYPE": name,
            "TPU_TASK_PORT": str(small_runs.free_ports()[0]),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the hosts of this test share one /tmp
        }
        trainers += small_runs.start(folder, "slice", config, hosts, only=worker, ports=ports, **variables)
    codes = [trainer.finish(150) for trainer in trainers]
    texts = [trainer.text() for trainer in trainers]
    told = "\n".join(texts)
    assert all(code > 0 for code in codes), told
    if name.startswith("v3"):
        host = r"(host \d|a host of this slice)"
        message = rf"the TPU of {host} could not be initialised: .*No .* device found; check that"
        assert all(re.search(message, text) for text in texts), told
        assert codes[0] == 1
    else:
        message = f"could not be initialised: {no_chips.MESSAGES['v4-8']}; check that"
        assert any(re.search(message, text) for text in texts), told
    assert not any("Traceback" in text for text in texts), told


def test_preflight_says_that_this_wheel_can_not_trace(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(test_tensorflow_preflight.FILE)
    shapes = ["--accelerator", "v4-16", "--vocabulary", "200", "--sequence-length", "32"]
    message = r"use the image for CPUs, `tpu-launch preflight --set image.build_args"
    with pytest.raises(CompilerUnavailable, match=message):
        CliRunner().invoke(tpu_train, ["preflight", str(tmp_path / "run.yaml"), *shapes], catch_exceptions=False)
