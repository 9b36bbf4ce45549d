"""TensorFlow trains a regression: it learns, and its figures are those of its predictions."""

from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container import test_regression_runs as regression


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regression.prepare(tmp_path_factory.mktemp("regression"))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return small_runs.train_here(regression.document(folder, backend="tensorflow"), "undisturbed")


def test_it_learns_and_its_figures_are_those_of_its_predictions(folder: Path, undisturbed: dict[str, Any]) -> None:
    regression.assert_learnt(undisturbed)
    regression.assert_figures_are_those_of_predictions(folder, undisturbed)


def test_a_run_and_its_model_are_evaluated_alike(folder: Path, undisturbed: dict[str, Any]) -> None:
    for place in (str(folder / "runs" / "undisturbed"), undisturbed["model"]):
        figures = small_runs.evaluate_here(regression.document(folder, backend="tensorflow"), place).figures
        for name, value in figures.items():
            assert value == pytest.approx(undisturbed[f"eval_{name}"], rel=1e-5)
