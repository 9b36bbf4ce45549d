"""A run on a virtual v3-8: PJRT_DEVICE=TPU, one process, eight devices. The code that trains on chips trains here, and
what holds on CPUs holds: losses, counts of programs, exact evaluation, the same bits after a stop and after kills.

Each trainer is a process, because torch_xla chooses its device once.
"""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.container import causal_data, small_runs
from tests.container.golden_losses import DOCUMENTS, GOLDEN, STEPS
from tests.container.poisoned_runs import check_skips, poisoned_document
from tests.nightly import others_at_night
from tests.processes import run_python
from training.accelerators import ACCELERATORS, accelerator
from training.config import from_document
from training.device_check import parse_facts
from training.preflight.programs import list_graphs, read_facts
from training.yaml_file import Document

SECONDS = 560.0  # 24 layers are compiled, beside other tests
pytestmark = pytest.mark.timeout(SECONDS + 40)
PRECISION = 1e-5  # relative: eight devices add gradients up in another order than one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.prepare(tmp_path_factory.mktemp("runs"))


train = partial(small_runs.trained, seconds=SECONDS)


def test_the_functions_for_notebooks_train_on_all_devices_of_the_host(folder: Path) -> None:
    """PJRT_DEVICE and TPU_ACCELERATOR_TYPE alone say what there is, as in a notebook."""
    config = small_runs.document(folder, train__steps=2, evaluation__at_end=False, export__at_end=False)
    (folder / "notebook.yaml").write_text(yaml.safe_dump(config))
    script = "from training import one_host; one_host.train(one_host.configuration('notebook.yaml'))"
    run_python("-c", script, folder=folder, seconds=SECONDS)
    assert small_runs.summary(folder, "notebook")["devices"] == 8


@pytest.mark.parametrize("task", others_at_night(DOCUMENTS, ("mlm", "classification")))
def test_losses_are_those_of_one_cpu_to_the_fifth_digit(task: str, tmp_path: Path) -> None:
    """In strict mode, with one program for each shape, one for evaluations, and no unplanned transfer."""
    config = {**DOCUMENTS[task](tmp_path, "torch-xla")}
    config["train"] = {**config["train"], "strict": True, "precision": "fp32"}
    settings = from_document(Document("test", config, {}))
    summary = train(tmp_path, "golden", config)
    golden = json.loads(GOLDEN.read_text())["torch-xla"][task]
    assert summary["devices"] == 8
    assert summary["compilations"] == summary["graphs"] == len(list_graphs(settings, read_facts(settings)))
    assert summary["device_to_host_syncs"] == 0
    assert summary["host_fallbacks"] == []
    losses = small_runs.losses(tmp_path, "golden")
    assert len(losses) == STEPS
    assert losses == pytest.approx(golden["losses"], rel=PRECISION)
    assert summary["eval_loss"] == pytest.approx(golden["evaluation"], rel=PRECISION)


@pytest.mark.nightly
def test_a_skipped_step_leaves_the_state_bit_for_bit_on_eight_devices(tmp_path: Path) -> None:
    """In strict mode: the select is part of the step's program."""
    config = poisoned_document(tmp_path, "torch-xla", 1e19, train__on_nonfinite="skip", train__precision="fp32")
    check_skips(tmp_path, train(tmp_path, "skip", config))


