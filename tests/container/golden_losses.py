"""Golden losses: twenty steps of each task whose losses a refactoring must leave as they are.

tests/golden/losses.json holds them for each backend and task; tests/container and tests/tensorflow compare them. To
write them again, after a change that is meant to change numbers, copy what the failing test prints.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.container import causal_data, small_runs
from tests.container import test_classification_runs as classification
from tests.container import test_label_list_runs as lists
from tests.container import test_regression_runs as regression

GOLDEN = Path(__file__).parent.parent / "golden" / "losses.json"
STEPS = 20
# Machines differ in their vector instructions, so in the order in which XLA adds numbers up. On one machine the losses
# are equal.
RELATIVE = 2e-6


def prepare(task: str, folder: Path, backend: str) -> dict[str, Any]:
    """Writes a task's data. Returns the configuration of twenty steps: labelled rows are in batches of several lengths,
    and where labels are lists, there is no dropout, so that backends agree."""
    changes = {"backend": backend, "train__steps": STEPS}
    if task in ("mlm", "causal-lm"):
        module: Any = small_runs if task == "mlm" else causal_data
        return dict(module.document(module.prepare(folder), train__strict=True, **changes))
    changes["train__learning_rate"] = 0.003
    if task in ("classification", "regression"):
        module = classification if task == "classification" else regression
        return dict(module.document(module.prepare(folder), seed=1, **changes))
    return small_runs.labelled_document(lists.prepare(folder, task), task, train__dropout=0.0, **changes)


TASKS = ("mlm", "classification", "regression", "causal-lm", "multi-label", "token-classification")
DOCUMENTS = {task: partial(prepare, task) for task in TASKS}


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
