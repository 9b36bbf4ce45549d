"""Claims about what `status` tells of a run that was recovered: a few lines that a user understands."""

import json
from pathlib import Path

import pytest

from launcher.cli import terminal
from launcher.errors import BadInput
from launcher.provider import LogLine
from launcher.run import events
from launcher.run.ledger import Ledger
from launcher.run.status import HostStatus, Status, describe_progress, read_status, recent_history
from launcher.run.verdict import Cause
from tests.launcher.test_runs import FakeProvider, Workstation, detach
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine

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
    assert describe_progress(line) == "step 5/10, training, loss 2.50000, 1,234.5 examples/s"
    running, lost = ["10.0.0.1", "running", "2 min ago", "step 5"], ["10.0.0.2", "out of reach", "", ""]
    assert status.rows() == [["0", *running], ["1", *lost]]


def test_hosts_are_asked_while_an_attempt_is_open_on_a_slice_that_is_ready(work: Workstation) -> None:
    def read(run_id: str | None = None) -> Status:
        return read_status(work.config(), work.context(), FakeProvider(work.config(), work.hosts), run_id)

    assert read().lines()[1:] == ["no run was started from this folder yet"]
    work.hosts.exits[0] = None
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
