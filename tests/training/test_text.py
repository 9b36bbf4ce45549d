"""Claims about the lines that people and the launcher read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.telemetry import text
from training.telemetry.text import ProgressFigures, format_progress, parse_progress


@given(
    step=st.integers(0, 10**9),
    more=st.integers(0, 10**9),
    loss=st.floats(0, 1e6),
    rate=st.floats(0, 1e9),
    wait=st.floats(0, 1),
    remaining=st.floats(0, 1e7),
)
def test_a_progress_line_is_parsed_to_what_was_formatted(
    step: int, more: int, loss: float, rate: float, wait: float, remaining: float
) -> None:
    line = format_progress(step, step + more, loss, rate, wait, remaining)
    expected = ProgressFigures(
        step,
        step + more,
        float(f"{loss:.5f}"),
        float(f"{rate:.1f}"),
        int(f"{wait:.0%}"[:-1]) / 100,
        text.format_remaining(remaining),
    )
    assert parse_progress(line) == expected
    assert parse_progress(f"2026-11-21T22:40:00Z {line}\r") == expected


@pytest.mark.parametrize(
    "line", ["", "evaluation after step 40: loss 1.50000", "step 1/2  loss what  3 examples/s", "Step 3 of 4, loss 2.0"]
)
def test_other_lines_hold_no_progress(line: str) -> None:
    assert parse_progress(line) is None


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0:00"), (67, "1:07"), (7503, "2:05:03"), (-3, "0:00")])
def test_remaining_time(seconds: float, expected: str) -> None:
    assert text.format_remaining(seconds) == expected


def test_the_summary_has_the_main_figures() -> None:
    values: dict[str, Any] = {
        "hosts": 2,
        "devices": 8,
        "steps": 60,
        "first_loss": 7.6,
        "last_loss": 5.1,
        "eval_loss": 5.2,
        "eval_perplexity": 181.3,
        "examples_per_second": 1234.5,
        "compilations": 2,
        "checkpoint": "gs://b/c",
        "seconds": {"step": 10.0, "other": 0.01, "total": 12.0},
    }
    summary = text.format_summary(values)
    assert "7.6000 -> 5.1000" in summary
    assert "perplexity 181.30" in summary
    assert "1,234.5 examples/s" in summary
    assert "other" not in summary
