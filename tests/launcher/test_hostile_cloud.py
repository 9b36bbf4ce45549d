"""A run survives a hostile cloud: answers that are late, lost or stale, and a stop at any time.

Each test says what happens at which call of the provider of two hosts in memory (test_runs).
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.config import Config
from launcher.errors import BadInput, Exit, HostsUnreachable, LaunchError
from launcher.gcloud import PermissionDenied, QuotaExceeded, Stockout
from launcher.provider import SECRETS_LATE, Attempt, ContainerState, HostReport, LogLine, Observation
from launcher.run import events, launch, start
from launcher.run.ledger import Ledger
from launcher.run.session import RunStopped, open_session
from launcher.run.stop import delete_slice, explain_interrupt, stop_run
from launcher.run.supervise import SliceAnswer, _Supervision
from launcher.run.verdict import UNSEEN, Cause, HostView, Kind, Verdict, judge
from launcher.tpu_vm import slice_hints
from tests.launcher.script_host import write_program
from tests.launcher.test_runs import FakeProvider, Workstation, start_and_lose_sight
from tests.processes import wait_until
from training.machine import Clock
from training.storage import Stat
from training.telemetry.progress_line import ProgressLine

COMMAND = ["python", "train.py", "--lr=1e-4"]
SECRETS = {"HF_TOKEN": "s3cret", "FROM_FILE": "plain"}
UNAVAILABLE = LaunchError("gcloud: 503 Service Unavailable\n  Google's API has a temporary failure: try again")


def recorded(work: Workstation, kind: type[events.RunEvent]) -> int:
    return [type(event) for event in work.ledger.events()].count(kind)


def outcomes(work: Workstation) -> list[str]:
    return [event.outcome for event in work.ledger.events() if isinstance(event, events.Ended)]


def interrupt_start(work: Workstation, only_created: set[int]) -> Config:
    """Interrupts the first start of a run after the hosts were told; on some hosts the container has not started."""

    def interrupt() -> None:
        work.hosts.only_created = only_created
        raise KeyboardInterrupt

    config = work.config(command=COMMAND)
    work.hosts.exits[0] = None
    work.hosts.hooks["started"] = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        work.run(config)
    return config


def hold_lock(work: Workstation, monkeypatch: pytest.MonkeyPatch, *recorded: events.RunEvent) -> None:
    """Holds the run's lock until the next command waits for it; records events before it lets go."""
    ledger, elsewhere = work.ledger, contextlib.ExitStack()
    elsewhere.enter_context(ledger.supervising())

    def release(_seconds: float) -> None:
        for event in recorded:
            ledger.append(event)
        elsewhere.close()

    monkeypatch.setattr(work.clock, "sleep", release)


