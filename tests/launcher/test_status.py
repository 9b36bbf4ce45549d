"""Claims about what `status` tells of a run that was recovered: a few lines, and nothing that only a reader of the code
understands."""

import json
from pathlib import Path

import pytest

from launcher.cli import terminal
from launcher.provider import LogLine, SliceState
from launcher.run import events
from launcher.run.ledger import Ledger
from launcher.run.status import HostStatus, Status, recent_history
from launcher.run.verdict import Cause
from training.machine.clock import Clock
from training.telemetry.progress_line import ProgressLine

WHAT = "the host went away and came back; its container was killed with it"
EVENTS: tuple[events.RunEvent, ...] = (
    events.AttemptBegan(0, image="sha256:1f"),
    events.Started(0),
    events.HostOutOfReach(0, 1, "timed out"),
    events.HostBack(0, 1),
    events.Ended(0, "host lost", Cause(1, WHAT)),
    events.PostMortemWritten(0, "post-mortem-0.tar.gz"),
    events.Recovering(0, "host lost", "preemption 1 of 10", 0.0),
    events.AttemptBegan(1, image="sha256:1f"),
    events.Started(1),
    events.Recovered(1, {"delay": 0.0, "slice": 2.9, "start": 8.3}),
)


def test_the_story_of_a_recovery_is_a_few_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Clock())
    for event in EVENTS:
        ledger.append(event)
    assert [line.partition(" ")[2] for line in recent_history(ledger)] == [
        "attempt 0: started",
        "attempt 0: host 1 out of reach: timed out",
        "attempt 0: host 1 back",
        f"attempt 0: ended: host lost: host 1: {WHAT}",
        "attempt 0: recover: preemption 1 of 10",
        "attempt 1: started",
        "attempt 1: recovered: in 11.2 s: delay 0.0 s, slice 2.9 s, start 8.3 s",
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


@pytest.mark.parametrize(("detail", "shown"), [("", "2 hosts"), ("health: UNHEALTHY", "2 hosts (health: UNHEALTHY)")])
def test_a_slice_is_shown_with_what_google_says_of_it(detail: str, shown: str) -> None:
    slice_ = SliceState("demo", "READY", "", "v4-16", ("10.0.0.1", "10.0.0.2"), detail)
    assert Status("demo", slice_, None, None, None, [], []).lines()[0] == f"slice demo: READY, v4-16, {shown}"


def test_rows_tell_how_long_a_host_has_been_quiet_where_that_is_known() -> None:
    hosts = [HostStatus(0, "10.0.0.1", "running", "step 5", 120.0), HostStatus(1, "10.0.0.2", "out of reach", "")]
    status = Status("demo", None, "r", 0, None, [], hosts, ProgressLine(5))
    assert "step 5" in status.lines()[2]
    running, lost = ["10.0.0.1", "running", "2 min ago", "step 5"], ["10.0.0.2", "out of reach", "", ""]
    assert status.rows() == [["0", *running], ["1", *lost]]
