"""Claims about the lines that people and the launcher read."""

from typing import Any

import pytest

from training.telemetry import console as text


def test_a_progress_line_shows_step_loss_rate_data_wait_and_time_left() -> None:
    line = text.format_progress(7, 100, 5.0476, 1812.34, 0.07, 67)
    assert line == "step   7/100  loss 5.04760  1,812.3 examples/s  7% data wait  1:07 left"


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0:00"), (67, "1:07"), (7503, "2:05:03"), (-3, "0:00")])
def test_remaining_time(seconds: float, expected: str) -> None:
    assert text.format_remaining(seconds) == expected


def test_the_summary_has_the_main_figures() -> None:
    values: dict[str, Any] = {
        "hosts": 2, "devices": 8, "steps": 60, "first_loss": 7.6, "last_loss": 5.1, "eval_loss": 5.2,
        "eval_perplexity": 181.3, "examples_per_second": 1234.5, "compilations": 2, "checkpoint": "gs://b/c",
        "seconds": {"step": 10.0, "other": 0.01, "total": 12.0},
    }  # fmt: skip
    summary = text.format_summary(values)
    assert "7.6000 -> 5.1000" in summary
    assert "perplexity 181.30" in summary
    assert "1,234.5 examples/s" in summary
    assert "other" not in summary
