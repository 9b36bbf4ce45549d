"""`backend: tensorflow` on one host: what a run gives, that going on changes no bit of it, and that devices, pieces and
XLA change nothing but the time.

That its losses are PyTorch's is claimed by tests/rehearsal/test_parity.py, which needs both images.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.container import poisoned_runs, small_runs
from tests.container import test_regression_runs as regression
from tests.container.golden_losses import DOCUMENTS, assert_golden
from tests.container.test_classification_runs import document as classification
from tests.container.test_classification_runs import prepare as prepare_classification
from tests.profiled_run import require_a_profile
from tests.training.mutations import flip
from training.checkpoint.tensors import decode, encode
from training.errors import BadInput, StopRequested
from training.registry import TASKS

SMALL = {"layers": 1, "hidden_size": 32, "heads": 2, "intermediate_size": 64, "max_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.prepare(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_classification(tmp_path_factory.mktemp("labelled"))


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"backend": "tensorflow", "train__strict": True, "model__layers": 1, **changes}
    return small_runs.document(folder, **settings)


def run(folder: Path, run_id: str, **changes: Any) -> dict[str, Any]:
    return small_runs.train_here(document(folder, **changes), run_id)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return run(folder, "undisturbed", evaluation__every=5)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """Without dropout: what depends on no seed."""
    return run(folder, "plain", train__dropout=0.0)


@pytest.mark.parametrize("task", [task for task in DOCUMENTS if TASKS[task].tensorflow])
def test_losses_are_the_golden_ones(task: str, tmp_path: Path) -> None:
    assert_golden(task, "tensorflow", tmp_path)


def test_training_learns_and_traces_each_program_once(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["last_loss"] < undisturbed["first_loss"] - 0.5
    assert undisturbed["eval_perplexity"] < 120
    assert (undisturbed["compilations"], undisturbed["host_fallbacks"]) == (2, [])


def test_a_regression_learns_and_has_the_figures_of_its_predictions_and_evaluations(tmp_path: Path) -> None:
    config = regression.document(regression.prepare(tmp_path), backend="tensorflow")
    trained = small_runs.train_here(config, "undisturbed")
    regression.assert_learnt(trained)
    regression.assert_figures_are_those_of_predictions(tmp_path, trained)
    for place in (str(tmp_path / "runs" / "undisturbed"), trained["model"]):
        figures = small_runs.evaluate_here(config, place).figures
        assert figures == pytest.approx({name: trained[f"eval_{name}"] for name in figures}, rel=1e-5)


def test_a_profile_names_steps_and_their_parts_and_changes_no_bit(tmp_path: Path) -> None:
    require_a_profile(tmp_path, backend="tensorflow")


@pytest.mark.parametrize(("label", "changes"), [(1e19, {}), (1e30, {"train__jit_compile": True})], ids=["norm", "loss"])
def test_a_skipped_step_leaves_the_state_bit_for_bit(tmp_path: Path, label: float, changes: dict[str, Any]) -> None:
    poisoned_runs.assert_skip_leaves_the_state_alone(tmp_path, "tensorflow", label, **changes)


def test_nothing_is_committed_after_an_infinite_gradient(tmp_path: Path) -> None:
    poisoned_runs.assert_stop_commits_nothing_behind_it(tmp_path, "tensorflow", 1e19)


@pytest.mark.nightly
def test_two_hosts_skip_the_same_update(tmp_path: Path) -> None:
    poisoned_runs.assert_two_hosts_skip_alike(tmp_path, "tensorflow")


@pytest.mark.nightly
def test_two_devices_skip_the_same_update(tmp_path: Path) -> None:
    """Under a strategy, as on a TPU."""
    config = poisoned_runs.poisoned_document(tmp_path, "tensorflow", 1e19, train__on_nonfinite="skip")
    poisoned_runs.check_skips(tmp_path, small_runs.trained(tmp_path, "skip", config, CPU_NUM_DEVICES="2"))


def test_a_resumed_run_gives_the_same_bits(undisturbed: dict[str, Any], folder: Path) -> None:
    config = document(folder, evaluation__every=5)
    with pytest.raises(StopRequested, match="committed"):
        small_runs.train_here(config, "stopped", small_runs.StopAfter(7))
    small_runs.require_same_bits(small_runs.train_here(config, "stopped", attempt=1), undisturbed)


def evaluations(folder: Path, run_id: str) -> dict[int, float]:
    return small_runs.figures(folder, run_id, "eval_loss")


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["mlm", "classification"])
def test_two_devices_give_the_same_training(folder: Path, labelled: Path, task: str) -> None:
    """MirroredStrategy over logical devices: TPUStrategy's path. In a process of its own, which counts devices once.
    Rows of one shape come four steps a call, which a save and an evaluation cut."""
    place, make = (folder, document) if task == "mlm" else (labelled, classification)
    cuts = {"train__steps_per_call": 4, "checkpoint__every_steps": 4, "evaluation__every": 7}
    config = make(place, backend="tensorflow", train__dropout=0.0, train__steps=8, **cuts)
    [host] = small_runs.start(place, "two-devices", config, CPU_NUM_DEVICES="2")
    one = small_runs.train_here(config, "one-device")
    assert host.finish(240) == 0, host.text()
    two = small_runs.summary(place, "two-devices")
    assert (two["devices"], two["compilations"]) == (2, one["compilations"])
    for seen in (small_runs.losses, evaluations):
        assert seen(place, "two-devices") == pytest.approx(seen(place, "one-device"), rel=1e-5)
    for key in ("eval_loss", "eval_accuracy"):
        assert two[key] == pytest.approx(one[key], rel=1e-5)


def test_damaged_records_are_counted_over_two_devices(tmp_path: Path) -> None:
    """The strategy would read the rows on the devices' hosts, which count nothing."""
    shard = min((small_runs.prepare(tmp_path) / "train").glob("*.tfrecord"))
    flip(shard, shard.stat().st_size // 2)
    config = document(tmp_path, train__steps=8, evaluation__every=None, data__on_corrupt="skip")
    summary = small_runs.trained(tmp_path, "damaged", config, CPU_NUM_DEVICES="2")
    assert (summary["devices"], summary["skipped_records"]) == (2, 1)


@pytest.mark.parametrize("change", [{"train__gradient_accumulation": 4}, {"train__jit_compile": True}])
def test_pieces_and_xla_give_the_same_training(plain: dict[str, Any], folder: Path, change: dict[str, Any]) -> None:
    name = "-".join(change)
    run(folder, name, train__dropout=0.0, **change)
    assert small_runs.losses(folder, name) == pytest.approx(small_runs.losses(folder, "plain"), rel=1e-5)


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(plain: dict[str, Any], folder: Path) -> None:
    half = run(folder, "half", train__dropout=0.0, train__precision="bf16")
    assert small_runs.losses(folder, "half") == pytest.approx(small_runs.losses(folder, "plain"), rel=0.02)
    assert small_runs.losses(folder, "half") != small_runs.losses(folder, "plain")
    assert {info.dtype for info, _ in tensors(Path(half["model"])).values()} == {"F32"}


def tensors(model: Path) -> dict[str, Any]:
    """name -> (specification, bytes)"""
    return decode((model / "model.safetensors").read_bytes())


def copy_model(model: Path, copy: Path, values: dict[str, Any], **config: Any) -> None:
    """Copies a model folder, with these tensors, name -> (specification, bytes), and changes of its config.json."""
    shutil.copytree(model, copy, dirs_exist_ok=True)
    written = {**json.loads((copy / "config.json").read_bytes()), **config}
    (copy / "config.json").write_text(json.dumps(written))
    data, places = encode([(name, info) for name, (info, _) in values.items()], {"format": "pt"})
    for name, place in places.items():
        place[:] = values[name][1]
    (copy / "model.safetensors").write_bytes(data)


def test_positions_of_roberta_begin_after_its_padding_id(folder: Path) -> None:
    from training.backends.tensorflow.model import open_pipeline

    made = Path(run(folder, "roberta", model={"name": "roberta-base", **SMALL}, train__steps=2)["model"])
    assert json.loads((made / "config.json").read_bytes())["pad_token_id"] == 3
    # The same model with 1 for its padding: its table of positions begins two rows earlier.
    other, two_rows = folder / "padding-1", 2 * 4 * SMALL["hidden_size"]
    earlier = {name: (info, bytes(data)[two_rows:] + bytes(two_rows) if "position" in name else data)
               for name, (info, data) in tensors(made).items()}  # fmt: skip
    copy_model(made, other, earlier, pad_token_id=1)
    ids = np.array([[0, 7, 8, 9, 2]])
    (other / "model.safetensors").rename(other / "model-1.safetensors")  # weights may be in several files
    (index := other / "model.safetensors.index.json").write_text('{"weight_map": {"all": "model-1.safetensors"}}')
    ours, shifted = (open_pipeline("fill-mask", str(place)).model(ids).logits.numpy() for place in (made, other))
    assert ours == pytest.approx(shifted, abs=1e-5)
    for damaged in ('{"weight_map', "[]", "{}", '{"weight_map": []}'):
        index.write_text(damaged)
        with pytest.raises(BadInput, match=r"index\.json: "):
            open_pipeline("fill-mask", str(other))
    copy_model(made, other, {}, model_type="llama")
    with pytest.raises(BadInput, match=r"is a llama model, which TensorFlow can't open: .* image of torch-xla"):
        open_pipeline("fill-mask", str(other))


def test_an_encoder_gets_a_fresh_head_and_missing_weights_are_refused(plain: dict[str, Any], labelled: Path) -> None:
    model, encoder = Path(plain["model"]), labelled / "encoder"
    body = {name.removeprefix("bert."): value for name, value in tensors(model).items() if name.startswith("bert.")}
    copy_model(model, encoder, body)
    config = classification(labelled, backend="tensorflow", model={"path": str(encoder)}, train__steps=2)
    assert small_runs.train_here(config, "fresh-head")["first_loss"] == pytest.approx(0.69, abs=0.1)  # of two labels

    lacking = "encoder.layer.0.output.dense.weight"
    del body[lacking]
    for model_type, why in (
        ("bert", rf"lacks 1 of the model's weights: bert\.{lacking}"),
        ("distilbert", "distilbert model"),
    ):
        copy_model(model, encoder, body, model_type=model_type)
        with pytest.raises(BadInput, match=why):
            small_runs.train_here(config, f"lacking-{model_type}")


def test_the_other_backends_image_is_named(folder: Path) -> None:
    with pytest.raises(BadInput, match="backend: torch-xla needs torch_xla, which is not installed here"):
        small_runs.train_here(small_runs.document(folder), "other-backend")
