"""A run's folder belongs to one launcher at a time, and a run id to one run."""

import errno
import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import ContainerState
from launcher.providers import this_machine
from launcher.run import events
from launcher.run import ledger as ledger_module
from launcher.run.events import AttemptBegan, Ended, Entry, HostBack
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.session import begin_run, find_run, list_runs, new_run_id
from launcher.run.specification import Specification
from launcher.run.state import Phase, RunState, phase_on_hosts, recorded_ends, recorded_verdict, state_of
from launcher.run.verdict import Kind, Verdict
from tests.launcher.emulated_gcloud import Clock

HOLD = """
import sys
from pathlib import Path
from launcher.run.events import AttemptBegan, Ended
from training.machine import Clock
from launcher.run.ledger import Ledger
with Ledger(Path(sys.argv[1]), Clock()).supervising():
    print("held", flush=True)
    sys.stdin.read()
"""


def new_run(home: Path) -> Ledger:
    run_id = new_run_id("r", this_machine())
    record = RunRecord(run_id, "p", "z", "s", "hash", 0.0, "tpu-vm")
    specification = Specification(run="", provider="tpu-vm", file="f.yaml", configuration={})
    return begin_run(home, this_machine(), record, "", specification, None)


def test_a_second_launcher_on_a_run_is_told_who_the_first_is_and_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    command = [sys.executable, "-c", HOLD, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(LaunchError, match=rf"supervised by another tpu-launch \(process {first.pid}\)") as raised,
            run.supervising(),
        ):
            pass
        assert raised.value.exit_code == Exit.CONFLICT
        first.kill()
    (run.folder / "lock").write_text("9" * 20)
    with run.supervising():
        assert (run.folder / "lock").read_text() == str(os.getpid())


def test_runs_begun_in_the_same_second_have_ids_of_their_own(tmp_path: Path) -> None:
    assert len({new_run(tmp_path).folder.name for _ in range(20)}) == 20


def test_a_run_id_that_is_taken_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.new_run_id", lambda *_: "r-0101-000000-0000")
    begun = new_run(tmp_path)
    with pytest.raises(FileExistsError):
        new_run(tmp_path)
    assert begun.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", [1, 10, -1])
def test_a_line_that_a_crash_cut_swallows_neither_the_next_event_nor_a_number(tmp_path: Path, cut: int) -> None:
    run = new_run(tmp_path)
    for number in range(2):
        run.append(AttemptBegan(number))
        run.append(Ended(number, outcome="failed"))
    path = run.folder / "events.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + last[:cut])
    run.append(AttemptBegan(2))
    assert run.state.attempt == 2
    assert [event.attempt for event in run.events()][-1] == 2
    run.append(Ended(2, outcome="finished"))
    assert run.state.outcome == "finished"
    path.write_text(lines[0])
    assert run.events() == [AttemptBegan(0)], "a file that became shorter is read anew"


def test_threads_that_read_the_events_at_once_count_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, parse = new_run(tmp_path), Ledger._parse
    run.append(AttemptBegan(0))

    def parse_while_another_thread_reads(ledger: Ledger, data: bytes) -> list[Entry]:
        monkeypatch.setattr(Ledger, "_parse", parse)
        assert [event.attempt for event in ledger.events()] == [0]
        return parse(ledger, data)

    monkeypatch.setattr(Ledger, "_parse", parse_while_another_thread_reads)
    assert run.events() == run.events() == [AttemptBegan(0)]
    run.append(Ended(0, "saved"))
    assert run.events() == [AttemptBegan(0), Ended(0, "saved")]


def test_an_event_that_does_not_fit_on_the_disk_is_one_message_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    run = new_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run, "_events", Path("/dev/full"))
        patch.setattr(run, "clock", clock := Clock())
        begun = clock.monotonic()
        with pytest.raises(LaunchError, match=r"can't be recorded for 60 s: No space left.*run --attach"):
            run.append(AttemptBegan(0))
        assert clock.monotonic() - begun >= 60, "it waits for room"
        said: list[str] = []
        for path in Path("/dev/full"), Path("/dev/full"), run.folder / "events.jsonl", Path("/dev/full"):
            patch.setattr(run, "_events", path)
            run.note(HostBack(0, 1), said.append)
        assert ["can't be recorded: No space left" in text for text in said] == [True, True], "once a kind and disk"
    run.append(AttemptBegan(0))
    assert run.state.attempt == 0


