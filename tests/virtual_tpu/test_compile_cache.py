"""Compiled programs outlive the process: a second attempt on the same host compiles nothing, and trains to the same
bits. What was damaged in between is compiled again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs

SECONDS = 560.0  # beside other tests
pytestmark = pytest.mark.timeout(SECONDS + 40)


def attempt(folder: Path, run_id: str, programs: Path) -> tuple[dict[str, Any], str]:
    """The summary of a run of four steps and an evaluation, and what it printed."""
    config = small_runs.document(folder, train__steps=4, train__strict=True)
    (host,) = small_runs.start(folder, run_id, config, TPU_LAUNCH_COMPILE_CACHE=str(programs))
    assert host.finish(SECONDS) == 0, host.text()
    return small_runs.summary(folder, run_id), host.text()


def test_a_second_start_compiles_only_what_was_damaged_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    folder, programs = small_runs.prepare(tmp_path / "data"), tmp_path / "programs"
    first, _ = attempt(folder, "first", programs)
    assert first["devices"] == 8
    assert first["programs_from_cache"] == 0
    assert first["compilations"] == 2, "of the step, and of the evaluation"

    evaluation, _step = sorted(programs.iterdir(), key=lambda entry: entry.stat().st_size)
    content = evaluation.read_bytes()
    evaluation.write_bytes(content[: len(content) // 2])
    second, text = attempt(folder, "second", programs)
    assert (second["programs_from_cache"], second["compilations"]) == (1, 2)
    assert "attempt 0: first step after " in text
    assert "; 1 program(s), 1 of them from the cache" in text
    assert evaluation.stat().st_size > 0.9 * len(content), "written again"
    for figure in ("final_weights_crc32c", "eval_loss", "last_loss"):
        assert first[figure] == second[figure]
