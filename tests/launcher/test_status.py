"""Claims about what `status` and `top` tell: a few lines that a user understands, and frames of any width."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import terminal
from launcher.errors import BadInput, LaunchError
from launcher.provider import ContainerState, LogLine, container_name
from launcher.run import events
from launcher.run import status as run_status
from launcher.run.execution import _JUPYTER_URL
from launcher.run.ledger import Ledger
from launcher.run.status import HostStatus, Status, Top, View, plot, read_status, recent_history, render
from launcher.run.verdict import Cause
from launcher.tpu_vm.host_scripts import has_reports
from tests.launcher.test_runs import FakeProvider, Workstation, detach
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine, parse

WHAT = "the host went away and came back; its container was killed with it"
EVENTS: tuple[events.RunEvent, ...] = (
    events.AttemptBegan(0, image="sha256:1f"),
    events.Started(0),
    events.HostOutOfReach(0, 1, "timed out"),
    events.HostBack(0, 1),
    events.Ended(0, "host lost", Cause(0, WHAT)),
    events.PostMortemWritten(0, "post-mortem-0.tar.gz"),
    events.Recovering(0, "host lost", "preemption 1 of 10", 0.0),
    events.AttemptBegan(1, image="sha256:1f"),
    events.Started(1),
    events.Recovered(1, {"delay": 0.0, "slice": 2.9, "start": 8.3}),
    events.StragglerFound(1, 1, "data_wait", 1.83, 1200),
    events.Ended(1, "preempted", Cause(-1, "the slice is PREEMPTED")),
)


def test_the_story_of_a_recovery_is_a_few_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Clock())
    for event in EVENTS:
        ledger.append(event)
    assert [line.partition(" ")[2] for line in recent_history(ledger)] == [
        "attempt 0: host 1 out of reach: timed out",
        "attempt 0: host 1 back",
        f"attempt 0: ended: host lost: host 0: {WHAT}",
        "attempt 0: recover: preemption 1 of 10",
        "attempt 1: started",
        "attempt 1: recovered: in 11.2 s: delay 0.0 s, slice 2.9 s, start 8.3 s",
        "attempt 1: straggler on host 1: 1.8 times the others' time in data_wait since step 1,200",
        "attempt 1: ended: preempted",
    ]


def test_a_terminal_shows_hosts_words_as_they_are_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[31m[/app/train.py:12] [rank0] :100: [bold]\x1b]0;title\x07\x9b2J\r\udcff\u202e"
    shown = "[/app/train.py:12] [rank0] :100: [bold]␛]0;title␇\ufffd2J␍\ufffd\ufffd"
    terminal.table(["line"], [[hostile]])
    terminal.host_line(0, LogLine("", hostile))
    terminal.show(hostile)
    terminal.say(hostile, dim=True)
    terminal.error(hostile)
    printed = capsys.readouterr()
    assert printed.out.split("\n")[1:] == [shown, f"[0] {shown}", shown, ""]
    assert [line.endswith(f" {shown}") for line in printed.err.split("\n")] == [True, True, False]
    terminal.dump(hostile)
    assert json.loads(capsys.readouterr().out) == hostile


def test_rows_tell_how_long_a_host_has_been_quiet_where_that_is_known() -> None:
    hosts = [HostStatus(0, "10.0.0.1", "running", "step 5", 120.0), HostStatus(1, "10.0.0.2", "out of reach", "")]
    status = Status("demo", None, "r", 0, None, [], hosts, ProgressLine(5))
    assert status.lines()[2] == "  step 5"
    line = ProgressLine(5, 10, "training", loss=2.5, examples_per_second=1234.5)
    assert run_status.describe_progress(line) == "step 5/10, training, loss 2.50000, 1,234.5 examples/s"
    running, lost = ["10.0.0.1", "running", "2 min ago", "step 5"], ["10.0.0.2", "out of reach", "", ""]
    assert status.rows() == [["0", *running], ["1", *lost]]


def test_hosts_are_asked_while_an_attempt_is_open_on_a_slice_that_is_ready(work: Workstation) -> None:
    def read(run_id: str | None = None) -> Status:
        return read_status(work.config(), work.context(), FakeProvider(work.config(), work.hosts), run_id)

    assert read().lines()[1:] == ["no run was started from this folder yet"]
    work.hosts.slice_state = None
    with pytest.raises(LaunchError):
        work.run(work.config())
    assert (read().attempt, read().lines()[1].partition(": ")[2]) == (None, "never started")
    work.hosts.exits[0], work.hosts.slice_state = None, "READY"
    detach(work, work.config())
    work.hosts.silent, work.hosts.line = {1}, "50 %\r99 %"
    work.ledger.log_file(0, 1).write_text("2026-01-01T00:00:00Z kept\n")
    work.ledger.keep_progress(0, ProgressLine(5))
    status = read()
    shown = [(host.address, host.container, host.last_line) for host in status.hosts]
    assert shown == [("10.0.0.1", "running", "99 %"), ("10.0.0.2", "not reachable: timed out", "kept")]
    assert status.hosts[0].quiet_seconds == pytest.approx(work.clock.time() - 1_767_225_600, abs=60)
    assert (status.progress, status.attempt) == (ProgressLine(5), 0)
    work.hosts.slice_state = "PREEMPTED"
    assert read().hosts == []
    work.hosts.slice_state = "READY"
    work.ledger.append(events.Ended(0, "saved"))
    assert (read().hosts, read().lines()[1].partition(": ")[2]) == ([], "attempt 0, saved")
    with pytest.raises(BadInput, match="there is no run 'absent' here"):
        read("absent")


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
    head = ("attempt 1, running", "READY", "$6.44", "step 1,200/5,000   24%", "loss 5.04762", "812.3 examples/s")
    of_hosts = ("data wait 7%", "1:17:52 left", "12.3/188 GiB", "result 42 s", "?", "not reachable")
    for words in (*head, *of_hosts, "7.591", "5.048", "attempt 1: started"):
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
    assert render(replace(VIEW, hosts=[HostStatus(0, "10.0.0.1", "running", "x" * count)]), 80)
    assert time.process_time() - begun < 5.0


def test_a_look_reads_the_curve_of_all_attempts_once_and_asks_hosts_for_the_rest(work: Workstation) -> None:
    work.hosts.exits = [75, None, None]
    detach(work, work.config())
    ledger = work.ledger
    ledger.append(events.Ended(0, "saved", None))
    ledger.append(events.AttemptBegan(1, image="i", command=["train"]))
    work.hosts.state[container_name(ledger.run_id, 1)] = ContainerState("running")
    for attempt, step, loss in ((0, 1, 9.0), (0, 2, 8.0), (0, 3, 7.5), (1, 3, 7.0)):
        ledger.keep_progress(attempt, ProgressLine(step, 50, loss=loss))
    top = Top(work.config(), work.context(), FakeProvider(work.config(), work.hosts))
    work.hosts.slice_state = "DELETED"  # a JobSet that is not there, as before it is made
    first = top.look()
    assert "READY" in first.slice
    work.hosts.slice_state = "READY"
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