@pytest.mark.parametrize("room", [1, -1], ids=["the first byte", "all but the line's end"])
def test_an_event_of_which_a_part_fitted_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    run, write = new_run(tmp_path), ledger_module.write_whole

    def fill(file: FileIO, data: bytes) -> None:
        monkeypatch.setattr(ledger_module, "write_whole", write)
        file.write(data[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger_module, "write_whole", fill)
    monkeypatch.setattr(run, "clock", Clock())
    run.append(AttemptBegan(0))
    run.append(Ended(0, "saved"))
    assert run.events() == [AttemptBegan(0), Ended(0, "saved")]


def test_a_full_disk_does_not_hide_who_supervises_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not run.supervised()
    assert not (run.folder / "lock").exists(), "it asks without writing"
    with run.supervising():
        assert run.supervised()
        assert Ledger(run.folder, run.clock).supervised()
    assert not run.supervised()


def test_a_run_of_another_version_does_not_keep_others_from_running(tmp_path: Path) -> None:
    run, other = new_run(tmp_path), new_run(tmp_path)
    with (other.folder / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T00:00:00Z", "event": "swept", "attempt": 0}\n')
    assert [ledger.run_id for ledger in list_runs(tmp_path, this_machine())] == [run.run_id]
    with pytest.raises(BadInput, match="an event of another version"):
        find_run(tmp_path, this_machine(), other.run_id)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run_id": "r"}'])
def test_a_damaged_record_is_no_run_and_a_clear_message_for_who_names_it(tmp_path: Path, text: str) -> None:
    good, bad = new_run(tmp_path), new_run(tmp_path)
    (bad.folder / "run.json").write_text(text)
    assert [run.run_id for run in list_runs(tmp_path, this_machine())] == [good.run_id]
    assert find_run(tmp_path, this_machine(), None).run_id == good.run_id
    with pytest.raises(BadInput, match=r"run\.json is damaged"):
        find_run(tmp_path, this_machine(), bad.run_id)


def test_a_stop_holds_although_a_full_disk_delayed_an_earlier_request_beyond_it(tmp_path: Path) -> None:
    """`run` was requested before `stop`, but a full disk delayed both records and the stop's was written first."""
    run = new_run(tmp_path)
    known = run.state.stops
    run.append(events.RunStopRequested(0))
    run.append(events.Requested(0, known))
    assert run.state.stop_requested
    run.append(events.Requested(0, run.state.stops))
    assert not run.state.stop_requested


BEGAN, STARTED, SAVED, FINISHED = AttemptBegan(0), events.Started(0), Ended(0, "saved"), Ended(0, "finished")
ORPHANED, OTHERS = (events.Orphaned(0, "container", hosts) for hosts in ((1,), (0, 2)))
AGAIN = events.Recovering(0, "saved", "preemption 1 of 1", 0.0)
ONE_ORPHAN = RunState(Phase.ENDED, BEGAN, "saved", orphans=(ORPHANED,))


@pytest.mark.parametrize(
    ("history", "state"),
    [
        ([], RunState()),
        ([BEGAN], RunState(Phase.STARTING, BEGAN)),
        ([BEGAN, STARTED], RunState(Phase.RUNNING, BEGAN)),
        ([BEGAN, SAVED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, SAVED, STARTED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, STARTED, FINISHED], RunState(Phase.FINISHED, BEGAN, "finished")),
        ([BEGAN, STARTED, SAVED, AttemptBegan(1)], RunState(Phase.STARTING, AttemptBegan(1))),
        ([BEGAN, STARTED, SAVED, AttemptBegan(1), STARTED], RunState(Phase.STARTING, AttemptBegan(1))),
        ([BEGAN, ORPHANED, SAVED], ONE_ORPHAN),
        ([BEGAN, ORPHANED, SAVED, events.Reaped(0, (1,))], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, ORPHANED, SAVED, OTHERS, events.Reaped(0, (0, 2))], ONE_ORPHAN),
        ([AGAIN, BEGAN, Ended(0, "not started")], RunState(Phase.ENDED, BEGAN, "not started", recovering=AGAIN)),
        ([AGAIN, BEGAN, Ended(0, "preempted")], RunState(Phase.ENDED, BEGAN, "preempted", recovering=AGAIN)),
        ([AGAIN, BEGAN, SAVED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, STARTED, AGAIN, Ended(0, "preempted")], RunState(Phase.ENDED, BEGAN, "preempted")),
    ],
)
def test_the_events_of_a_run_say_where_it_stands(history: list[events.RunEvent], state: RunState) -> None:
    assert state_of(history) == state
    assert state.has_ended(0) is (state.attempt == 1 or not state.phase.is_open), "also before another attempt"


CREATED, RUNNING, EXITED, ABSENT = (ContainerState(status) for status in ("created", "running", "exited", "absent"))


@pytest.mark.parametrize(
    ("before", "containers", "lacks", "phase"),
    [
        (Phase.RUNNING, [EXITED, RUNNING], False, Phase.RUNNING),
        (Phase.RUNNING, [EXITED, EXITED], False, Phase.EXITED),
        (Phase.RUNNING, [EXITED, ABSENT], False, Phase.EXITED),
        (Phase.RUNNING, [ABSENT, ABSENT], False, Phase.VANISHED),
        (Phase.STARTING, [RUNNING, RUNNING], False, Phase.STARTING),
        (Phase.STARTING, [RUNNING, RUNNING], True, Phase.INTERRUPTED),
        (Phase.STARTING, [RUNNING, CREATED], False, Phase.INTERRUPTED),
        (Phase.STARTING, [ABSENT, ABSENT], False, Phase.INTERRUPTED),
        (Phase.STARTING, [EXITED, EXITED], False, Phase.EXITED),
    ],
)
def test_the_hosts_of_an_open_attempt_say_what_became_of_it(
    before: Phase, containers: list[ContainerState | None], lacks: bool, phase: Phase
) -> None:
    assert phase_on_hosts(before, containers, may_lack_secrets=lacks) is phase


def test_what_an_earlier_supervisor_saw_of_an_attempt_is_of_that_attempt_and_was_seen() -> None:
    gone, other, seen = (events.HostEnded(*each, False, "") for each in ((1, 0, None), (0, 0, 3), (1, 1, 3)))
    assert recorded_ends([gone, other, seen], 1) == {1: ContainerState("exited", 3)}, "a reboot leaves no exit code"
    judged = [
        events.Judged(attempt, kind, None, ()) for attempt, kind in ((0, "failed"), (1, "stalled"), (1, "failed"))
    ]
    assert recorded_verdict(judged, 1) == Verdict(Kind.FAILED), "the last one"
    assert recorded_verdict(judged[:1], 1) is None
