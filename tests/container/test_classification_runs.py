"""A classifier is trained: it learns, and the result is a model that people load."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from tests.container import small_runs
from training.errors import BadInput
from training.models.export import export_checkpoint
from training.models.predict import classify

LABELS = ["calm", "wild"]  # texts of words below 100, and of those above


def rows(count: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        first, size = (5, 100)[number % 2], (4, 5, 6, 12)[number // 2 % 4]
        words = " ".join(f"w{chance.randrange(first, first + 90)}" for _ in range(size))
        found.append({"text": f"[CLS] {words} [SEP]", "label": LABELS[number % 2]})
    return found


def prepare(folder: Path, labels: Sequence[str] = LABELS) -> Path:
    """Writes a tokenizer, 96 rows to train with and 37 to evaluate."""
    small_runs.write_tokenizer(folder / "tokenizer")
    small_runs.write_csv(folder / "train.csv", rows(96, 1))
    small_runs.write_csv(folder / "evaluation.csv", rows(37, 2))
    (folder / "labels.json").write_text(json.dumps(labels))
    small_runs.labelled_shards(folder, "classification", ".csv", "--labels", folder / "labels.json")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("runs"))


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    steps = {"train__steps": 40, "checkpoint__every_steps": 10, "evaluation__every": 20}
    own = {"seed": 3, "train__global_batch_size": 8, **steps}  # with most seeds it learns in so few steps
    return small_runs.labelled_document(folder, "classification", **{**own, **changes})


def run(folder: Path, run_id: str, **changes: Any) -> dict[str, Any]:
    return small_runs.train_here(document(folder, **changes), run_id)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return run(folder, "undisturbed")


def test_it_learns_and_its_confusion_matrix_is_kept_and_drawn(undisturbed: dict[str, Any], folder: Path) -> None:
    told = list(small_runs.figures(folder, "undisturbed", "eval_accuracy").values())
    assert len(told) == 2
    assert undisturbed["eval_accuracy"] == told[-1] > 0.9
    assert undisturbed["eval_weighted_f1"] == pytest.approx(undisturbed["eval_accuracy"], abs=0.05)
    assert undisturbed["last_loss"] < undisturbed["first_loss"] / 2
    right = undisturbed["eval_accuracy"] * 37
    assert right == pytest.approx(round(right)), "over exactly the 37 examples"

    place = folder / "runs" / "undisturbed"
    found = json.loads((place / "confusion.json").read_text())
    counts = np.array(found["counts"])
    assert (found["labels"], counts.sum()) == (LABELS, 37)
    assert np.trace(counts) / 37 == pytest.approx(undisturbed["eval_accuracy"])
    assert "calm taken for calm" in (place / "report.html").read_text()


def test_a_classifier_is_evaluated_where_it_lies(undisturbed: dict[str, Any], folder: Path) -> None:
    in_parts = folder / "in-parts"
    model = AutoModelForSequenceClassification.from_pretrained(undisturbed["model"])
    model.save_pretrained(in_parts, max_shard_size="40KB")
    assert not (in_parts / "model.safetensors").exists()
    for place in (str(folder / "runs" / "undisturbed"), undisturbed["model"], str(in_parts)):
        found = small_runs.evaluate_here(document(folder), place)
        assert found.figures == {name: undisturbed[f"eval_{name}"] for name in ("loss", "accuracy", "weighted_f1")}
        assert (found.labels, np.sum(found.confusion)) == (tuple(LABELS), 37)
    renamed = document(prepare(folder / "renamed", ["calm", "loud", "wild"]))
    with pytest.raises(BadInput, match="the labels of the model: calm, wild; of the data: calm, loud, wild"):
        small_runs.evaluate_here(renamed, undisturbed["model"])


def test_the_result_is_a_model_that_text_classification_loads(undisturbed: dict[str, Any], folder: Path) -> None:
    model, exported = Path(undisturbed["model"]), folder / "exported"
    assert export_checkpoint(str(folder / "runs" / "undisturbed"), str(exported)) == 40
    for name in ("config.json", "model.safetensors"):
        assert (exported / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((model / "config.json").read_bytes())["id2label"] == {"0": "calm", "1": "wild"}
    for text, label in (("[CLS] w10 w20 w30 w40 [SEP]", "calm"), ("[CLS] w110 w120 w130 w140 [SEP]", "wild")):
        best, other = classify(str(model), text, 2)
        assert (best.name, best.score + other.score) == (label, pytest.approx(1))
    told = small_runs.command("predict", model, "[CLS] w110 w120 w130 " + "w140 " * 50)
    assert told.splitlines()[0].endswith("  wild")


def test_an_encoder_gets_a_fresh_head_a_classifier_may_keep_its_own(undisturbed: dict[str, Any], folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    encoder = folder / "encoder"
    shutil.copytree(undisturbed["model"], encoder)
    weights = load_file(encoder / "model.safetensors")
    kept = [name for name in weights if name.startswith("bert.") and "pooler" not in name]
    body = {name.removeprefix("bert."): weights[name] for name in kept}
    save_file(body, encoder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((encoder / "config.json").read_bytes())
    config |= {"architectures": ["BertModel"], "id2label": {"0": "a", "1": "b"}}
    (encoder / "config.json").write_text(json.dumps(config))
    fresh = run(folder, "fresh", model={"path": str(encoder)}, train__steps=2)
    kept = run(folder, "kept", model={"path": undisturbed["model"]}, train__steps=2)
    assert kept["first_loss"] < undisturbed["first_loss"] / 2 < fresh["first_loss"]

    del body["encoder.layer.0.output.dense.weight"]
    save_file(body, encoder / "model.safetensors", metadata={"format": "pt"})
    lacking = r"lacks 1 of the model's weights: bert\.encoder\.layer\.0\.output\.dense\.weight"
    with pytest.raises(BadInput, match=lacking):
        run(folder, "lacking", model={"path": str(encoder)})


def test_peft_loads_an_adapter_with_the_head_that_was_trained_beside_it(folder: Path, tmp_path: Path) -> None:
    """The starting model is an encoder, so that its head is fresh."""
    # Not above: TensorFlow's tests read this module's documents, and their image has no torch.
    from tests.container.test_causal_runs import require_same_logits

    start = small_runs.train_here(small_runs.document(small_runs.prepare(tmp_path), train__steps=2), "start")["model"]
    changes = {"model": {"path": start}, "train__steps": 4, "lora": {"rank": 2}}
    adapter = run(folder, "adapter", **changes)["model"]
    merged = run(folder, "adapter-merged", **{**changes, "lora": {"rank": 2, "merge": True}})["model"]
    require_same_logits("SequenceClassification", start, Path(adapter), merged, num_labels=2)


def test_what_does_not_fit_together_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"the tokenizer has 200 tokens, but the model only 100"):
        run(folder, "vocabulary", model__vocabulary_size=100)
    other = prepare(folder / "other", ["calm", "other", "wild"]) / "evaluation"
    with pytest.raises(BadInput, match=r"has 3 labels and .* 2; label 1 is 'other' in the one and 'wild' in the other"):
        run(folder, "labels", data__evaluation=str(other))
    with pytest.raises(BadInput, match="holds class-labelled rows, and the task needs packed ones"):
        run(folder, "task", task="mlm")
