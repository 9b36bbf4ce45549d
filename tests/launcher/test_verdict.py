"""`judge` names the right state of an attempt, and the host that is the first cause, from what hosts answered."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Exit
from launcher.provider import ContainerState
from launcher.run.verdict import UNSEEN, Cause, HostView, Kind, Limits, Verdict, explain, judge

LIMITS = Limits(settle=4, blip=2.5, lost=120)
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z"


def running(worker: int, seen: float = 100.0, problem: str = "") -> HostView:
    return HostView(worker, ContainerState("running"), seen=seen, problem=problem)


def exited(
    worker: int,
    code: int,
    *,
    at: str = EARLY,
    ended_seen: float = 99.0,
    seen: float = 100.0,
    away: bool = False,
    **state: Any,
) -> HostView:
    container = ContainerState("exited", exit_code=code, finished_at=at, **state)
    return HostView(worker, container, seen=seen, ended_seen=ended_seen, ended_away=away)


def removed(worker: int, *, away: bool = False) -> HostView:
    return HostView(worker, ContainerState("absent"), seen=100.0, ended_seen=95.0, ended_away=away)


def judged(views: list[HostView], now: float = 100.0, limits: Limits = LIMITS, **options: Any) -> tuple[Kind, int]:
    """Returns the kind of the verdict, and the worker that is the first cause; -1 without one."""
    verdict = judge(views, now, limits, **options)
    return verdict.kind, verdict.cause.worker if verdict.cause else -1


EXPORTED = replace(exited(0, 0, seen=-99.0, ended_seen=-99.0), problem="timed out")

CASES = {
    "all hosts run": ([running(0), running(1)], (Kind.RUNNING, -1)),
    "all hosts finished": ([exited(0, 0), exited(1, 0)], (Kind.FINISHED, -1)),
    "nothing is known of a host yet": ([exited(0, 0), replace(running(1), container=UNSEEN)], (Kind.RUNNING, -1)),
    "one host finished early": ([exited(0, 0), running(1)], (Kind.RUNNING, -1)),
    "all hosts saved": ([exited(0, 75), exited(1, 75)], (Kind.SAVED, -1)),
    "the other hosts were not polled since the failure":
        ([exited(0, 1, ended_seen=100.0), running(1, seen=100.0)], (Kind.SETTLING, -1)),
    "the other hosts answered since the failure":
        ([exited(0, 1, ended_seen=99.0), running(1, seen=99.5)], (Kind.FAILED, 0)),
    "the other host's answer was asked for before the failure was seen":
        ([exited(0, 1, ended_seen=99.0), replace(running(1), asked=99.0)], (Kind.SETTLING, -1)),
    "the other host was not asked since, and answers":
        ([exited(0, 1, ended_seen=99.0), running(1, seen=97.0)], (Kind.SETTLING, -1)),
    "the other host has been away for a moment":
        ([exited(0, 1, ended_seen=99.0), running(1, seen=97.5, problem="reset")], (Kind.SETTLING, -1)),
    "the other host answered since, and is away now":
        ([exited(0, 1, ended_seen=99.0), running(1, seen=99.5, problem="reset")], (Kind.SETTLING, -1)),
    "a lost peer is a symptom of the host that does not answer":
        ([exited(0, 76), running(1, seen=97.0, problem="connection refused")], (Kind.HOST_LOST, 1)),
    "a lost peer is a symptom of another exit code, whatever the order of arrival":
        ([exited(0, 76, ended_seen=98.0), exited(1, 137, at=LATE)], (Kind.FAILED, 1)),
    "all hosts lost the connection to each other":
        ([exited(0, 76, ended_seen=95.0, at=LATE), exited(1, 76, ended_seen=95.0)], (Kind.CONNECTION_LOST, 1)),
    "the failure that its engine recorded first": ([exited(0, 1, at=LATE), exited(1, 1)], (Kind.FAILED, 1)),
    "a failure before another host refused its input": ([exited(0, 1), exited(1, 2, at=LATE)], (Kind.FAILED, 0)),
    "the trainer refused its input": ([exited(0, 2), exited(1, 76)], (Kind.BAD_INPUT, 0)),
    "the trainer refused its input, and the cluster tells nothing of the other host":
        ([exited(0, 2), running(1, seen=90.0, problem="ann may not list pods")], (Kind.BAD_INPUT, 0)),
    "the trainer refused its input, and the other container is gone when the cluster answers again":
        ([exited(0, 2), removed(1, away=True)], (Kind.BAD_INPUT, 0)),
    "a command that a shutdown killed before the reboot":
        ([exited(0, 143, rebooted=True, ended_before_reboot=True)], (Kind.HOST_LOST, 0)),
    "some engines make up 0 after a reboot":
        ([exited(0, 0, rebooted=True, ended_before_reboot=True)], (Kind.HOST_LOST, 0)),
    "some engines make up 0, and the other host lost its peer":
        ([exited(0, 76), exited(1, 0, rebooted=True, ended_before_reboot=True)], (Kind.HOST_LOST, 1)),
    "a reboot killed one host's command after the other host had finished":
        ([exited(0, 0), exited(1, 143, rebooted=True, ended_before_reboot=True)], (Kind.HOST_LOST, 1)),
    "a save before the reboot counts": ([exited(0, 75, rebooted=True, ended_before_reboot=True)], (Kind.SAVED, -1)),
    "a refusal before the reboot counts":
        ([exited(0, 2, rebooted=True, ended_before_reboot=True)], (Kind.BAD_INPUT, 0)),
    "a reboot after all hosts had finished":
        ([exited(0, 0), exited(1, 0, rebooted=True, ended_before_reboot=True)], (Kind.FINISHED, -1)),
    "of two rebooted hosts, one had lost its peer before":
        ([exited(worker, code, rebooted=True, ended_before_reboot=True) for worker, code in ((0, 76), (1, 143))],
         (Kind.HOST_LOST, 1)),
    "a host that went away and came back": ([exited(0, 76), exited(1, 137, at=LATE, away=True)], (Kind.HOST_LOST, 1)),
    "a program that failed while its host was away":
        ([exited(0, 76), exited(1, 1, at=LATE, away=True)], (Kind.FAILED, 1)),
    "out of memory while its host was away":
        ([exited(0, 76), exited(1, 137, away=True, oom_killed=True)], (Kind.FAILED, 1)),
    "a host lost its peer, whose program had failed, before it rebooted":
        ([exited(0, 1), exited(1, 76, rebooted=True, ended_before_reboot=True)], (Kind.FAILED, 0)),
    "a host lost its peer before it rebooted, and nothing shows why yet":
        ([exited(0, 76), exited(1, 76, rebooted=True, ended_before_reboot=True)], (Kind.SETTLING, -1)),
    "out of memory before its host rebooted":
        ([exited(0, 76), exited(1, 137, away=True, oom_killed=True, rebooted=True)], (Kind.FAILED, 1)),
    "a host that came back without its container": ([running(0), removed(1, away=True)], (Kind.HOST_LOST, 1)),
    "a host that finished and went away while another exports": ([EXPORTED, running(1)], (Kind.RUNNING, -1)),
    "a failure beside a host that finished and went away": ([EXPORTED, exited(1, 1)], (Kind.FAILED, 1)),
    "a container that another program removed": ([running(0), removed(1)], (Kind.FAILED, 1)),
    "a container that was removed, and its host is away":
        ([running(0), replace(removed(1), problem="timed out")], (Kind.RUNNING, -1)),
    "a failure beside a removed container":
        ([exited(0, 1), replace(removed(1), ended_seen=99.0, asked=98.0)], (Kind.FAILED, 0)),
    "a removed container whose peers lost it": ([exited(0, 76), removed(1)], (Kind.FAILED, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_state_and_its_first_cause(case: str) -> None:
    views, expected = CASES[case]
    assert judged(views) == expected


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76, 137, 143, 255])
def test_a_host_that_rebooted_is_lost_whatever_exit_code_its_engine_made_up(code: int) -> None:
    for other in (exited(0, 76), running(0), exited(0, 0)):
        verdict = judge([other, exited(1, code, rebooted=True)], 100.0, LIMITS)
        assert verdict.kind is Kind.HOST_LOST
        assert (verdict.cause.worker, "rebooted" in verdict.cause.what) == (1, True)


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([exited(0, 143), exited(1, 137)], (Kind.STOPPED, 0)),
        # No signal makes a program exit with 2; the next `run` would end so again.
        ([exited(0, 2), exited(1, 143)], (Kind.BAD_INPUT, 0)),
        ([exited(0, 2, rebooted=True), exited(1, 143)], (Kind.STOPPED, 0)),
        # The host with the lowest number may only have lost its peer.
        ([exited(0, 76), exited(1, 3), exited(2, 143, at=LATE)], (Kind.STOPPED, 1)),
    ],
)
def test_a_stop_hides_no_failure_of_the_program(views: list[HostView], expected: tuple[Kind, int]) -> None:
    assert judged(views, 104.0, stop_requested=True) == expected


BACK = replace(running(0, seen=1000.0), answering_since=1000.0)  # after our network was down
FAILED = replace(exited(0, 1, ended_seen=1000.0, seen=1000.0, away=True), answering_since=997.5)
AWAY = running(1, seen=900.0, problem="timed out")


@pytest.mark.parametrize(
    ("views", "now", "expected"),
    [
        ([BACK, AWAY], 1000.0, (Kind.RUNNING, -1)),  # it could not be polled again yet
        ([replace(BACK, seen=1061.0), AWAY], 1061.0, (Kind.HOST_LOST, 1)),
        ([FAILED, AWAY], 1006.0, (Kind.SETTLING, -1)),
        ([FAILED, running(1, seen=1007.0)], 1007.0, (Kind.FAILED, 0)),
        ([FAILED, AWAY], 1012.0, (Kind.HOST_LOST, 1)),
        ([exited(0, 76), running(1, seen=104.0)], 100.0, (Kind.SETTLING, -1)),  # a lost peer alone
        ([exited(0, 76), running(1, seen=104.0)], 104.0, (Kind.CONNECTION_LOST, 0)),
    ],
)
def test_other_hosts_have_time_before_a_verdict(views: list[HostView], now: float, expected: tuple[Kind, int]) -> None:
    assert judged(views, now) == expected


def test_a_silent_host_is_the_cause_although_its_last_poll_is_still_open() -> None:
    views = [exited(0, 76, ended_seen=100.0, seen=104.0), running(1, seen=99.9)]
    assert judged(views, 101.0) == (Kind.SETTLING, -1)
    assert judged(views, 104.0) == (Kind.HOST_LOST, 1)
    assert "(no answer yet to the last look)" in judge(views, 104.0, LIMITS).cause.what


def test_hosts_that_stay_away_while_the_api_answers_are_lost() -> None:
    limits = Limits(unreachable=600)
    views = [running(0, seen=5.0, problem="timed out"), running(1, seen=3.0, problem="timed out")]
    assert judged(views, 9000.0, limits, api_only_seconds=600) == (Kind.RUNNING, -1)
    verdict = judge(views, 9000.0, limits, api_only_seconds=601)
    assert (verdict.kind, verdict.cause.worker) == (Kind.HOST_LOST, 1)
    assert "no host has answered for 10 minutes, while Google's API did (timed out)" in verdict.cause.what
    assert "the host has not answered" in judge(views[:1], 9000.0, limits, api_only_seconds=601).cause.what


@pytest.mark.parametrize(("stepped", "kind"), [(999.0, Kind.RUNNING), (800.0, Kind.HOST_LOST)])
def test_a_host_without_which_no_step_ends_is_not_lost_while_others_do_steps(stepped: float, kind: Kind) -> None:
    views = [running(0, seen=1000.0), running(1, seen=500.0, problem="timed out")]
    assert judge(views, 1000.0, LIMITS, stepped=stepped).kind is kind


@pytest.mark.parametrize(
    ("views", "kind"),
    [
        ([running(0, seen=0.0, problem="no route"), running(1, seen=0.0, problem="no route")], Kind.RUNNING),
        ([running(0, seen=1000.0), running(1, seen=800.0, problem="timed out")], Kind.HOST_LOST),
        ([running(0, seen=1000.0), running(1, seen=990.0, problem="timed out")], Kind.RUNNING),
        ([running(0, seen=1000.0), running(1, seen=880.0, problem="timed out")], Kind.RUNNING),
        ([running(0, seen=860.0), running(1, seen=800.0, problem="timed out")], Kind.RUNNING),
        # Looks take long: the first one failed a moment ago.
        ([running(0, seen=1000.0), replace(running(1, seen=800.0, problem="x"), failing_since=940.0)], Kind.RUNNING),
        # A maintenance takes all hosts away: the first that is noticed is no more lost than the others.
        ([running(0, seen=800.0, problem="no route"), running(1, seen=801.0)], Kind.RUNNING),
    ],
)
def test_a_host_is_lost_only_if_others_answered_for_long_after_it(views: list[HostView], kind: Kind) -> None:
    assert judge(views, 1000.0, LIMITS).kind is kind


@pytest.mark.parametrize(
    ("state", "kind"), [("PREEMPTED", Kind.PREEMPTED), (None, Kind.DELETED), ("CREATING", Kind.DELETED)]
)
def test_the_state_of_the_slice_outweighs_all_hosts(state: str | None, kind: Kind) -> None:
    verdict = judge([exited(0, 76), running(1, problem="gone", seen=0.0)], 100.0, LIMITS, slice_state=state)
    assert (verdict.kind, verdict.kind.exit_code) == (kind, Exit.PREEMPTED)
    for stopped in (False, True):  # its JobSet, by `stop` or by another client
        verdict = judge([running(0)], 100.0, LIMITS, slice_state="DELETED", stop_requested=stopped)
        assert verdict.kind is (Kind.STOPPED if stopped else Kind.DELETED)


def test_a_run_that_hangs_is_stalled_unless_it_was_stopped_or_a_host_is_out_of_reach() -> None:
    views = [running(0, seen=1000.0), running(1, seen=1000.0)]
    assert judge(views, 1000.0, LIMITS).kind is Kind.RUNNING
    assert judge(views, 1000.0, LIMITS, stall="silent").kind is Kind.STALLED
    assert judge(views, 1000.0, LIMITS, stall="silent", stop_requested=True).kind is Kind.RUNNING, "it saves meanwhile"
    away = [running(0, seen=1000.0), running(1, seen=999.0, problem="timed out")]
    assert judge(away, 1000.0, LIMITS, stall="silent").kind is Kind.RUNNING, "an unreachable host may be writing"


@given(st.lists(st.sampled_from([None, 0, 1, 2, 75, 76, 137]), min_size=1, max_size=8), st.floats(100, 1000))
def test_every_attempt_with_a_failure_is_judged_within_the_settling_time(codes: list[int | None], now: float) -> None:
    views = [
        running(worker, seen=now) if code is None else exited(worker, code, ended_seen=now - 5, seen=now)
        for worker, code in enumerate(codes)
    ]
    failed = any(code not in (None, 0, 75) for code in codes)
    kind, worker = judged(views, now)
    assert kind is not Kind.SETTLING
    assert kind.ended == (failed or None not in codes)
    if failed:
        assert codes[worker] not in (None, 0, 75)


def test_a_verdict_is_told_with_its_host_its_time_and_what_followed_from_it() -> None:
    verdict = judge([exited(0, 76), exited(1, 137, error="no disk")], 100.0, LIMITS)
    assert verdict.symptoms == ("host 0: lost the connection to another host (exit code 76)",)
    assert verdict.cause.what == "killed by SIGKILL (exit code 137): no disk"
    verdict = judge([exited(0, 137, oom_killed=True)], 100.0, LIMITS)
    assert verdict.cause.what == "killed: out of host memory (exit code 137)"
    verdict = judge([running(0, seen=1000.0), running(1, seen=800.0, problem="timed out")], 1000.0, LIMITS)
    assert verdict.cause.what == "the host has not answered for 200 s (timed out)"
    cause = Cause(1, "exit code 3", 3, time=EARLY)
    assert explain(Verdict(Kind.FAILED, cause, ("host 0: exit code 76",))) == [
        f"failed: host 1: exit code 3, at {EARLY}",
        "as a result: host 0: exit code 76",
    ]
    assert explain(Verdict(Kind.PREEMPTED, Cause(-1, "the slice is gone"))) == ["preempted: the slice is gone"]
    assert explain(Verdict(Kind.FINISHED)) == ["finished"]
