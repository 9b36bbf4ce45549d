"""A regression is trained from a CSV file to predictions, whose figures are its own. tests/tensorflow does the same."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.container import small_runs
from training.models.hugging_face import read_config
from training.models.predict import classify

EVALUATED = 37


def examples(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of words below 100 and above; the score is the balance of the two, between -1 and 1."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        size, share = (4, 5, 6, 12)[number % 4], chance.random()
        words = [
            chance.randrange(100, 190) if chance.random() < share else chance.randrange(5, 95) for _ in range(size)
        ]
        balance = 2 * sum(word >= 100 for word in words) / size - 1
        made.append({"text": " ".join(f"w{word}" for word in words), "score": balance})
    return made


def prepare(
    folder: Path, train: int = 160, evaluation: int = EVALUATED, scores: dict[int, float] | None = None
) -> Path:
    """Tokenizer and shards, by the command that users have. `scores`: of some rows to train with, other ones."""
    small_runs.write_tokenizer(folder / "tokenizer")
    rows = examples(train, 1)
    for number, score in (scores or {}).items():
        rows[number]["score"] = score
    small_runs.write_csv(folder / "train.csv", rows)
    small_runs.write_csv(folder / "evaluation.csv", examples(evaluation, 2))
    small_runs.labelled_shards(folder, "regression", ".csv", "--label", "score")
    return folder


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    return small_runs.labelled_document(folder, "regression", **{"seed": 2, **changes})


def assert_figures_are_those_of_predictions(folder: Path, summary: dict[str, Any]) -> None:
    """Each example of the evaluation set once: predicted one by one by the exported model."""
    rows = examples(EVALUATED, 2)
    predictions = np.array([classify(summary["model"], row["text"], 1)[0].score for row in rows])
    labels = np.array([row["score"] for row in rows])
    errors = predictions - labels
    assert summary["eval_mse"] == pytest.approx((errors**2).mean(), rel=1e-4)
    assert summary["eval_mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert summary["eval_pearson"] == pytest.approx(np.corrcoef(predictions, labels)[0, 1], abs=1e-4)
    assert read_config(summary["model"])["problem_type"] == "regression"


def assert_learnt(summary: dict[str, Any]) -> None:
    assert summary["last_loss"] < summary["first_loss"] / 3
    assert summary["eval_loss"] == summary["eval_mse"]
    assert summary["eval_pearson"] > 0.85


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("regression"))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return small_runs.train_here(document(folder), "undisturbed")


def test_it_learns_and_its_figures_are_those_of_its_predictions(folder: Path, undisturbed: dict[str, Any]) -> None:
    assert_learnt(undisturbed)
    assert_figures_are_those_of_predictions(folder, undisturbed)


def test_predict_prints_the_number(undisturbed: dict[str, Any]) -> None:
    numbers = []
    for text in ("w110 w120 w130 w140", "w10 w20 w30 w40"):
        numbers.append(float(small_runs.command("predict", undisturbed["model"], text).split()[0]))
        assert numbers[-1] == pytest.approx(classify(undisturbed["model"], text, 1)[0].score, abs=1e-4)
    assert numbers[0] > numbers[1] + 0.1