@pytest.mark.nightly
def test_the_published_settings_train_in_strict_mode(folder: Path) -> None:
    """bert-large's depth and heads at a small width, bf16, a global batch of 128 over eight devices."""
    sizes = {"name": "bert-large", "hidden_size": 64, "layers": 24, "heads": 16, "intermediate_size": 128}
    training = {"steps": 3, "global_batch_size": 128, "precision": "bf16", "strict": True}
    changes = {f"train__{key}": value for key, value in training.items()}
    model = {**sizes, "max_positions": small_runs.SEQUENCE}
    config = small_runs.document(folder, model=model, evaluation__at_end=False, **changes)
    summary = train(folder, "large", config)
    assert summary["devices"] == 8
    assert summary["compilations"] == 1
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.parametrize("network", ["encoder", "decoder"])
def test_stopped_killed_and_resumed_it_ends_with_the_same_bits(folder: Path, tmp_path: Path, network: str) -> None:
    config = small_runs.document(folder, train__steps=60)
    if network == "decoder":
        folder = causal_data.prepare(tmp_path)
        config = causal_data.document(folder, train__steps=60)
    straight = train(folder, "straight", config)
    (host,) = small_runs.start(folder, "stopped", config)
    host.wait_for("step  5/60", SECONDS)
    host.process.send_signal(signal.SIGTERM)
    assert host.finish(SECONDS) == 75, host.text()
    (host,) = small_runs.start(folder, "stopped", config, attempt=1)
    host.wait_for("step 40/60", SECONDS)
    host.process.kill()  # as with its host
    assert host.finish(SECONDS) == -signal.SIGKILL, host.text()
    resumed = train(folder, "stopped", config, attempt=2)
    told = (folder / "logs" / "stopped.2.0.log").read_text()
    assert "going on from" in told
    assert "can't be cached" not in told
    small_runs.require_same_bits(resumed, straight)  # its first steps are traced, which were cached before


def test_every_device_holds_all_of_the_state_and_few_calls_copy_it(folder: Path) -> None:
    """After the first step and after the first of a resumed run: the shards themselves, not what torch_xla notes."""
    printed = run_python("-m", "tests.virtual_tpu.shards", str(folder), seconds=SECONDS)
    whole = {"devices": 8, "split": [], "different": []}
    # Of 42 parameters with two moments each, 16 are matrices: 48 buffers. The others are three packed buffers a kind.
    # The dropouts' table and an empty array go to the devices too.
    few = {"tensors": 126, "buffers": 57, "upload": 59, "snapshot": 1, "checksum": 1, "unplanned": 0}
    assert json.loads(printed.splitlines()[-1]) == {"fresh": whole | few, "resumed": whole | few, "jax": False}


ONE_HOST = [slice_.name for slice_ in ACCELERATORS.values() if slice_.hosts == 1]
COMMON = ("v2-8", "v3-8", "v4-8", "v5litepod-4", "v6e-8")


@pytest.mark.parametrize("name", others_at_night(ONE_HOST, COMMON))
def test_the_device_check_finds_and_tries_every_device_of_a_slice_of_one_host(name: str) -> None:
    environment = small_runs.cluster_environment("devices", 0, 0, 1, small_runs.free_ports())
    command = ("-m", "training.cli", "check-devices")
    printed = run_python(*command, seconds=SECONDS, **environment, TPU_ACCELERATOR_TYPE=name)
    facts, count = parse_facts(printed.splitlines()), accelerator(name).devices
    found = [facts[key] for key in ("kind", "devices", "devices_expected", "slice_devices")]
    assert found == ["TPU", count, count, count]
    assert (facts["wrong_products"], facts["sum"], facts["phase"]) == (0, float(count), "done")


@pytest.mark.nightly
@pytest.mark.parametrize("network", ["encoder", "decoder whose layers are a scan"])
def test_a_run_knows_the_programs_that_preflight_compiled(folder: Path, tmp_path: Path, network: str) -> None:
    """Preflight on a CPU and the run on a (virtual) TPU have the same programs, and one that is kept back is told."""
    make = small_runs.document
    if network != "encoder":
        make, folder = causal_data.document, causal_data.prepare(tmp_path)
    config = make(folder, train__precision="bf16", train__steps=2)
    path = folder / "checked.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "training.cli", "preflight", str(path), "--json", "--accelerator", "v3-8"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment = {**inherited, "PJRT_DEVICE": "CPU"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert answer.returncode == 0, answer.stderr
    (result,) = json.loads(answer.stdout)["accelerators"]
    training, evaluation = (graph["hash"] for graph in result["graphs"])
    both = train(folder, "checked", config, TPU_LAUNCH_PREFLIGHT=f"{training},{evaluation}")
    assert both["preflight"] == "2 programs, all as checked"
    one = train(folder, "half", config, TPU_LAUNCH_PREFLIGHT=training)
    assert one["preflight"] == f"1 of 2 programs are not what was checked: {evaluation}"
