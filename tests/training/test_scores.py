"""A classifier's figures follow from its confusion matrix, a regression's from its totals, as from single examples."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from training.batch import Signals, StepResult
from training.config import Model
from training.errors import BadInput
from training.models.hugging_face import ModelRequirements, build_model_config, read_labels, usable_positions
from training.registry import TASKS, task_of_model
from training.tasks.labels import Regression, accuracy, check_labels, pearson, weighted_f1

Pairs = Sequence[tuple[int, int]]  # true, predicted
CLASSES = 4


def confusion(pairs: Pairs) -> np.ndarray:
    counts = np.zeros((CLASSES, CLASSES))
    for true, predicted in pairs:
        counts[true, predicted] += 1
    return counts


def naive_weighted_f1(pairs: Pairs) -> float:
    """By its definition: precision and recall of each class, one example at a time."""
    total = 0.0
    for label in range(CLASSES):
        true, predicted = sum(t == label for t, _ in pairs), sum(p == label for _, p in pairs)
        hits = sum(t == p == label for t, p in pairs)
        if hits:
            precision, recall = hits / predicted, hits / true
            total += true * 2 * precision * recall / (precision + recall)
    return total / len(pairs)


def test_a_perfect_classifier_has_1_and_no_examples_have_no_figure() -> None:
    assert (weighted_f1(np.diag([3.0, 0.0, 5.0])), accuracy(np.diag([3.0, 0.0, 5.0]))) == (1, 1)
    assert np.isnan([weighted_f1(np.zeros((2, 2))), accuracy(np.zeros((2, 2)))]).all()


classes = st.integers(0, CLASSES - 1)


@given(st.lists(st.tuples(classes, classes), min_size=1, max_size=40))
def test_figures_of_the_matrix_are_those_of_the_examples(pairs: Pairs) -> None:
    assert weighted_f1(confusion(pairs)) == pytest.approx(naive_weighted_f1(pairs))
    assert accuracy(confusion(pairs)) == pytest.approx(sum(t == p for t, p in pairs) / len(pairs))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_range_is_named_with_its_record(label: int) -> None:
    why = f"gs://b/train: record 12 has label {label}, and the dataset has 3 labels, 0 to 2"
    with pytest.raises(BadInput, match=why):
        check_labels("gs://b/train", np.array([0, label, 2], np.int32), np.array([11, 12, 13]), 3)


@pytest.mark.parametrize(("family", "tokens"), [("bert", 514), ("roberta", 512), ("xlm-roberta", 512)])
def test_a_text_is_cut_where_the_familys_positions_end(family: str, tokens: int) -> None:
    assert usable_positions(family, 514, 1) == tokens


def test_a_classifiers_config_names_its_labels_in_order() -> None:
    names = tuple(f"intent {number}" for number in range(12))
    head = TASKS["classification"].head
    config = build_model_config(Model(name="bert-tiny"), ModelRequirements(100, 0, 8, head, names), dropout=None)
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1, "unless train.dropout is set"
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert read_labels(config) == [*names]


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
