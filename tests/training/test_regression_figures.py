"""Figures of a regression follow from its totals, as they would from the examples one by one."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from training.batch import Signals, StepResult
from training.registry import TASKS, task_of_model
from training.tasks.regression.task import Regression, pearson

values = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=40)


def totals(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    products = (predictions * predictions, labels * labels, predictions * labels)
    return np.array([predictions.sum(), labels.sum(), *(product.sum() for product in products)])


@given(values)
def test_pearson_is_numpys(pairs: list[tuple[float, float]]) -> None:
    predictions, labels = np.array(pairs).T
    assume(predictions.std() > 0.01 and labels.std() > 0.01)
    expected = np.corrcoef(predictions, labels)[0, 1]
    assert pearson(len(pairs), totals(predictions, labels)) == pytest.approx(expected, abs=1e-6)


def test_constant_predictions_are_not_correlated_with_anything() -> None:
    assert pearson(3, totals(np.ones(3), np.arange(3.0))) == 0
    assert pearson(0, np.zeros(5)) == 0


def test_figures_are_means_over_the_rows_that_count() -> None:
    predictions, labels = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 2.0])
    errors = predictions - labels
    sums = {"loss": float((errors**2).sum()), "weight": 3.0, "correct": 0.0}
    counts = np.array([np.abs(errors).sum(), *totals(predictions, labels)])
    figures = Regression.figures(object.__new__(Regression), StepResult(sums, Signals(), counts))
    mse, mae, pearson_r = (errors**2).mean(), np.abs(errors).mean(), np.corrcoef(predictions, labels)[0, 1]
    assert figures == pytest.approx({"loss": mse, "mse": mse, "mae": mae, "pearson": pearson_r})


@pytest.mark.parametrize("task", TASKS)
def test_a_models_configuration_says_which_task_it_is_for(task: str) -> None:
    head = TASKS[task].head
    config = {"architectures": [f"Bert{head.network}"], "problem_type": head.problem_type}
    assert task_of_model(config) == task


def test_a_classifier_of_others_without_a_problem_type_is_a_classifier() -> None:
    assert task_of_model({"architectures": ["BertForSequenceClassification"]}) == "classification"
    assert task_of_model({"architectures": ["BertModel"]}) == "mlm"
