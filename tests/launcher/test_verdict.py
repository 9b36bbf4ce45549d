"""`judge` names the right state of an attempt, and the host that is the first cause, from what hosts answered."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Exit
from launcher.provider import ContainerState
from launcher.run.verdict import UNSEEN, Cause, HostView, Kind, Limits, Verdict, explain, judge

SETTLING = Kind.SETTLING
LIMITS = Limits(settle=4, blip=2.5, lost=120)
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z"


def running(worker: int, seen: float = 100.0, problem: str = "", **view: Any) -> HostView:
    return HostView(worker, ContainerState("running"), seen=seen, problem=problem, **view)


def exited(worker: int, code: int, *, at=EARLY, ended_seen=99.0, seen=100.0, away=False, **state: Any) -> HostView:
    container = ContainerState("exited", exit_code=code, finished_at=at, **state)
    return HostView(worker, container, seen=seen, ended_seen=ended_seen, ended_away=away)


def cut_off(worker: int, code: int) -> HostView:
    """A host that rebooted after its container had ended."""
    return exited(worker, code, rebooted=True, ended_before_reboot=True)


def removed(worker: int, **view: Any) -> HostView:
    return HostView(worker, ContainerState("absent"), seen=100.0, **{"ended_seen": 95.0, **view})


def judged(views: list[HostView], now: float = 100.0, limits: Limits = LIMITS, **options: Any) -> tuple[Kind, int]:
    """Returns the kind of the verdict, and the worker that is the first cause; -1 without one."""
    verdict = judge(views, now, limits, **options)
    return verdict.kind, verdict.cause.worker if verdict.cause else -1


EXPORTED = replace(exited(0, 0, seen=-99.0, ended_seen=-99.0), problem="timed out")

CASES = {
    "all hosts run": ([running(0), running(1)], Kind.RUNNING, -1),
    "all hosts finished": ([exited(0, 0), exited(1, 0)], Kind.FINISHED, -1),
    "nothing is known of a host yet": ([exited(0, 0), replace(running(1), container=UNSEEN)], Kind.RUNNING, -1),
    "one host finished early": ([exited(0, 0), running(1)], Kind.RUNNING, -1),
    "all hosts saved": ([exited(0, 75), exited(1, 75)], Kind.SAVED, -1),
    "the other hosts were not polled since the failure": ([exited(0, 1, ended_seen=100.0), running(1)], SETTLING, -1),
    "the other hosts answered since the failure": ([exited(0, 1), running(1, 99.5)], Kind.FAILED, 0),
    "the other host's answer was asked for before the failure was seen":
        ([exited(0, 1), running(1, asked=99.0)], SETTLING, -1),
    "the other host was not asked since, and answers": ([exited(0, 1), running(1, 97.0)], SETTLING, -1),
    "the other host has been away for a moment": ([exited(0, 1), running(1, 97.5, "reset")], SETTLING, -1),
    "the other host answered since, and is away now": ([exited(0, 1), running(1, 99.5, "reset")], SETTLING, -1),
    "a lost peer is a symptom of the host that does not answer":
        ([exited(0, 76), running(1, 97.0, "connection refused")], Kind.HOST_LOST, 1),
    "a lost peer is a symptom of another exit code, whatever the order of arrival":
        ([exited(0, 76, ended_seen=98.0), exited(1, 137, at=LATE)], Kind.FAILED, 1),
    "all hosts lost the connection to each other":
        ([exited(0, 76, ended_seen=95.0, at=LATE), exited(1, 76, ended_seen=95.0)], Kind.CONNECTION_LOST, 1),
    "the failure that its engine recorded first": ([exited(0, 1, at=LATE), exited(1, 1)], Kind.FAILED, 1),
    "a failure before another host refused its input": ([exited(0, 1), exited(1, 2, at=LATE)], Kind.FAILED, 0),
    "the trainer refused its input": ([exited(0, 2), exited(1, 76)], Kind.BAD_INPUT, 0),
    "the trainer refused its input, and the cluster tells nothing of the other host":
        ([exited(0, 2), running(1, 90.0, "ann may not list pods")], Kind.BAD_INPUT, 0),
    "the trainer refused its input, and the other container is gone when the cluster answers again":
        ([exited(0, 2), removed(1, ended_away=True)], Kind.BAD_INPUT, 0),
    "a command that a shutdown killed before the reboot": ([cut_off(0, 143)], Kind.HOST_LOST, 0),
    "some engines make up 0 after a reboot": ([cut_off(0, 0)], Kind.HOST_LOST, 0),
    "some engines make up 0, and the other host lost its peer": ([exited(0, 76), cut_off(1, 0)], Kind.HOST_LOST, 1),
    "a reboot killed one host's command after the other host had finished":
        ([exited(0, 0), cut_off(1, 143)], Kind.HOST_LOST, 1),
    "a save before the reboot counts": ([cut_off(0, 75)], Kind.SAVED, -1),
    "a refusal before the reboot counts": ([cut_off(0, 2)], Kind.BAD_INPUT, 0),
    "a reboot after all hosts had finished": ([exited(0, 0), cut_off(1, 0)], Kind.FINISHED, -1),
    "of two rebooted hosts, one had lost its peer before": ([cut_off(0, 76), cut_off(1, 143)], Kind.HOST_LOST, 1),
    "a host that went away and came back": ([exited(0, 76), exited(1, 137, at=LATE, away=True)], Kind.HOST_LOST, 1),
    "a program that failed while its host was away":
        ([exited(0, 76), exited(1, 1, at=LATE, away=True)], Kind.FAILED, 1),
    "out of memory while its host was away":
        ([exited(0, 76), exited(1, 137, away=True, oom_killed=True)], Kind.FAILED, 1),
    "a host lost its peer, whose program had failed, before it rebooted":
        ([exited(0, 1), cut_off(1, 76)], Kind.FAILED, 0),
    "a host lost its peer before it rebooted, and nothing shows why yet":
        ([exited(0, 76), cut_off(1, 76)], SETTLING, -1),
    "out of memory before its host rebooted":
        ([exited(0, 76), exited(1, 137, away=True, oom_killed=True, rebooted=True)], Kind.FAILED, 1),
    "a host that came back without its container": ([running(0), removed(1, ended_away=True)], Kind.HOST_LOST, 1),
    "a host that finished and went away while another exports": ([EXPORTED, running(1)], Kind.RUNNING, -1),
    "a failure beside a host that finished and went away": ([EXPORTED, exited(1, 1)], Kind.FAILED, 1),
    "a container that another program removed": ([running(0), removed(1)], Kind.FAILED, 1),
    "a container that was removed, and its host is away":
        ([running(0), removed(1, problem="timed out")], Kind.RUNNING, -1),
    "a failure beside a removed container":
        ([exited(0, 1), removed(1, ended_seen=99.0, asked=98.0)], Kind.FAILED, 0),
    "a removed container whose peers lost it": ([exited(0, 76), removed(1)], Kind.FAILED, 1),
}  # fmt: skip


@pytest.mark.parametrize(("views", "kind", "cause"), CASES.values(), ids=CASES)
def test_the_state_and_its_first_cause(views: list[HostView], kind: Kind, cause: int) -> None:
    assert judged(views) == (kind, cause)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76, 137, 143, 255])
def test_a_host_that_rebooted_is_lost_whatever_exit_code_its_engine_made_up(code: int) -> None:
    for other in (exited(0, 76), running(0), exited(0, 0)):
        verdict = judge([other, exited(1, code, rebooted=True)], 100.0, LIMITS)
        assert (verdict.kind, verdict.cause.worker) == (Kind.HOST_LOST, 1)
        assert "rebooted" in verdict.cause.what


BACK = running(0, 1000.0, answering_since=1000.0)  # after our network was down
FAILED = replace(exited(0, 1, ended_seen=1000.0, seen=1000.0, away=True), answering_since=997.5)
AWAY, AWAY_LONG = running(1, 900.0, "timed out"), running(1, 500.0, "timed out")
STOPPED, STALLED = {"stop_requested": True}, {"stall": "silent"}

AT_TIMES = {
    "it could not be polled again yet": (1000.0, [BACK, AWAY], Kind.RUNNING, -1),
    "it could": (1061.0, [replace(BACK, seen=1061.0), AWAY], Kind.HOST_LOST, 1),
    "beside a failure it has time": (1006.0, [FAILED, AWAY], SETTLING, -1),
    "and may answer": (1007.0, [FAILED, running(1, 1007.0)], Kind.FAILED, 0),
    "but not for long": (1012.0, [FAILED, AWAY], Kind.HOST_LOST, 1),
    "a lost peer alone": (100.0, [exited(0, 76), running(1, 104.0)], SETTLING, -1),
    "a lost peer alone for long": (104.0, [exited(0, 76), running(1, 104.0)], Kind.CONNECTION_LOST, 0),
    "its last poll is still open": (101.0, [exited(0, 76, ended_seen=100.0), running(1, 99.9)], SETTLING, -1),
    "and stays open": (104.0, [exited(0, 76, ended_seen=100.0, seen=104.0), running(1, 99.9)], Kind.HOST_LOST, 1),
    "no host answers": (1000.0, [running(0, 0.0, "no route"), running(1, 0.0, "no route")], Kind.RUNNING, -1),
    "away for long": (1000.0, [running(0, 1000.0), running(1, 800.0, "timed out")], Kind.HOST_LOST, 1),
    "away for a moment": (1000.0, [running(0, 1000.0), running(1, 990.0, "timed out")], Kind.RUNNING, -1),
    "away just as long as it may": (1000.0, [running(0, 1000.0), running(1, 880.0, "timed out")], Kind.RUNNING, -1),
    "the others did not answer long after it": (1000.0, [running(0, 860.0), running(1, 800.0, "?")], Kind.RUNNING, -1),
    "looks take long: the first one failed a moment ago":
        (1000.0, [running(0, 1000.0), running(1, 800.0, "x", failing_since=940.0)], Kind.RUNNING, -1),
    "a maintenance takes all away: the first that is noticed is no more lost than the others":
        (1000.0, [running(0, 800.0, "no route"), running(1, 801.0)], Kind.RUNNING, -1),
}  # fmt: skip


@pytest.mark.parametrize(("now", "views", "kind", "cause"), AT_TIMES.values(), ids=AT_TIMES)
def test_a_host_has_time_to_answer(now: float, views: list[HostView], kind: Kind, cause: int) -> None:
    assert judged(views, now) == (kind, cause)


WELL, OUT_OF_REACH = [running(0), running(1)], [running(0), running(1, 99.0, "timed out")]
LOST = [exited(0, 76), running(1, 0.0, "gone")]
TOLD = {
    "a stop": (STOPPED, [exited(0, 143), exited(1, 137)], Kind.STOPPED, 0),
    "a stop; no signal makes a program exit with 2, and the next `run` would end so again":
        (STOPPED, [exited(0, 2), exited(1, 143)], Kind.BAD_INPUT, 0),
    "a stop and a reboot": (STOPPED, [exited(0, 2, rebooted=True), exited(1, 143)], Kind.STOPPED, 0),
    "a stop; the host with the lowest number may only have lost its peer":
        (STOPPED, [exited(0, 76), exited(1, 3), exited(2, 143, at=LATE)], Kind.STOPPED, 1),
    "a hang": (STALLED, WELL, Kind.STALLED, -1),
    "a hang while it saves": (STALLED | STOPPED, WELL, Kind.RUNNING, -1),
    "a hang, but a host that is out of reach may be writing": (STALLED, OUT_OF_REACH, Kind.RUNNING, -1),
    "steps, although a host is out of reach": ({"stepped": 999.0}, [running(0, 1e3), AWAY_LONG], Kind.RUNNING, -1),
    "steps, but long ago": ({"stepped": 800.0}, [running(0, 1e3), AWAY_LONG], Kind.HOST_LOST, 1),
    "a preemption": ({"slice_state": "PREEMPTED"}, LOST, Kind.PREEMPTED, -1),
    "no slice": ({"slice_state": None}, LOST, Kind.DELETED, -1),
    "another slice": ({"slice_state": "CREATING"}, LOST, Kind.DELETED, -1),
    "a JobSet deleted by another client": ({"slice_state": "DELETED"}, WELL, Kind.DELETED, -1),
    "a JobSet deleted by `stop`": ({"slice_state": "DELETED"} | STOPPED, WELL, Kind.STOPPED, -1),
}  # fmt: skip


@pytest.mark.parametrize(("told", "views", "kind", "cause"), TOLD.values(), ids=TOLD)
def test_what_is_told_beside_the_hosts(told: dict[str, Any], views: list[HostView], kind: Kind, cause: int) -> None:
    assert judged(views, max(view.seen for view in views), **told) == (kind, cause)
    assert kind not in (Kind.PREEMPTED, Kind.DELETED) or kind.exit_code is Exit.PREEMPTED


def test_hosts_that_stay_away_while_the_api_answers_are_lost() -> None:
    limits, views = Limits(unreachable=600), [running(0, 5.0, "timed out"), running(1, 3.0, "timed out")]
    assert judged(views, 9000.0, limits, api_only_seconds=600) == (Kind.RUNNING, -1)
    assert judged(views, 9000.0, limits, api_only_seconds=601) == (Kind.HOST_LOST, 1)
    for hosts, who in (views, "no host has"), (views[:1], "the host has not"):
        told = judge(hosts, 9000.0, limits, api_only_seconds=601).cause.what
        assert told.startswith(f"{who} answered for 10 minutes, while Google's API did (timed out)")


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


@pytest.mark.parametrize(
    ("views", "now", "what"),
    [
        ([exited(0, 76), exited(1, 137, error="no disk")], 100.0, "killed by SIGKILL (exit code 137): no disk"),
        ([exited(0, 137, oom_killed=True)], 100.0, "killed: out of host memory (exit code 137)"),
        ([exited(0, 126)], 100.0, "the command can't be executed (exit code 126)"),
        ([exited(0, 127)], 100.0, "the command was not found in the image (exit code 127)"),
        ([exited(0, 139)], 100.0, "crashed by a segmentation fault (exit code 139)"),
        ([running(0, 1e3), running(1, 800.0, "reset")], 1e3, "the host has not answered for 200 s (reset)"),
        ([exited(0, 76, seen=104.0), running(1, 99.0)], 104.0, "(no answer yet to the last look)"),
    ],
)
def test_a_cause_is_told(views: list[HostView], now: float, what: str) -> None:
    assert judge(views, now, LIMITS).cause.what.endswith(what)


def test_a_verdict_is_told_with_its_host_its_time_and_what_followed_from_it() -> None:
    verdict = judge([exited(0, 76), exited(1, 137)], 100.0, LIMITS)
    assert verdict.symptoms == ("host 0: lost the connection to another host (exit code 76)",)
    cause = Cause(1, "exit code 3", 3, time=EARLY)
    assert explain(Verdict(Kind.FAILED, cause, ("host 0: exit code 76",))) == [
        f"failed: host 1: exit code 3, at {EARLY}",
        "as a result: host 0: exit code 76",
    ]
    assert explain(Verdict(Kind.PREEMPTED, Cause(-1, "the slice is gone"))) == ["preempted: the slice is gone"]
    assert explain(Verdict(Kind.FINISHED)) == ["finished"]
