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

from tests.container import small_runs
from tests.container.test_classification_runs import document as classification
from tests.container.test_classification_runs import prepare as prepare_classification
from tests.training.mutations import flip
from training.checkpoint.tensors import decode, encode
from training.errors import BadInput, StopRequested

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


def test_training_learns_and_traces_each_program_once(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["last_loss"] < undisturbed["first_loss"] - 0.5
    assert undisturbed["eval_perplexity"] < 120
    assert (undisturbed["compilations"], undisturbed["host_fallbacks"]) == (2, [])


def test_a_resumed_run_gives_the_same_bits(undisturbed: dict[str, Any], folder: Path) -> None:
    config = document(folder, evaluation__every=5)
    with pytest.raises(StopRequested, match="committed"):
        small_runs.train_here(config, "stopped", small_runs.StopAfter(7))
    resumed = small_runs.train_here(config, "stopped", attempt=1)
    small_runs.require_same_bits(resumed, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["mlm", "classification"])
def test_two_devices_give_the_same_training(folder: Path, labelled: Path, task: str) -> None:
    """MirroredStrategy over logical devices: TPUStrategy's path. In a process of its own, which counts devices once."""
    place, make = (folder, document) if task == "mlm" else (labelled, classification)
    config = make(place, backend="tensorflow", train__dropout=0.0, train__steps=8, evaluation__every=None)
    [host] = small_runs.start(place, "two-devices", config, CPU_NUM_DEVICES="2")
    one = small_runs.train_here(config, "one-device")
    assert host.finish(240) == 0, host.text()
    two = small_runs.summary(place, "two-devices")
    assert (two["devices"], two["compilations"]) == (2, one["compilations"])
    assert small_runs.losses(place, "two-devices") == pytest.approx(small_runs.losses(place, "one-device"), rel=1e-5)
    for key in ("eval_loss", "eval_accuracy"):
        assert two[key] == pytest.approx(one[key], rel=1e-5)


def test_damaged_records_are_counted_over_two_devices(tmp_path: Path) -> None:
    """The strategy would read the rows on the devices' hosts, which count nothing."""
    shard = min((small_runs.prepare(tmp_path) / "train").glob("*.tfrecord"))
    flip(shard, shard.stat().st_size // 2)
    config = document(tmp_path, train__steps=8, evaluation__every=None, data__on_corrupt="skip")
    summary = small_runs.trained(tmp_path, "damaged", config, CPU_NUM_DEVICES="2")
    assert (summary["devices"], summary["skipped_records"]) == (2, 1)


@pytest.mark.parametrize(
    "change", [{"train__gradient_accumulation": 4}, {"train__jit_compile": True}], ids=["accumulated", "xla"]
)
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
    return decode((model / "model.safetensors").read_bytes())


def test_positions_of_roberta_begin_after_its_padding_id(folder: Path) -> None:
    from training.backends.tensorflow.model import open_pipeline

    made = Path(run(folder, "roberta", model={"name": "roberta-base", **SMALL}, train__steps=2)["model"])
    config, found = json.loads((made / "config.json").read_bytes()), tensors(made)
    assert config["pad_token_id"] == 3
    # The same model with 1 for its padding: its table of positions begins two rows earlier.
    other = folder / "padding-1"
    shutil.copytree(made, other)
    (other / "config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    data, places = encode([(name, info) for name, (info, _) in found.items()], {"format": "pt"})
    for name, place in places.items():
        value = bytes(found[name][1])
        place[:] = (
            value[2 * 4 * SMALL["hidden_size"] :] + bytes(2 * 4 * SMALL["hidden_size"]) if "position" in name else value
        )
    (other / "model.safetensors").write_bytes(data)

    ids = np.array([[0, 7, 8, 9, 2]])
    ours, shifted = (open_pipeline("fill-mask", str(place)).model(ids).logits.numpy() for place in (made, other))
    assert ours == pytest.approx(shifted, abs=1e-5)


def test_an_encoder_gets_a_fresh_head_and_missing_weights_are_refused(plain: dict[str, Any], labelled: Path) -> None:
    model = labelled / "encoder"
    shutil.copytree(plain["model"], model)
    body = {name.removeprefix("bert."): value for name, value in tensors(model).items() if name.startswith("bert.")}

    def write() -> None:
        data, places = encode([(name, info) for name, (info, _) in body.items()], {"format": "pt"})
        for name, place in places.items():
            place[:] = body[name][1]
        (model / "model.safetensors").write_bytes(data)

    write()
    config = classification(labelled, backend="tensorflow", model={"path": str(model)}, train__steps=2)
    assert small_runs.train_here(config, "fresh-head")["first_loss"] == pytest.approx(0.69, abs=0.1)  # of two labels

    lacking = "encoder.layer.0.output.dense.weight"
    del body[lacking]
    write()
    with pytest.raises(BadInput, match=rf"lacks 1 of the model's weights: bert\.{lacking}"):
        small_runs.train_here(config, "lacking")
    values = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**values, "model_type": "distilbert"}))
    with pytest.raises(BadInput, match="distilbert model"):
        small_runs.train_here(config, "other-family")


def test_the_other_backends_image_is_named(folder: Path) -> None:
    with pytest.raises(BadInput, match="backend: torch-xla needs torch_xla, which is not installed here"):
        small_runs.train_here(small_runs.document(folder), "other-backend")
