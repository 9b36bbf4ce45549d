"""Claims about stalls and stragglers: what a hang is in every phase, that no run that is merely slow is called one, and
that a straggler is told once when it begins and once when it ends."""

import random
import re
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.run import progress
from launcher.run.progress import WINDOWS, HostsProgress, ProgressView, Straggler, judge_stall, seconds_a_step, update
from training.telemetry.progress_line import ProgressLine

Slow = dict[int, tuple[str, float]]
LINE = ProgressLine(10, phase="training", step_seconds=1.0)


def view(line: ProgressLine = LINE, *, moved: float = 0.0, asked: float = 1000.0) -> ProgressView:
    return ProgressView(line, asked, moved)


def stall(*views: ProgressView, quiet: float = 1e9) -> float | None:
    found = judge_stall(dict(enumerate(views)), None, quiet)
    return None if found is None else float(found.partition("up to ")[2].rstrip(")")) * 60


def test_a_run_that_reports_no_progress_hangs_if_it_writes_nothing_for_as_long_as_its_file_says() -> None:
    assert judge_stall({}, 1.0, 60.0) is None
    assert judge_stall({}, 1.0, 61.0) == "no host has written a line for 1.0 minutes"
    assert judge_stall({}, None, 1e9) is None, "without a limit"
    assert judge_stall({0: view(asked=61.0)}, 1.0, 0.0) == "no progress for 1.0 minutes (normal: up to 1.0)"


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
        *((replace(LINE, phase=phase), 1800.0) for phase in ("evaluation", "save")),
        *((replace(LINE, phase=phase), 3600.0) for phase in ("start", "compile", "end", "a phase of its own", "")),
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
    seen = replace(view(asked=200.0), asked=5200.0, moved=5000.0)
    assert seen == view(asked=5200.0, moved=5000.0)
    after = update(seen, LINE, 5250.0)
    assert stall(after) is None
    assert stall(update(after, LINE, 5301.0)) == 300.0


@given(
    st.lists(st.floats(0.01, 2000.0), min_size=1, max_size=60),
    st.floats(1.0, 15.0),
    st.sampled_from([LINE, replace(LINE, step_seconds=0.0)]),
)
def test_no_run_stalls_whose_steps_keep_to_the_limits(factors: list[float], every: float, line: ProgressLine) -> None:
    """Steps of any length up to the limit, read at any interval."""
    now, read, seen = 0.0, 0.0, update(None, line, 0.0)
    for step, factor in enumerate(factors, line.step + 1):
        now += min(factor, 280.0)
        while read + every < now:
            read += every
            seen = update(seen, replace(line, step=step - 1), read)
            assert stall(seen) is None


def test_the_plan_tells_the_default() -> None:
    text = " ".join(progress.describe_limits(None))
    assert "hangs after 5 minutes without a step (or 20 median steps, or its longest save" in text
    assert "reports no progress never hangs" in text
    assert "hangs after 2 minutes without output" in " ".join(progress.describe_limits(2.0))


class Hosts:
    """Hosts that take a second a step."""

    def __init__(self, count: int) -> None:
        self.step, self.ledger = 0, Mock()
        self.progress = HostsProgress(self.ledger, 0, lambda text: None)
        self.seconds = [{"data_wait": 0.0, "dispatch": 0.0, "result": 0.0} for _ in range(count)]

    @property
    def told(self) -> list[str]:
        """Returns kind, host and part of each event."""
        return [f"{event.kind} {event.host} {event.part}" for ((event, _), _) in self.ledger.note.call_args_list]

    def windows(self, *slow: Slow, noise: float = 0.0) -> list[str]:
        """Goes through windows, in each of which hosts take more seconds for a part. Returns what is told by then."""
        for hosts in slow:
            self.step += 30
            rng = random.Random(self.step)
            for worker, seconds in enumerate(self.seconds):
                part, more = hosts.get(worker, ("dispatch", 0.0))
                own = {"data_wait": 0.2, "dispatch": 0.3}
                own[part] += more
                for name, amount in own.items():
                    seconds[name] += 30 * amount * (1 + rng.uniform(-noise, noise))
                seconds["result"] += 0 if more else 30 * 0.5
                self.progress.views[worker] = update(None, ProgressLine(self.step, seconds=dict(seconds)), 0.0)
            self.progress._end_window(float(self.step))
        return self.told


def test_a_straggler_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    hosts, slow, begun = Hosts(4), {2: ("data_wait", 0.4)}, "straggler 2 data_wait"
    assert hosts.windows(*[{}] * 4, *[slow] * (WINDOWS - 1)) == []
    assert hosts.windows(*[*[slow] * (WINDOWS - 1), {}] * 5) == [begun], "a window without it does not end it"
    assert hosts.windows(*[{}] * 20) == [begun, f"no {begun}"]


def test_a_run_that_stands_still_ends_no_straggler() -> None:
    hosts = Hosts(2)
    assert hosts.windows(*[{1: ("dispatch", 3.0)}] * (WINDOWS + 1)) == ["straggler 1 dispatch"]
    progress = hosts.progress
    window, begun, views = progress._window, progress._window_begun, dict(progress.views)
    for number in range(1, 2 * WINDOWS):
        progress._end_window(hosts.step + 40.0 * number)
        assert progress._window is window, "no host made a step, so none is as fast as the others again"
    assert hosts.told == ["straggler 1 dispatch"]
    progress.views = dict.fromkeys(views, update(None, ProgressLine(9999), 0.0))
    progress._end_window(begun + 29.0)
    progress.views = {**views, 2: update(None, ProgressLine(0), 0.0)}
    progress._end_window(1e9)
    assert progress._window is window, "a host that joins makes no window"


