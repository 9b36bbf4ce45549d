"""Runs with `train.mesh.fsdp` on a virtual TPU: losses equal a replicated run's, any mesh restores, a stop resumes."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.container import causal_data, small_runs
from tests.nightly import others_at_night
from tests.processes import run_python
from tests.virtual_tpu.mesh_runs import document
from training.checkpoint.format import read_manifest

SECONDS = 900.0
pytestmark = pytest.mark.timeout(2 * SECONDS)
SAME_MATHEMATICS = 1e-6  # relative: only the order of sums differs
RUNS = ("replicated:1", "straight:8", "stopped:8", "resumed:8:stopped", "on-4-of-8:4:stopped")
FREEZE = ":train__freeze=['*embed_tokens*']"
OTHER_DEVICES = {  # fsdp, environment
    "4 devices": (2, {"TPU_ACCELERATOR_TYPE": "v5litepod-4"}),
    "1 device": (1, {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}),
    "CPU": (8, {"PJRT_DEVICE": "CPU"}),
}


def run_all(folder: Path, *runs: str, **environment: str) -> None:
    cluster = small_runs.cluster_environment("meshes", 0, 0, 1, small_runs.free_ports())
    told = {**cluster, **environment}
    run_python("-m", "tests.virtual_tpu.mesh_runs", str(folder), *runs, seconds=SECONDS, **told)


def require_losses_of_a_replicated_state(folder: Path, *run_ids: str, precision: float = SAME_MATHEMATICS) -> None:
    expected = small_runs.losses(folder, "replicated")
    assert len(expected) == 20
    for run_id in run_ids:
        assert small_runs.losses(folder, run_id) == pytest.approx(expected, rel=precision), run_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on eight devices."""
    folder = small_runs.prepare(tmp_path_factory.mktemp("runs"))
    run_all(folder, *RUNS)
    return folder


def test_losses_are_those_of_a_replicated_state_even_if_resumed_on_another_mesh(folder: Path) -> None:
    require_losses_of_a_replicated_state(folder, "straight", "on-4-of-8")
    ours, theirs = (small_runs.summary(folder, run_id) for run_id in ("straight", "replicated"))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=SAME_MATHEMATICS)
    assert ours["compilations"] == theirs["compilations"] == 2, "a step and an evaluation; no program copies the state"
    assert ours["device_to_host_syncs"] == 0


def test_a_checkpoint_has_slices_and_the_exported_model_is_whole(folder: Path) -> None:
    tensors = read_manifest(str(folder / "runs" / "straight" / "checkpoints"), 20).tensors.values()
    assert {len(tensor.slices) for tensor in tensors if len(tensor.spec.shape) > 1} == {8}
    assert {len(tensor.slices) for tensor in tensors if len(tensor.spec.shape) == 1} == {1}
    models = (folder / "runs" / run_id / "model" for run_id in ("straight", "replicated"))
    ours, theirs = (load_file(model / "model.safetensors") for model in models)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-4), name


def test_stopped_and_resumed_on_the_same_mesh_it_ends_with_the_same_bits(folder: Path) -> None:
    resumed, straight = (small_runs.summary(folder, run_id) for run_id in ("resumed", "straight"))
    small_runs.require_same_bits(resumed, straight)


@pytest.mark.parametrize("devices", others_at_night(OTHER_DEVICES, ("CPU",)))
def test_a_checkpoint_of_eight_devices_goes_on_elsewhere(folder: Path, devices: str) -> None:
    fsdp, environment = OTHER_DEVICES[devices]
    run_id = devices.replace(" ", "-")
    run_all(folder, f"{run_id}:{fsdp}:stopped", **environment)
    require_losses_of_a_replicated_state(folder, run_id)


@pytest.mark.parametrize("change", others_at_night(["", FREEZE], [FREEZE]))
def test_a_decoder_whose_layers_are_a_scan_has_the_losses_of_a_replicated_state(tmp_path: Path, change: str) -> None:
    """Checkpoints name each layer: they resume on the same mesh with the same bits, and on a CPU, layer by layer."""
    folder = causal_data.prepare(tmp_path)
    run_all(
        folder, f"replicated:1:{change}:train__scan=false", f"split:8:{change}:train__scan=true", f"stopped:8:{change}",
        f"resumed:8:stopped{change}", f"blocks:8:{change}:train__attention=blocks",
    )  # fmt: skip
    run_all(folder, f"on-the-CPU:1:stopped{change}", PJRT_DEVICE="CPU")
    require_losses_of_a_replicated_state(folder, "split", "on-the-CPU")
    require_losses_of_a_replicated_state(folder, "blocks", precision=1e-5)
    straight, resumed = (small_runs.summary(folder, run_id) for run_id in ("split", "resumed"))
    assert resumed["final_weights_crc32c"] == straight["final_weights_crc32c"]
    names = read_manifest(str(folder / "runs" / "split" / "checkpoints"), 20).tensors
    assert {"model/model.layers.1.mlp.up_proj.weight", "adam_v/model.layers.0.input_layernorm.weight"} < set(names)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    ["train__gradient_accumulation=2:train__global_batch_size=16", "train__remat=layers", "train__on_nonfinite=skip"],
)
def test_other_steps_have_the_same_losses_too(tmp_path: Path, change: str) -> None:
    folder = small_runs.prepare(tmp_path)
    run_all(folder, f"replicated:1::{change}", f"split:4::{change}")
    expected = pytest.approx(small_runs.losses(folder, "replicated"), rel=SAME_MATHEMATICS)
    assert small_runs.losses(folder, "split") == expected


@pytest.mark.nightly
def test_in_bf16_the_loss_is_that_of_a_replicated_state_up_to_its_rounding(tmp_path: Path) -> None:
    folder = small_runs.prepare(tmp_path)
    run_all(folder, "replicated:1::train__precision=bf16", "split:8::train__precision=bf16")
    require_losses_of_a_replicated_state(folder, "split", precision=5e-3)


def test_a_mesh_that_does_not_divide_the_devices_is_one_line(folder: Path) -> None:
    (host,) = small_runs.start(folder, "odd", document(folder, 3))
    assert host.finish(SECONDS) == 2
    assert "train.mesh.fsdp is 3, which does not divide 8 devices; use 1, 2, 4, 8" in host.text()
    assert "Traceback" not in host.text()
