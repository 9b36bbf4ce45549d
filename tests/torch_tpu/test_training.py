"""`tpu-train train` with `backend: torch-tpu` on a virtual v4-8: four processes, each with its rows of the batch.

The losses are those of torch-xla's golden file, and what holds on other backends holds: the same bits after a stop and
after a kill.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.golden_losses import DOCUMENTS, GOLDEN, STEPS

SECONDS = 500.0
PRECISION = 1e-5  # relative: four processes add gradients up in another order than one


def train(folder: Path, run_id: str, config: dict[str, Any]) -> dict[str, Any]:
    (host,) = small_runs.start(folder, run_id, config)
    assert host.finish(SECONDS) == 0, host.text()
    return small_runs.summary(folder, run_id)


@pytest.mark.parametrize("task", DOCUMENTS)
def test_losses_of_four_processes_are_those_of_torch_xla(task: str, tmp_path: Path) -> None:
    config = {**DOCUMENTS[task](tmp_path, "torch-tpu")}
    config["train"] = {**config["train"], "precision": "fp32"}
    summary = train(tmp_path, "golden", config)
    golden = json.loads(GOLDEN.read_text())["torch-xla"][task]
    losses = small_runs.losses(tmp_path, "golden")
    assert (summary["devices"], summary["hosts"], len(losses)) == (4, 1, STEPS)
    assert losses == pytest.approx(golden["losses"], rel=PRECISION)
    assert summary["eval_loss"] == pytest.approx(golden["evaluation"], rel=PRECISION)
