"""Claims about `tpu-launch top`: what a frame shows, at any width, and where its figures come from."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.provider import ContainerState, container_name
from launcher.run import events
from launcher.run.execution import _JUPYTER_URL
from launcher.run.status import HostStatus
from launcher.run.top import Top, View, plot, render
from launcher.tpu_vm.host_output import has_reports
from tests.launcher.test_runs import FakeProvider, Hosts, Workstation, detach
from training.telemetry.progress_line import ProgressLine, parse

GIB = 2**30
LOSSES = {step: 5.0 + 2.6 * math.exp(-step / 300) for step in range(1, 1201, 5)}
HOST_0 = ProgressLine(
    1200, 5000, "training", "result", 42.0, step_seconds=0.8, memory_used=int(12.34 * GIB), memory_total=188 * GIB,
    loss=5.04762, examples_per_second=812.34, data_wait=0.07, left="1:17:52", device_memory_used=int(21.5 * GIB),
    device_memory_total=32 * GIB, bytes_read=7 * GIB,
)  # fmt: skip
VIEW = View(
    slice="slice demo: READY, v4-16, 2 hosts",
    run="run demo-1122-103000-1f2e: attempt 1, running",
    time="2026-11-22T10:45:00Z",
    progress=HOST_0,
    losses=LOSSES,
    hosts=[
        HostStatus(0, "10.0.0.1", "running", "step 1200/5000  loss 5.04762", 2.4, HOST_0),
        HostStatus(1, "10.0.0.2", "not reachable: timed out", "compiled the step in 41.2 s", 400.0),
    ],
    cost="created 15 min ago, cost so far: about $6.44 (list prices of 2026-11)",
    history=["2026-11-22T10:31:02Z attempt 1: started"],
)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_frame_shows_the_run_its_curve_its_hosts_and_its_cost(columns: int) -> None:
    text = "\n".join(render(VIEW, columns))
    assert text.index("10:45:00Z\n") == columns - 9
    for words in ("attempt 1, running", "READY", "$6.44", "step 1,200/5,000   24%", "loss 5.04762", "812.3 examples/s"):
        assert words in text
    for words in ("data wait 7%", "1:17:52 left", "12.3/188 GiB", "result 42 s", "?", "not reachable"):
        assert words in text
    for words in ("7.591", "5.048", "attempt 1: started"):
        assert words in text
    for words in ("10.0.0.1", "21.5/32 GiB", "7.0 GiB"):
        assert (words in text) == (columns == 120), "where there is room"


@pytest.mark.parametrize(
    ("line", "steps", "row"),
    [
        (ProgressLine(7, phase="save", doing="write", doing_seconds=99.0, loss=1.0), "step 7", "7 save"),
        (ProgressLine(7, 70, "training", "result", 10.0),
         f"step 7/70   10%  {'█' * 4}{'░' * 36}   0.0 examples/s   data wait 0%", "7 training"),
    ],
)  # fmt: skip
def test_a_frame_shows_only_what_is_told(line: ProgressLine, steps: str, row: str) -> None:
    hosts = [HostStatus(0, "10.0.0.1", "running", "words", None, line)]
    frame = render(replace(VIEW, progress=line, losses={7: 1.0}, cost="", hosts=hosts), 160)
    assert frame[2:5] == ["", steps, ""]
    assert frame[6].split() == f"0 10.0.0.1 running {row} ? ? ? words".split()


def test_of_many_hosts_those_that_differ_fit_a_small_terminal() -> None:
    hosts = [HostStatus(worker, "10.0.0.1", "running", "", 2.4, HOST_0) for worker in range(64)]
    hosts[17] = replace(hosts[17], progress=replace(HOST_0, step=1199))
    hosts[50] = replace(VIEW.hosts[1], worker=50)
    lines = render(replace(VIEW, hosts=hosts), 80, 24)
    assert len(lines) == 24
    assert [line.split()[0] for line in lines[-6:-3]] == ["host", "17", "50"]
    assert lines[-3] == "and 62 more"
    assert len(render(VIEW, 80, 24)) == len(render(VIEW, 80)), "two fit"


def test_the_whole_cause_of_an_end_is_shown_and_no_table_without_hosts() -> None:
    cause = "attempt 1: ended: stalled: host 1: 1 of 2 hosts wait; host 1 is in prepare at my_program.py:29 for 312 s"
    lines = render(replace(VIEW, hosts=[], history=["attempt 1: started", cause]), 80)
    assert " ".join(line.strip() for line in lines[-2:]) == cause
    assert not any(line.startswith("host ") for line in lines)
    assert render(replace(VIEW, run="r" * 37, time="now"), 40)[0] == "r" * 37 + "  …", "two blanks before the time"


@given(st.integers(40, 240), st.dictionaries(st.integers(0, 10**7), st.floats(), max_size=30))
def test_no_line_of_a_frame_is_wider_than_the_terminal(columns: int, losses: dict[int, float]) -> None:
    assert all(len(line) <= columns for line in render(replace(VIEW, losses=losses), columns))


def test_a_curve_begins_high_and_ends_low_where_the_loss_does() -> None:
    head, first, *_, last, steps = plot({100: 8.0, 150: 6.0, 200: 4.0}, 60, 5)
    assert head == "   loss"
    assert first == "      8 │⠁"
    assert (last.startswith("      4 │"), last[-1]) == (True, "⢀"), "the last point is in the last column"
    assert len(last) == 60
    assert steps == f"   step  100{'200':>48}"
    assert plot({1: 2.0, 9: 2.0}, 60, 5)[1] == f"      2 │⠁{chr(0x2800) * 49}⠈", "a loss that stays the same"


def test_hostile_lines_are_read_in_linear_time() -> None:
    count, begun = 50_000, time.process_time()
    assert not parse("[" * count)
    assert not has_reports("\n" * count)
    assert not _JUPYTER_URL.search("http://localhost:1/" * count)
    hosts = [HostStatus(0, "10.0.0.1", "running", "x" * count)]
    assert render(replace(VIEW, hosts=hosts), 80)
    assert time.process_time() - begun < 5.0


def test_a_look_reads_the_curve_of_all_attempts_once_and_asks_hosts_for_the_rest(tmp_path: Path) -> None:
    work = Workstation(tmp_path, Hosts([75, None, None]))
    detach(work, work.config())
    ledger = work.ledger
    ledger.append(events.Ended(0, "saved", None))
    ledger.append(events.AttemptBegan(1, image="i", command=["train"]))
    work.hosts.state[container_name(ledger.run_id, 1)] = ContainerState("running")
    for attempt, step, loss in ((0, 1, 9.0), (0, 2, 8.0), (0, 3, 7.5), (1, 3, 7.0)):
        ledger.keep_progress(attempt, ProgressLine(step, 50, loss=loss))
    top = Top(work.config(), work.context(), FakeProvider(work.config(), work.hosts))
    first = top.look()
    assert first.losses == {1: 9.0, 2: 8.0, 3: 7.0}
    assert first.progress == ProgressLine(3, 50, loss=7.0), "the newest that is kept"
    assert "attempt 1, running" in first.run
    now = {worker: ProgressLine(4 - worker, 50, loss=6.5, memory_used=worker, memory_total=GIB) for worker in (0, 1)}
    work.hosts.progress = {worker: (line, replace(line, step=9)) for worker, line in now.items()}
    second = top.look()
    assert second.losses[4] == 6.5
    assert [host.progress for host in second.hosts] == [now[0], now[1]], "of the slowest process of each host"
    assert second.progress == now[0]
    ledger.append(events.Ended(1, "finished", None))
    detach(work, work.config())
    assert top.look().losses == {4: 6.5}, "of the next run"
    work.hosts.progress = {0: (ProgressLine(5, 50),)}
    assert top.look().losses == {4: 6.5}, "a step without a loss has none"
