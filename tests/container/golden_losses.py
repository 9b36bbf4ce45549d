"""Golden losses: twenty steps of each task whose losses a refactoring must leave as they are.

tests/golden/losses.json holds them for each backend and task; tests/container and tests/tensorflow compare them. To
write them again, after a change that is meant to change numbers, copy what the failing test prints.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.causal_data import document as causal_settings
from tests.container.causal_data import prepare as prepare_causal
from tests.container.test_classification_runs import document as classification_document
from tests.container.test_classification_runs import prepare as prepare_classification
from tests.container.test_label_list_runs import prepare as prepare_lists
from tests.container.test_regression_runs import document as regression_settings
from tests.container.test_regression_runs import prepare as prepare_regression

GOLDEN = Path(__file__).parent.parent / "golden" / "losses.json"
STEPS = 20
# Machines differ in their vector instructions, so in the order in which XLA adds numbers up. On one machine the losses
# are equal.
RELATIVE = 2e-6


def mlm_document(folder: Path, backend: str) -> dict[str, Any]:
    """Twenty steps of masked language modelling, with dropout, warm-up and clipping, on generated rows."""
    small_runs.prepare(folder)
    return small_runs.document(folder, backend=backend, train__steps=STEPS, train__strict=True)


def labelled_document(folder: Path, backend: str) -> dict[str, Any]:
    """Twenty steps of classification, over batches of several lengths."""
    prepare_classification(folder)
    return classification_document(folder, seed=1, backend=backend, train__steps=STEPS, train__learning_rate=0.003)


def regression_document(folder: Path, backend: str) -> dict[str, Any]:
    """Twenty steps of regression, over batches of several lengths."""
    prepare_regression(folder)
    return regression_settings(folder, seed=1, backend=backend, train__steps=STEPS, train__learning_rate=0.003)


def causal_document(folder: Path, backend: str) -> dict[str, Any]:
    """Twenty steps of causal language modelling, over rows of documents."""
    prepare_causal(folder)
    return causal_settings(folder, backend=backend, train__steps=STEPS, train__strict=True)


def list_document(task: str, folder: Path, backend: str) -> dict[str, Any]:
    """Twenty steps of a task with lists of labels and batches of several lengths; no dropout, so that losses agree."""
    prepare_lists(folder, task)
    steps = {"train__steps": STEPS, "train__learning_rate": 0.003, "train__dropout": 0.0}
    return small_runs.labelled_document(folder, task, backend=backend, **steps)


DOCUMENTS = {
    "mlm": mlm_document,
    "classification": labelled_document,
    "regression": regression_document,
    "causal-lm": causal_document,
    **{task: partial(list_document, task) for task in ("multi-label", "token-classification")},
}


def assert_golden(task: str, backend: str, folder: Path) -> None:
    """Trains `task` for twenty steps here and compares every loss, and the last evaluation's, with the golden file."""
    summary = small_runs.train_here(DOCUMENTS[task](folder, backend), "golden")
    seen = {"losses": small_runs.losses(folder, "golden"), "evaluation": summary["eval_loss"]}
    expected = json.loads(GOLDEN.read_text())[backend].get(task)
    assert expected is not None, f"no golden losses of {task} with {backend}; seen: {json.dumps(seen)}"
    verdict = "the same bits as" if seen == expected else "not the same bits as"
    print(f"{backend} {task}: {verdict} the golden losses: {json.dumps(seen)}")
    assert len(seen["losses"]) == STEPS
    assert seen["losses"] == pytest.approx(expected["losses"], rel=RELATIVE), json.dumps(seen)
    assert seen["evaluation"] == pytest.approx(expected["evaluation"], rel=RELATIVE)