def test_a_straggler_is_one_host_in_several_windows_from_the_first_on() -> None:
    one, others = {1: ("dispatch", 3.0)}, ({worker: ("dispatch", 3.0)} for worker in (0, 2, 3))
    assert Hosts(4).windows({}, *[one] * (WINDOWS - 1), *others) == []


def test_hosts_that_differ_by_a_third_or_for_one_window_are_no_stragglers() -> None:
    windows = ({number % 8: ("dispatch", 0.5)} if number % 5 == 0 else {} for number in range(60))
    assert Hosts(8).windows(*windows, noise=0.15) == []


def test_a_straggler_takes_half_as_long_again_as_the_others_and_a_tenth_of_the_step_more() -> None:
    def find(others: float, own: float) -> Straggler | None:
        before = {worker: ProgressLine(10, seconds={"save": 7.0, "dispatch": 7.0}) for worker in range(3)}
        takes = [others, own, others, 99.0]
        now = {worker: ProgressLine(18, seconds={"save": 7.0 + takes[worker], "dispatch": 12.0}) for worker in range(4)}
        return progress.find_straggler(seconds_a_step(before, now), now)

    assert find(4.0, 6.0) == Straggler(1, "save", 1.5, 18)
    assert find(0.0, 6.0) == Straggler(1, "save", 1000.0, 18)
    assert find(3.0, 4.4) is find(0.3, 0.8) is None


def test_hosts_that_do_not_step_or_started_again_make_no_window() -> None:
    hosts = Hosts(2)
    for worker in range(2):
        hosts.progress.views[worker] = update(None, ProgressLine(5, seconds={"data_wait": 9.0 * worker}), 0.0)
    for now in range(0, 400, 31):
        hosts.progress._end_window(float(now))
    assert hosts.told == []
    assert str(Straggler(5, "data_wait", 1.83, 12_400)) == "host 5 takes 1.8 times the others' time in data wait"


def test_the_heat_map_shows_the_slow_host_and_keeps_few_columns() -> None:
    windows = [{"step": step, "seconds": {"0": 1.0, "10": 1.0, "2": 1.0 + (step == 500)}} for step in range(1, 1001)]
    picture = progress.draw_hosts(windows)
    assert xml.etree.ElementTree.fromstring(picture) is not None
    assert picture.count("<title>host 2,") == 200, "several windows a column"
    assert picture.index("host 2,") < picture.index("host 10,")
    assert re.findall(r'opacity="1.00"><title>([^<]*)', picture) == ["host 2, step 500: 2 s"]


def test_a_long_step_of_all_hides_no_straggler_in_the_heat_map_and_noise_is_faint() -> None:
    def strength(seconds: float) -> float:
        steps = [{"0": 1.0, "1": 1.0}, {"0": 60.0, "1": 60.0}, {"0": 1.0, "1": seconds}, {"0": 1.0, "1": 1.0}]
        picture = progress.draw_hosts([{"step": step, "seconds": each} for step, each in enumerate(steps)])
        return float(re.findall(r'opacity="(\S+)"><title>host 1, step 2:', picture)[0])

    assert strength(1.8) > 0.7
    noise = progress.draw_hosts([{"step": 1, "seconds": {"0": 1.0, "1": 1.04}}])
    assert max(map(float, re.findall(r'opacity="(\S+)"', noise))) < 0.2


def test_a_line_that_a_full_disk_cut_costs_the_heat_map_only_its_own_step(tmp_path: Path) -> None:
    window, kept = '{"step": %d, "seconds": {"0": 1.0}}', HostsProgress(Mock(folder=tmp_path), 0, lambda text: None)
    (tmp_path / "hosts-0.jsonl").write_text("\n".join([window % 1, window[:20] % 2, window % 3, (window % 4)[:9]]))
    kept.draw()
    assert re.findall(r"host 0, step (\d)", (tmp_path / "hosts-0.svg").read_text()) == ["1", "3"]


def test_only_hosts_that_made_steps_since_have_seconds_a_step() -> None:
    before = {worker: ProgressLine(10, seconds={"dispatch": 1.0 + worker}) for worker in (0, 1, 2, 3)}
    waits = ProgressLine(20, seconds={"dispatch": 6.0, "result": 20.0})
    now = {0: waits, 1: ProgressLine(20, seconds={"dispatch": 27.0})}
    now |= {2: ProgressLine(20, seconds={"dispatch": 1.0}), 3: before[3], 4: waits}  # started again, stands still, new
    assert seconds_a_step(before, now) == {0: {"dispatch": 0.5, "result": 2.0}, 1: {"dispatch": 2.5}}
    hosts = Hosts(2)
    hosts.windows({}, {})
    assert hosts.ledger.keep_hosts.call_args.args == (0, 60, {0: 0.5, 1: 0.5}), "without waits for results"
