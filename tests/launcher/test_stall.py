"""Claims about stalls: what a hang is, in every phase, and that no run that is merely slow is called one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.run.progress import DEFAULT_SECONDS, ProgressView, describe_limits, judge_stall, update
from training.telemetry.progress_line import ProgressLine

LINE = ProgressLine(10, phase="training", step_seconds=1.0)


def view(line: ProgressLine = LINE, *, moved: float = 0.0, asked: float = 1000.0) -> ProgressView:
    return ProgressView(line, asked, moved)


def stall(*views: ProgressView, quiet: float = 1e9) -> float | None:
    found = judge_stall(dict(enumerate(views)), DEFAULT_SECONDS, quiet)
    return None if found is None else float(found.partition("up to ")[2].rstrip(")")) * 60


def test_a_run_without_a_step_for_five_minutes_hangs() -> None:
    assert stall(view(asked=299.0), view(asked=299.0)) is None
    assert stall(view(asked=301.0), view(asked=301.0)) == 300.0
    assert stall(view(asked=301.0), view(asked=301.0, moved=10.0)) is None, "any host's progress counts"


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        (replace(LINE, step_seconds=60.0), 1200.0),
        (replace(LINE, save_seconds=900.0), 900.0),
        (replace(LINE, limit=720.0), 720.0),
        (replace(LINE, phase="start"), 3600.0),
        (replace(LINE, phase="compile"), 3600.0),
        (replace(LINE, phase="evaluation"), 1800.0),
        (replace(LINE, phase="save"), 1800.0),
        (replace(LINE, phase="end"), 3600.0),
        (replace(LINE, phase="a phase of its own"), 3600.0),
        (replace(LINE, phase=""), 3600.0),
    ],
)
def test_each_phase_has_its_own_limit(line: ProgressLine, limit: float) -> None:
    assert stall(view(line, asked=limit)) is None
    assert stall(view(line, asked=limit + 1)) == limit
    for steps in ((0.0, 1),), ((0.0, 1), (5.0, 2)):
        seen = replace(view(line, asked=limit + 1), steps=steps)
        assert stall(seen) == (limit if line.phase or len(steps) == 1 else 300.0), "steps show that it trains"
    assert stall(view(line, asked=limit - 1), view(asked=limit - 1)) is None, "the longest of all hosts counts"


def test_time_in_which_the_lines_of_most_hosts_can_not_be_read_does_not_count() -> None:
    read, unread = view(asked=9999.0), view(asked=100.0)
    assert stall(unread, unread) is None, "they may have moved since"
    assert stall(read, unread, unread, unread) is None
    assert stall(read, read, unread, unread) == 300.0, "the host that hangs may be one that can't be read"
    assert stall() is None


def test_a_program_that_tells_no_phase_may_also_write_output() -> None:
    line = replace(LINE, phase="")
    seen = update(update(None, line, 0.0), replace(line, step=11), 5.0)
    seen = update(seen, replace(line, step=11), 900.0)
    assert stall(seen, quiet=10.0) is None
    assert stall(seen, quiet=500.0) == 300.0


def test_the_length_of_a_step_that_is_not_told_is_the_median_of_those_seen() -> None:
    steps = ((10.0, 1), (40.0, 2), (90.0, 1), (190.0, 3))  # it starts again at step 1
    assert replace(view(replace(LINE, step_seconds=0.0)), steps=steps).step_seconds == 40.0


def test_time_in_which_the_launcher_stood_still_does_not_count() -> None:
    seen = view(asked=200.0).later(5000.0)
    assert seen == view(asked=5200.0, moved=5000.0)
    after = update(seen, LINE, 5250.0)
    assert stall(after) is None
    later = update(after, LINE, 5301.0)
    assert stall(later) == 300.0


@given(
    st.lists(st.floats(0.01, 2000.0), min_size=1, max_size=60),
    st.floats(1.0, 15.0),
    st.sampled_from([LINE, replace(LINE, step_seconds=0.0)]),
)
def test_no_run_whose_steps_stay_below_twenty_medians_and_five_minutes_is_called_a_stall(
    factors: list[float], every: float, line: ProgressLine
) -> None:
    """Steps of any length up to the limit, read at any interval."""
    now, read, seen = 0.0, 0.0, update(None, line, 0.0)
    for step, factor in enumerate(factors, line.step + 1):
        now += min(factor, 280.0)
        while read + every < now:
            read += every
            seen = update(seen, replace(line, step=step - 1), read)
            assert stall(seen) is None


def test_the_plan_tells_the_default() -> None:
    text = " ".join(describe_limits(None))
    assert "hangs after 5 minutes without a step (or 20 median steps, or its longest save" in text
    assert "reports no progress never hangs" in text
    assert "hangs after 2 minutes without output" in " ".join(describe_limits(2.0))