@pytest.mark.parametrize("option", ["overlay", "sync", "env-file"])
def test_files_are_refused_if_hosts_take_none(work: Workstation, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    without = replace(FakeProvider.capabilities, overlays=False, sends_secrets=False)
    monkeypatch.setattr(FakeProvider, "capabilities", without)
    monkeypatch.setattr(launch, "read_extras", lambda *_: ({}, None))
    with pytest.raises(BadInput, match=f"--{option}: provider"):
        work.run(work.config(command=COMMAND), **{option.replace("-", "_"): "code=/code"})


# -- an attempt that was not seen to end ------------------------------------------------------------------------------


def test_hosts_that_answer_are_observed_beside_a_silent_one(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    start_and_lose_sight(work)
    observe, note, seen = FakeProvider.observe, Ledger.note, threading.Event()

    def answer(provider: FakeProvider, worker: int, *options: Any, **more: Any) -> Observation:
        if worker == 1:
            assert seen.wait(20), "the end of host 0 was not recorded before host 1 had answered"
        return observe(provider, worker, *options, **more)

    monkeypatch.setattr(FakeProvider, "observe", answer)
    monkeypatch.setattr("launcher.run.start._ANSWER_SECONDS", 0.1)

    def record(ledger: Ledger, event: events.RunEvent, say: Callable[[str], None]) -> None:
        note(ledger, event, say)
        if isinstance(event, events.HostEnded):
            seen.set()

    monkeypatch.setattr(Ledger, "note", record)
    work.hosts.end(0)
    outcome = work.run(work.config(command=COMMAND), SECRETS)
    assert (outcome.attempt, outcome.verdict.kind) == (0, Kind.FINISHED)


def test_a_start_that_made_no_jobset_was_interrupted_although_no_host_answers(work: Workstation) -> None:
    """Tells it from a JobSet that another client has deleted."""
    config = interrupt_start(work, only_created=set())
    work.hosts.slice_state, work.hosts.silent = "DELETED", {0, 1}
    with pytest.raises(BadInput, match="attempt 0 was interrupted while it was started"):
        work.attach(config)


@pytest.mark.parametrize(("code", "kind"), [(0, Kind.FINISHED), (75, Kind.SAVED), (3, Kind.FAILED)])
def test_the_recorded_end_of_a_host_counts_though_it_is_silent_later(work: Workstation, code: int, kind: Kind) -> None:
    start_and_lose_sight(work)
    work.ledger.append(events.HostEnded(0, 1, code, False, "as seen", "2026-01-01T00:00:00Z"))
    work.hosts.silent = {1}
    work.hosts.end(76 if code == 3 else code)
    with contextlib.suppress(BadInput):  # another attempt would need secrets
        work.attach(work.config())
    (ended,) = (event for event in work.ledger.events() if isinstance(event, events.Ended))
    assert (ended.outcome, ended.cause and ended.cause.worker) == (kind.value, 1 if code == 3 else None)
    assert recorded(work, events.Orphaned) == 1


@pytest.mark.parametrize("later", [ContainerState("exited", 76, rebooted=True), ContainerState("absent")])
def test_the_recorded_end_of_a_host_outlasts_reboot_and_removal(work: Workstation, later: ContainerState) -> None:
    start_and_lose_sight(work)
    for worker, code in enumerate((76, 3)):
        work.ledger.append(events.HostEnded(0, worker, code, False, "as seen", f"2026-01-01T00:00:0{code % 7}Z"))
    work.hosts.state[work.hosts.attempts[-1].container] = later
    with contextlib.suppress(BadInput):  # another attempt would need secrets
        work.attach(work.config())
    (ended,) = (event for event in work.ledger.events() if isinstance(event, events.Ended))
    assert (ended.outcome, ended.cause and ended.cause.worker) == ("failed", 1)


@pytest.mark.parametrize(("code", "stands"), [(143, True), (75, True), (None, True), (0, False)])
def test_a_verdict_outlasts_the_supervisor_that_acts_on_it(work: Workstation, code: int | None, stands: bool) -> None:
    """Unless it was killed before any container had ended. On GKE, an ended pod (None) is gone."""
    start_and_lose_sight(work)
    lost = Cause(1, "did not answer")
    work.hosts.silent = {0} if code == 143 else set()
    work.ledger.append(events.Judged(0, Kind.HOST_LOST.value, lost, ()))
    if code is None:
        work.hosts.state.clear()
    elif stands:
        work.hosts.end(code)
    else:
        work.hosts.hooks["observe"] = [*[lambda: None] * 8, lambda: work.hosts.end(code)]
    with contextlib.suppress(BadInput):  # another attempt would need secrets
        work.attach(work.config())
    (ended,) = (event for event in work.ledger.events() if isinstance(event, events.Ended))
    assert (ended.outcome, ended.cause) == (("host lost", lost) if stands else ("finished", None))


@pytest.mark.parametrize(
    "late", [(), (LogLine("2026-01-01T00:00:00.000000000Z", f"{SECRETS_LATE} within 1020 s"),)], ids=["waits", "ended"]
)
def test_an_attempt_of_which_one_host_lacks_its_secrets_costs_no_failure(
    work: Workstation, monkeypatch: pytest.MonkeyPatch, late: tuple[LogLine, ...]
) -> None:
    """The launcher was killed while it sent them: host 1 has them, and lost its peer. Host 0 answers first."""
    config = interrupt_start(work, only_created=set())
    observe = FakeProvider.observe

    def answer(provider: FakeProvider, worker: int, container: str, *options: Any, **more: Any) -> Observation:
        answer = observe(provider, worker, container, *options, **more)
        if not container.endswith("-0") or answer.container is None or not answer.container.running:
            return answer
        if worker == 1:
            return replace(answer, container=ContainerState("exited", 76))
        return replace(answer, container=ContainerState("exited", 1) if late else answer.container, lines=late)

    monkeypatch.setattr(FakeProvider, "observe", answer)
    outcome = work.run(config)
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    assert outcomes(work) == [events.NOT_STARTED, "finished"]


@pytest.mark.parametrize(
    ("meanwhile", "words", "code"),
    [
        ((events.AttemptBegan(1), events.Ended(1, "finished")), "has just finished elsewhere", Exit.CONFLICT),
        ((events.RunStopRequested(0),), "`tpu-launch run` resumes it", Exit.STOPPED),
    ],
    ids=["finished", "stopped"],
)
def test_a_run_that_ends_while_another_terminal_waits_for_its_lock_is_not_started_again(
    work: Workstation, monkeypatch: pytest.MonkeyPatch, meanwhile: tuple[events.RunEvent, ...], words: str, code: Exit
) -> None:
    work.hosts.exits[0] = 3
    config = work.config(command=COMMAND)
    work.run(config)
    hold_lock(work, monkeypatch, *meanwhile)
    with pytest.raises(LaunchError, match=words) as refused:
        work.run(config)
    assert refused.value.exit_code is code
    assert len(work.hosts.attempts) == 1


@pytest.mark.parametrize("only_created", [{1}, {0, 1}, set()], ids=["one host", "both", "its secrets died with it"])
def test_a_start_that_was_interrupted_is_ended_and_restarted(work: Workstation, only_created: set[int]) -> None:
    work.hosts.quiet = not only_created
    config = interrupt_start(work, only_created)
    with pytest.raises(LaunchError, match="interrupted while it was started"):
        work.attach(config)
    explain_interrupt(config, work.context())
    assert "interrupted while" in work.messages[-1]
    work.hosts.hooks["start"] = [work.hosts.only_created.clear]
    work.hosts.silent = {1} if only_created else set()  # it tells later that its container never started
    work.hosts.hooks["observe"] = [*[lambda: None] * 2, work.hosts.silent.clear]
    outcome = work.run(config)
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    assert outcomes(work) == [events.NOT_STARTED, "finished"]
    explain_interrupt(config, work.context())
    assert "nothing of it is running" in work.messages[-1]


# -- recovery ---------------------------------------------------------------------------------------------------------


def test_an_attempt_with_an_unrecorded_start_is_watched(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's disk is full for longer than an event waits."""
    work.hosts.exits[:2] = [75, 0]
    write, refusals = Ledger._write, iter(range(65))

    def refuse(ledger: Ledger, line: str) -> None:
        if '"started", "attempt": 1' in line and next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(ledger, line)

    monkeypatch.setattr(Ledger, "_write", refuse)
    outcome = work.run(work.config())
    assert (outcome.attempt, outcome.verdict.kind, len(work.hosts.attempts)) == (1, Kind.FINISHED, 2)
    assert outcomes(work) == ["saved", "finished"]


def test_a_recovery_whose_overlay_is_gone_makes_no_slice(work: Workstation) -> None:
    write_program(work.folder / "code", "loop.py")
    work.hosts.hooks["started"] = [lambda: next(work.ledger.folder.glob("overlay*")).unlink()]
    work.hosts.exits[0] = 75
    with pytest.raises(BadInput, match="overlay"):
        work.run(work.config(), overlay=f"{work.folder / 'code'}=/opt/code")
    assert "create" not in work.hosts.calls


def test_the_end_of_a_program_counts_although_its_log_can_not_be_read(work: Workstation) -> None:
    work.hosts.log_problem = "no route to host"
    assert work.run(work.config()).verdict.kind is Kind.FINISHED
    assert "host 1: its last lines may be missing: no route to host" in work.messages


@pytest.mark.parametrize(
    ("error", "code"),
    [(PermissionDenied("permission"), Exit.PERMISSION), (QuotaExceeded("quota"), Exit.QUOTA)],
    ids=["permission", "quota"],
)
def test_a_permanent_error_ends_a_recovery_and_tells_a_bill(work: Workstation, error: LaunchError, code: Exit) -> None:
    work.hosts.exits[0] = 75
    work.hosts.fail("create", error)
    with pytest.raises(
        LaunchError, match=r"not recovered.*\n.*slice demo is READY and billed \(\w.*tpu-launch down"
    ) as ended:
        work.run(work.config())
    assert ended.value.exit_code is code
    assert work.hosts.calls.count("create") == 1


@pytest.mark.parametrize(
    ("method", "state"), [("create", "PREEMPTED"), ("create", None), ("start", "READY"), ("start", "PREEMPTED")]
)
def test_run_goes_on_with_the_recovery_of_a_killed_launcher(work: Workstation, method: str, state: str | None) -> None:
    def be_killed() -> None:
        work.hosts.slice_state = state
        raise KeyboardInterrupt

    work.hosts.exits[0] = 75
    work.hosts.hooks[method] = [*([] if method == "create" else [lambda: None]), be_killed]
    with pytest.raises(KeyboardInterrupt):
        work.run(work.config("run.preemption_retries=1"))
    outcome = work.run(work.config("run.preemption_retries=1"))
    assert (outcome.attempt, outcome.verdict.kind) == (1 if method == "create" else 2, Kind.FINISHED)
    assert len(outcomes(work)) == outcome.attempt + 1, "every attempt has its end"
    assert recorded(work, events.Recovering) == 1
    assert any("going on with its recovery" in message for message in work.messages)
    assert work.hosts.slice_state == "READY"


@pytest.mark.parametrize("end", ["down", "stop", "permission"])
def test_a_recovery_that_has_been_stopped_or_given_up_creates_no_slice_later(work: Workstation, end: str) -> None:
    work.hosts.exits[0] = 75
    work.hosts.fail("create", PermissionDenied("permission") if end == "permission" else KeyboardInterrupt())
    with pytest.raises((KeyboardInterrupt, LaunchError)):
        work.run(work.config())
    if end == "down":
        delete_slice(work.config(), work.context())
    elif end == "stop":
        stop_elsewhere(work)
    work.hosts.slice_state = None
    with pytest.raises(LaunchError, match="does not exist"):
        work.run(work.config())
    assert work.hosts.calls.count("create") == 1


@pytest.mark.parametrize(
    ("method", "calls", "error", "unanswered"),
    [
        ("started", 1, LaunchError("no host answers", exit_code=Exit.HOST_LOST), 0),
        ("create", 0, UNAVAILABLE, 0),
        ("create", 0, UNAVAILABLE, 1),  # the first answer comes after the next round began
    ],
)
def test_a_slice_that_is_deleted_during_a_recovery_is_not_recreated(
    work: Workstation, method: str, calls: int, error: LaunchError, unanswered: int
) -> None:
    def be_deleted() -> None:
        work.hosts.slice_state = None
        work.hosts.fail("describe", *[UNAVAILABLE] * unanswered)
        raise error

    work.hosts.exits[0] = 1
    work.hosts.hooks[method] = [*[lambda: None] * calls, be_deleted]
    with pytest.raises(LaunchError, match="it was deleted"):
        work.run(work.config("run.failure_retries=3", "run.preemption_retries=3"))
    assert work.hosts.calls.count("create") == 1
    assert [recorded(work, kind) for kind in (events.RecoveryGivenUp, events.RoundFailed)] == [1, method == "create"]


def test_a_preempted_slice_is_recreated_although_the_api_did_not_answer_before(work: Workstation) -> None:
    """A failed creation leaves no slice: that is no deletion by a user."""

    def create_in_vain() -> None:
        work.hosts.slice_state = None
        raise Stockout("no capacity")

    def preempted() -> None:
        work.hosts.slice_state = "PREEMPTED"
        work.hosts.fail("describe", UNAVAILABLE)

    work.hosts.exits[:2] = [1, 0]
    work.hosts.hooks["stop"] = [preempted]
    work.hosts.hooks["create"] = [create_in_vain]
    outcome = work.run(work.config("run.failure_retries=1"))
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    assert work.hosts.calls.count("create") == 2


@pytest.mark.parametrize("replaces", [True, False])
def test_replacing_is_advised_if_possible(work: Workstation, monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
    monkeypatch.setattr(FakeProvider, "capabilities", replace(FakeProvider.capabilities, replaces_hosts=replaces))
    work.hosts.exits = [1, 1, 0]
    assert work.run(work.config("run.failure_retries=2")).verdict.kind is Kind.FINISHED
    assert any("run.replace_after: 2 recreates" in message for message in work.messages) == replaces


@pytest.mark.parametrize(
    ("failed_deletions", "gone"),
    [(0, []), (1, []), (0, [{"created": "2026-01-01T01:00:00Z"}]), (0, [{}, {"slice_state": None}])],
)
def test_a_slice_with_unreachable_hosts_is_replaced_where_that_is_allowed_and_it_is_still_there(
    work: Workstation, failed_deletions: int, gone: list[dict[str, Any]]
) -> None:
    def fail() -> None:
        work.hosts.hooks["describe"] = [work.hosts.change(**change) for change in gone]
        raise HostsUnreachable("slice demo is READY, but after 300 s not all hosts are")

    work.hosts.exits[:2], work.hosts.health = [75, 0], "UNHEALTHY_TPU"
    work.hosts.hooks["create"] = [fail]
    work.hosts.fail("delete", *[UNAVAILABLE] * failed_deletions)
    assert work.run(work.config("run.replace_after=3")).verdict.kind is Kind.FINISHED
    deletions = [] if gone else ["delete"] * (failed_deletions + 1)
    assert [call for call in work.hosts.calls if call in ("create", "delete")] == ["create", *deletions, "create"]
    assert recorded(work, events.SliceReplaced) == (not gone)


@pytest.mark.parametrize(("looks", "made"), [(1, 0), (3, 1)])
def test_a_stop_keeps_a_slice_from_being_made_or_replaced(work: Workstation, looks: int, made: int) -> None:
    work.hosts.exits[0], work.hosts.health = 1, "UNHEALTHY_TPU"
    work.hosts.fail("create", HostsUnreachable("no ssh"))
    work.hosts.hooks["describe"] = [*[lambda: None] * looks, lambda: stop_elsewhere(work)]
    work.run(work.config("run.replace_after=3", "run.failure_retries=1"))
    assert work.ledger.state.stops == 1
    assert [work.hosts.calls.count(call) for call in ("create", "delete")] == [made, 0]


FILES = [Stat("gs://b/runs/metrics.jsonl", 9, 1)]


@pytest.mark.parametrize(
    ("anew", "change"),
    [
        (False, {}),
        (True, {"created": "2026-01-01T01:00:00Z", "address": "10.0.0.9"}),
        (True, {"created": "2026-01-01T01:00:00Z"}),
        (True, {"slice_state": "CREATING"}),
    ],
)
def test_a_slice_that_was_replaced_elsewhere_stays(work: Workstation, anew: bool, change: dict[str, str]) -> None:
    work.hosts.exits[0] = 1
    work.hosts.hooks["observe"] = [work.hosts.change(**change)]
    work.hosts.fail("create", *[HostsUnreachable("no ssh")] * anew)  # its host's failure is no proof against a new one
    assert work.run(work.config("run.replace_after=1", "run.failure_retries=1")).verdict.kind is Kind.FINISHED
    assert recorded(work, events.SliceReplaced) == (0 if anew else 1)


@pytest.mark.parametrize(
    ("listings", "deleted"),
    [([FILES], True), ([FILES, [], FILES], True), ([[]], False), ([[Stat("", 0, n)] for n in range(99)], False)],
    ids=["silent", "once not listed", "never listed", "writing"],
)
def test_a_slice_that_only_this_machine_can_not_reach_is_deleted_only_if_its_trainer_is_silent(
    work: Workstation, monkeypatch: pytest.MonkeyPatch, listings: list[list[Stat]], deleted: bool
) -> None:
    """HTTPS passes, and a firewall keeps ssh out. The slice is the one that the recovery made."""
    turns = itertools.chain(listings, itertools.repeat(listings[-1]))
    monkeypatch.setattr("launcher.run.recovery._list_files", lambda session: next(turns))
    work.hosts.exits[:2] = [75, 0]

    def fail_slowly() -> None:
        work.clock.sleep(300)
        created = f"2026-01-01T0{1 + work.hosts.calls.count('delete')}:00:00Z"
        work.hosts.change(slice_state="READY", created=created, address="10.0.0.9")()
        raise HostsUnreachable("slice demo is READY, but after 300 s not all hosts are")

    work.hosts.hooks["create"] = [fail_slowly] * 12
    work.run(work.config("run.replace_after=3", "run.recovery_minutes=120", "run.unreachable_minutes=20"))
    before = work.hosts.calls[: work.hosts.calls.index("delete")] if deleted else work.hosts.calls
    assert work.hosts.calls.count("delete") in ((2, 3) if deleted else (0,)), "each slice has its own 20 minutes"
    assert before.count("create") > 4, "20 minutes of silence are no accident"
    assert any("the slice is kept" in message for message in work.messages)


def test_after_a_save_without_a_stop_the_recovery_waits_for_the_slices_state(work: Workstation) -> None:
    """The API lags: the slice is being taken away, and still READY."""
    work.hosts.exits[:2] = [75, 0]
    states = ["READY"] * 3 + ["PREEMPTED"]
    seen: list[str] = []

    def look() -> None:
        if work.hosts.calls.count("start") == 1 and states:
            work.hosts.slice_state = states.pop(0)
        seen.append(work.hosts.slice_state or "")

    work.hosts.hooks["describe"] = [look] * 50
    before = work.hosts.calls.count("create")
    work.hosts.hooks["create"] = [lambda: seen.append("create")]
    assert work.run(work.config()).verdict.kind is Kind.FINISHED
    assert work.hosts.calls.count("create") == before + 1
    assert seen[seen.index("create") - 1] == "PREEMPTED", seen
    assert any(re.search(r": recovered in \d{1,3}\.\d s", message) for message in work.messages)


# -- a stop is final --------------------------------------------------------------------------------------------------


def stop_elsewhere(work: Workstation) -> None:
    """`tpu-launch stop` in another terminal."""
    stop_run(work.config(), work.context(), None, grace=1)


@pytest.mark.parametrize("moment", ["pull", "ledger", "hosts", "nodes"])
def test_a_stop_before_an_attempt_runs_counts(work: Workstation, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A stop of another machine is pulled from the bucket; start.sh finds the mark of one that was quicker."""
    append = Ledger.append

    def stop_and_append(ledger: Ledger, event: events.RunEvent, **options: float) -> None:
        if isinstance(event, events.AttemptBegan):
            stop_elsewhere(work)
        append(ledger, event, **options)

    def begin_start(_provider: FakeProvider, _attempt: Attempt, clock: Clock) -> None:
        if moment != "pull":
            stop_elsewhere(work)
        if moment == "nodes":  # which are waited for
            clock.sleep(3600.0)
        work.hosts.call("start")
        raise LaunchError("this attempt was ended before it started on the host")

    monkeypatch.setattr(FakeProvider, "start", begin_start)
    if moment == "pull":
        monkeypatch.setattr(start, "pull_known", lambda ledger, machine: stop_elsewhere(work))
    elif moment == "ledger":
        monkeypatch.setattr(Ledger, "append", stop_and_append)
    with pytest.raises(RunStopped) as stopped:
        work.run(work.config())
    assert stopped.value.exit_code is Exit.STOPPED
    assert ("start" in work.hosts.calls) == (moment in ("hosts", "pull"))
    assert outcomes(work) == ["stopped"]


def test_a_stop_waits_for_the_process_that_starts_attempts(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    config = interrupt_start(work, {0})
    hold_lock(work, monkeypatch)
    stop_run(config, work.context(), None, grace=1)
    assert not work.ledger.supervised()


def test_a_stop_while_run_asks_hosts_for_an_earlier_attempt_counts(work: Workstation) -> None:
    start_and_lose_sight(work)
    work.hosts.state.clear()
    work.hosts.hooks["observe"] = [lambda: stop_elsewhere(work)]
    with pytest.raises(RunStopped):
        work.run(work.config(command=COMMAND), SECRETS)
    assert len(work.hosts.attempts) == 1
    assert not any(": attempt 1 on" in message for message in work.messages), "an image may take long to build"


def test_a_stop_is_repeated_until_every_host_has_stopped(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, missed = FakeProvider.stop, [HostReport(0, True, ""), HostReport(1, False, "can't be reached")]
    answers: list[Callable[..., list[HostReport]]] = [lambda *_, **options: missed, *[stop] * 10]
    monkeypatch.setattr(FakeProvider, "stop", lambda *words, **options: answers.pop(0)(*words, **options))
    monkeypatch.setattr("launcher.run.supervise._STOP_AGAIN_SECONDS", 0.05)
    work.hosts.exits[0] = None
    work.hosts.hooks["observe"] = [lambda: None] * 3 + [lambda: work.ledger.append(events.RunStopRequested(0))]
    work.hosts.hooks["observe"] += [lambda: None] * 20 + [lambda: work.hosts.end(75)]
    assert work.run(work.config()).verdict.kind is Kind.SAVED
    assert len(answers) <= 8, "the first stop missed a host"


def test_hosts_on_which_a_failed_start_may_have_left_its_container_are_remembered(work: Workstation) -> None:
    def times_out() -> None:
        work.hosts.silent = {1}
        raise LaunchError("no end after 900 s of: gcloud compute tpus tpu-vm ssh")

    work.hosts.hooks["start"] = [times_out]
    with pytest.raises(LaunchError, match="no end after"):
        work.run(work.config())
    assert [event.hosts for event in work.ledger.state.orphans] == [(1,)]
    work.hosts.silent = set()
    assert work.run(work.config()).verdict.kind is Kind.FINISHED
    assert not work.ledger.state.orphans


def test_orphans_are_kept_until_every_host_is_reaped_and_stopped_although_the_run_is_over(work: Workstation) -> None:
    work.hosts.exits[:2] = [3, 0]
    work.run(work.config("run.failure_retries=1"))
    orphan = events.Orphaned(0, "orphan-of-attempt-0", (0, 1))
    (ledger := work.ledger).append(orphan)
    work.hosts.silent = {1}
    work.hosts.hooks["start"] = [work.hosts.change(silent=set())]
    work.run(work.config(), new=True)
    assert ledger.state.orphans == (orphan,), "only one host has removed it"
    ledger.append(events.Orphaned(1, "orphan-of-the-last-attempt", (0,)))
    ledger.append(events.Orphaned(0, "orphan-on-a-larger-slice", (5,)))
    reports = stop_run(work.config(), work.context(), ledger.run_id, grace=1)
    assert len(reports) == 4, "of the last attempt, and of the orphans"


def test_a_start_that_fails_on_one_host_is_tried_again_once(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failing = FakeProvider.start, [True, False, True, True, True]

    def miss_a_host(provider: FakeProvider, attempt: Attempt, clock: Clock | None = None) -> list[HostReport]:
        if failing.pop(0):
            provider.hosts.call("start")
            return [HostReport(0, True, ""), HostReport(1, False, "can't be reached")]
        return start(provider, attempt, clock)

    monkeypatch.setattr(FakeProvider, "start", miss_a_host)
    assert work.run(work.config()).verdict.kind is Kind.FINISHED
    with pytest.raises(LaunchError, match="1 of 2 hosts could not start"):
        work.run(work.config(), new=True)
    work.hosts.hooks["start"] = [lambda: stop_elsewhere(work)]
    with pytest.raises(RunStopped):
        work.run(work.config())
    assert not failing


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"created": "2026-01-01T01:00:00Z", "address": "10.0.9.9"}, Kind.DELETED),
        ({"created": "2026-01-01T01:00:00Z"}, Kind.FINISHED),  # the known time was that of an older slice
        ({"address": "10.0.9.9"}, Kind.FINISHED),  # it was stopped and started
    ],
)
def test_a_recreated_slice_is_not_the_one_of_the_attempt(work: Workstation, change: dict[str, str], kind: Kind) -> None:
    work.hosts.exits[0] = None

    def answer_again() -> None:
        work.hosts.silent = set()
        work.hosts.end(0)

    begin = work.hosts.change(silent={0, 1}, **change)
    work.hosts.hooks["observe"] = [lambda: None] * 3 + [begin] + [lambda: None] * 5 + [answer_again]
    assert work.run(work.config("run.failure_retries=1")).verdict.kind is kind
    assert "create" not in work.hosts.calls


@pytest.mark.parametrize(
    "trouble",
    ["", "no host answers", "preempted", "no slice", "stale answer", "interrupted start", "host lost",
     "launcher killed meanwhile", "launcher works on it"],
)  # fmt: skip
def test_down_lets_a_detached_run_save_first(work: Workstation, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    if trouble == "interrupted start":
        interrupt_start(work, {0, 1})
        work.hosts.hooks["stop"] = [work.hosts.state.clear]
    else:
        start_and_lose_sight(work)
    work.hosts.calls.clear()
    if trouble == "no host answers":
        work.hosts.fail("stop", UNAVAILABLE)
    elif trouble in ("preempted", "no slice"):
        work.hosts.slice_state = "PREEMPTED" if trouble == "preempted" else None
    elif trouble == "stale answer":
        work.hosts.hooks["describe"] = [work.hosts.change(slice_state=state) for state in (None, "READY")]
    elif trouble == "launcher killed meanwhile":
        hold_lock(work, monkeypatch)
    elif trouble == "launcher works on it":
        work.ledger.append(events.Ended(0, "saved"))
        hold_lock(work, monkeypatch)
    elif trouble == "host lost":  # where the program may go on
        work.ledger.append(events.Orphaned(0, "tpu-launch-demo-0", (1,)))
        work.ledger.append(events.Ended(0, "host lost", Cause(1, "silent")))
    delete_slice(work.config(), work.context())
    assert work.hosts.calls[-1] == "delete"
    assert ("stop" in work.hosts.calls) == (trouble not in ("preempted", "no slice", "launcher works on it"))
    assert any("may not have saved" in message for message in work.messages) == (trouble == "no host answers")
    ends = {"interrupted start": ["not started"], "host lost": ["host lost"]}
    ends |= {"no host answers": [], "preempted": ["preempted"], "no slice": ["slice deleted"]}
    assert outcomes(work) == ends.get(trouble, ["saved"])
    assert trouble or work.ledger.log_file(0, 1).exists(), "the host's last lines"
    assert work.ledger.state.stop_requested


@pytest.mark.parametrize("command", ["down", "run"])
def test_a_run_that_is_asked_for_while_its_slice_is_deleted_is_refused(work: Workstation, command: str) -> None:
    def ask() -> None:
        with pytest.raises(LaunchError, match="slice demo is being deleted by another tpu-launch on this machine"):
            work.run(work.config(), new=True)

    start_and_lose_sight(work)
    delete_slice(replace(work.config(), provider="gke"), replace(work.context(), make_provider=Mock()))
    assert "goes on: `tpu-launch down --provider tpu-vm` ends it" in work.messages[-1]
    work.hosts.hooks["delete"] = [ask]
    if command == "down":
        delete_slice(work.config(), work.context())
    else:  # which replaces the slice, or has spent its budget
        work.hosts.fail("describe", UNAVAILABLE)  # which passes
        open_session(work.context(), work.ledger).delete_slice("")
    assert (work.hosts.hooks["delete"], len(work.hosts.attempts)) == ([], 1)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_where_files_can_not_be_locked_down_deletes_the_slice_and_run_is_refused(
    work: Workstation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    start_and_lose_sight(work)
    work.hosts.calls.clear()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with slice_hints.mark_create_in_flight(work.config()) as descriptors:
        delete_slice(work.config(), work.context())
    assert descriptors == ()
    assert not slice_hints.is_create_in_flight(work.config())
    assert work.hosts.calls == ["stop", "delete"]
    assert [re.sub(f"{work.home}/|/demo-[^/]+", "", text) for text in caplog.messages] == [
        f"not known which other commands are at work: {name}: its file system can't lock files ({os.strerror(code)}): "
        "set TPU_LAUNCH_HOME to a folder on a local disk"
        for name in ("slices/p.demo.asking", "slices/p.demo.deleting", "runs/lock")
    ]
    with pytest.raises(BadInput, match=rf"lock: .* can't lock files \({os.strerror(code)}\): set TPU_LAUNCH_HOME"):
        work.run(work.config())


# -- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("still", [1.0, 5.0, 10.0, 3600.0])  # a bucket that does not answer; a machine that sleeps
def test_time_in_which_this_process_stood_still_counts_against_no_host(work: Workstation, still: float) -> None:
    """A host that was not seen since another failed counts as lost, whatever it had to say."""
    work.run(work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    now = float(int(work.clock.monotonic()))
    failed = HostView(0, ContainerState("exited", 76), seen=now, ended_seen=now)
    supervision.views = {0: failed, 1: HostView(1, ContainerState("running"), seen=now, failing_since=now - 5)}
    supervision.turned, supervision.last_line = now, now - 60
    supervision.progress.update(0, ProgressLine(5), now)
    supervision._forgive_standstill(now + still)
    assert judge(list(supervision.views.values()), now + still, supervision.limits).kind is Kind.SETTLING
    view, after = supervision.views[1], now + (still if still >= 10 else 0)
    assert [view.seen, view.failing_since, supervision.last_line] == [after, after - 5, after - 60]
    assert supervision.progress.views[0].moved == after
    assert supervision.views[0].ended_seen == now + (still if still > 1 else 0)
    assert (supervision.views[0].answering_since == now + still) is (still >= 10), "its connections may not outlive it"
    supervision.date -= 3600  # a machine that sleeps, whose monotonic clock stood still
    supervision._forgive_standstill(now + still + 1)
    assert supervision.views[0].answering_since == now + still + 1
    asked = supervision.session.observe(1, 0, None).asked
    supervision._update_view(Observation(1, ContainerState("running"), asked=asked))
    assert now <= supervision.views[1].asked <= work.clock.monotonic()
    for step, moves in ((5, False), (5, False), (6, True), (6, False)):
        supervision.progress.stepped = 0.0
        supervision.progress.update(0, ProgressLine(step), now)
        assert (supervision.progress.stepped > 0) == moves


LOST = Verdict(Kind.HOST_LOST, Cause(1, "no answer"))
GONE = Verdict(Kind.FAILED, Cause(1, "its container is gone"))
FAILED = Verdict(Kind.FAILED, Cause(1, "exit code 3", exit_code=3))


@pytest.mark.parametrize(
    ("verdict", "change", "kind", "what"),
    [
        (LOST, {}, Kind.HOST_LOST, "no answer"),
        (LOST, {"slice_state": "PREEMPTED"}, Kind.PREEMPTED, "the slice is PREEMPTED"),
        (GONE, {"slice_state": "PREEMPTED"}, Kind.PREEMPTED, "the slice is PREEMPTED"),
        (FAILED, {"slice_state": "PREEMPTED"}, Kind.FAILED, "exit code 3"),
        (LOST, {"slice_state": None}, Kind.DELETED, "deleted"),
        (LOST, {"slice_state": "CREATING"}, Kind.DELETED, "created again"),
        (LOST, {"health": "UNHEALTHY_TPU"}, Kind.HOST_LOST, "no answer (the slice: UNHEALTHY_TPU)"),
    ],
)
def test_a_lost_host_is_what_the_api_says_of_its_slice(
    work: Workstation, verdict: Verdict, change: dict[str, Any], kind: Kind, what: str
) -> None:
    work.run(work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    work.hosts.change(**change)()
    begun = work.clock.skipped
    confirmed = supervision.confirm_lost(verdict)
    doubted = change.get("slice_state", "") in (None, "CREATING")
    assert (work.clock.skipped - begun >= 5.0) is doubted, "one such answer may be stale"
    assert confirmed.kind is kind
    assert what in getattr(confirmed.cause, "what", "")
    assert supervision._reachable(verdict) == ([0] if verdict is LOST else [0, 1]), "a lost host is not waited for"
    if kind is Kind.HOST_LOST:
        work.hosts.health = "HEALTHY"
        assert supervision.confirm_lost(LOST) == replace(LOST, cause=Cause(1, what)), "what was told stays told"


def test_down_and_a_failed_start_do_not_wait_for_a_slice_in_creation(work: Workstation) -> None:
    work.run(work.config())
    work.hosts.slice_state, begun = "CREATING", work.clock.skipped
    found = open_session(work.context(), work.ledger).describe_slice()
    assert (found and found.state, work.clock.skipped) == ("CREATING", begun)


def test_only_answers_of_the_api_count_while_no_host_answers_and_no_hours_without_a_network(work: Workstation) -> None:
    work.run(work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    for seconds, trouble in ((0, "UNHEALTHY_TPU"), (15, ""), (15, "UNHEALTHY_TPU"), (8970, ""), (20, "MAINTENANCE")):
        work.clock.skipped += seconds
        supervision.inbox.put(SliceAnswer("READY", trouble))
        supervision._receive()
    told = [text for text in work.messages if "the slice: " in text]
    assert told == ["the slice: UNHEALTHY_TPU", "the slice: MAINTENANCE"], "what was told stays told"
    supervision._update_view(Observation(0, None, problem="timed out"))
    assert supervision.api_only_seconds == pytest.approx(50.0, abs=5.0)
    supervision._update_view(Observation(0, ContainerState("running")))
    assert supervision.api_only_seconds == 0.0


def test_looks_that_the_api_server_does_not_take_lose_no_host(work: Workstation) -> None:
    work.run(work.config())
    supervision = _Supervision(open_session(work.context(), work.ledger), 0)
    supervision.views = {worker: HostView(worker, UNSEEN, work.clock.monotonic()) for worker in range(2)}
    for not_taken, kind in ((True, Kind.RUNNING), (False, Kind.HOST_LOST), (True, Kind.HOST_LOST)):
        supervision._update_view(Observation(1, None, problem="throttled, or no route to host", not_taken=not_taken))
        work.clock.skipped += 200
        supervision._update_view(Observation(0, ContainerState("running")))
        assert judge([*supervision.views.values()], work.clock.monotonic(), supervision.limits).kind is kind


def test_hosts_are_not_silent_while_a_poll_of_one_is_open(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervises two hosts of which one answers late: what it writes meanwhile is not known."""
    work.hosts.exits[0] = None
    polls = itertools.count()
    answer = FakeProvider.observe

    def observe(self: FakeProvider, worker: int, container: str, *args: Any, **options: Any) -> Observation:
        if worker == 1 and next(polls) == 2:
            for _ in range(30):  # 45 s in small steps: this process does not stand still
                time.sleep(0.1)
                work.clock.skipped += 1.4
            work.hosts.end(0)
            wait_until(lambda: recorded(work, events.HostEnded) + recorded(work, events.Ended))  # host 0's
        return answer(self, worker, container, *args, **options)

    monkeypatch.setattr(FakeProvider, "observe", observe)
    assert work.run(work.config("run.stall_minutes=0.5")).verdict.kind is Kind.FINISHED


def test_a_look_waits_for_ends_of_running_containers_only(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    """So an end is seen at once, and hosts that have ended are not asked all the time."""
    waited = dict[str, set[bool]]()
    looks = itertools.count()

    def observe(self: FakeProvider, worker: int, *_: object, patience: float = 0.0, **__: object) -> Observation:
        state = "exited" if worker == 1 or next(looks) > 2 else "running"
        waited.setdefault(f"{worker}", set()).add(patience > 0)
        return Observation(worker, ContainerState(state, 0 if state == "exited" else None))

    monkeypatch.setattr(FakeProvider, "observe", observe)
    assert work.run(work.config()).verdict.kind is Kind.FINISHED
    assert waited == {"0": {False, True}, "1": {False}}


def test_a_host_that_is_waited_on_is_not_lost_by_a_failure(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slice of many hosts a look waits for longer than a verdict does."""
    over = threading.Event()

    def observe(self: FakeProvider, worker: int, *_: object, patience: float = 0.0, **__: object) -> Observation:
        if worker == 0:
            return Observation(worker, ContainerState("exited", 3) if patience else ContainerState("running"))
        if patience:
            over.wait(8)
        return Observation(worker, ContainerState("running"))

    monkeypatch.setattr(FakeProvider, "observe", observe)
    outcome = work.run(work.config("run.failure_retries=0"))
    over.set()
    assert (outcome.verdict.kind, outcome.verdict.cause and outcome.verdict.cause.worker) == (Kind.FAILED, 0)
