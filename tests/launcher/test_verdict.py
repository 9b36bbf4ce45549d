"""Claims about `launcher.run.verdict`: who is blamed, and when."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Exit
from launcher.provider import ContainerState
from launcher.run.supervise import ApiAlone
from launcher.run.verdict import HostView, Kind, Limits, judge

LIMITS = Limits(settle=4, blip=2.5, lost=120)


def running(worker: int, seen: float = 100.0, problem: str = "") -> HostView:
    return HostView(worker, ContainerState("running"), seen=seen, problem=problem)


def exited(
    worker: int, code: int, *, at: str = "2026-01-01T00:00:00Z", ended_seen: float = 99.0, seen: float = 100.0
) -> HostView:
    return HostView(worker, ContainerState("exited", exit_code=code, finished_at=at), seen=seen, ended_seen=ended_seen)


def test_all_hosts_running_is_running() -> None:
    assert judge([running(0), running(1)], 100.0, LIMITS).kind is Kind.RUNNING


def test_all_hosts_finished_is_finished() -> None:
    assert judge([exited(0, 0), exited(1, 0)], 100.0, LIMITS).kind is Kind.FINISHED


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76, 137, 143, 255])
def test_a_host_that_rebooted_is_lost_whatever_exit_code_its_engine_made_up(code: int) -> None:
    """And although it was never seen away; finding 3."""
    rebooted = HostView(1, ContainerState("exited", code, rebooted=True), seen=100.0, ended_seen=99.0)
    for other in (exited(0, 76), running(0), exited(0, 0)):
        verdict = judge([other, rebooted], 100.0, LIMITS)
        assert verdict.kind is Kind.HOST_LOST
        assert verdict.cause is not None
        assert (verdict.cause.worker, "rebooted" in verdict.cause.what) == (1, True)


@pytest.mark.parametrize(("code", "kind"), [(0, Kind.HOST_LOST), (75, Kind.SAVED), (2, Kind.BAD_INPUT)])
def test_what_only_the_trainer_says_counts_when_its_host_rebooted_later(code: int, kind: Kind) -> None:
    """Some engines make 0 up; after two reboots the time does not tell."""
    state = ContainerState("exited", code, rebooted=True, ended_before_reboot=True)
    assert judge([HostView(0, state, seen=100.0, ended_seen=99.0)], 100.0, LIMITS).kind is kind


def test_of_two_hosts_that_rebooted_the_one_that_had_lost_its_peer_before_is_not_to_blame() -> None:
    """Seed 2623."""
    symptom = ContainerState("exited", 76, rebooted=True, ended_before_reboot=True)
    views = [
        HostView(0, symptom, seen=100.0, ended_seen=99.0),
        HostView(1, ContainerState("exited", 143, rebooted=True), seen=100.0, ended_seen=99.0),
    ]
    verdict = judge(views, 104.0, LIMITS)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.HOST_LOST, 1)


def test_a_stop_does_not_hide_that_the_trainer_refused_its_input() -> None:
    """Seed 1445: no signal makes a program end with 2; the next `run` would end so again."""
    views = [exited(0, 2), exited(1, 143)]
    verdict = judge(views, 104.0, LIMITS, stop_requested=True)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.BAD_INPUT, 0)


def test_a_stop_names_the_first_of_the_hosts_that_failed_before_it() -> None:
    """Seed 2078 and its kin: the host with the lowest number may only have lost its peer."""
    views = [exited(0, 76), exited(1, 3), exited(2, 143, at="2026-01-01T00:00:05Z")]
    verdict = judge(views, 104.0, LIMITS, stop_requested=True)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.STOPPED, 1)


def test_a_host_that_comes_back_without_its_container_is_lost() -> None:
    """It was set up anew; one that never went away had its container removed by somebody."""
    gone = HostView(1, ContainerState("absent"), seen=104.0, ended_seen=99.0, ended_away=True)
    verdict = judge([running(0, seen=104.0), gone], 104.0, LIMITS)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.HOST_LOST, 1)


def test_a_host_that_rebooted_after_all_had_finished_is_no_lost_host() -> None:
    state = ContainerState("exited", 0, rebooted=True, ended_before_reboot=True)
    views = [exited(0, 0), HostView(1, state, seen=100.0, ended_seen=99.0)]
    assert judge(views, 100.0, LIMITS).kind is Kind.FINISHED
    made_up = HostView(1, ContainerState("exited", 0, rebooted=True), seen=100.0, ended_seen=99.0)
    assert judge([exited(0, 0), made_up], 100.0, LIMITS).kind is Kind.HOST_LOST


def test_a_host_is_not_lost_that_was_not_asked_since_our_own_network_is_back() -> None:
    back = replace(running(0, seen=1000.0), answering_since=1000.0)
    away = running(1, seen=800.0, problem="timed out")
    assert judge([back, away], 1000.0, LIMITS).kind is Kind.RUNNING
    assert judge([replace(back, seen=1061.0), away], 1061.0, LIMITS).kind is Kind.HOST_LOST


def test_a_failure_that_is_found_when_our_network_is_back_waits_for_the_other_hosts() -> None:
    failed = replace(exited(0, 1, ended_seen=1000.0, seen=1000.0), ended_away=True, answering_since=1000.0)
    away = running(1, seen=900.0, problem="timed out")
    assert judge([failed, away], 1006.0, LIMITS).kind is Kind.SETTLING
    verdict = judge([failed, running(1, seen=1007.0)], 1007.0, LIMITS)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.FAILED, 0)
    assert judge([failed, away], 1012.5, LIMITS).kind is Kind.HOST_LOST


@pytest.mark.parametrize("code", [1, 137, 143])
def test_a_command_that_a_shutdown_killed_before_the_reboot_is_a_lost_host(code: int) -> None:
    state = ContainerState("exited", code, rebooted=True, ended_before_reboot=True)
    assert judge([HostView(0, state, seen=100.0, ended_seen=99.0)], 100.0, LIMITS).kind is Kind.HOST_LOST


def test_a_host_that_finished_early_does_not_end_the_run() -> None:
    assert judge([exited(0, 0), running(1)], 100.0, LIMITS).kind is Kind.RUNNING


def test_all_saved_is_saved_and_tells_to_resume() -> None:
    verdict = judge([exited(0, 75), exited(1, 75)], 100.0, LIMITS)
    assert verdict.kind is Kind.SAVED
    assert verdict.kind.exit_code is Exit.SAVED


def test_a_failure_is_not_judged_before_the_other_hosts_were_asked_again() -> None:
    assert judge([exited(0, 1, ended_seen=100.0), running(1, seen=99.5)], 100.5, LIMITS).kind is Kind.SETTLING


def test_a_failure_is_judged_as_soon_as_the_others_answered() -> None:
    verdict = judge([exited(0, 1, ended_seen=99.0), running(1, seen=99.5)], 99.6, LIMITS)
    assert verdict.kind is Kind.FAILED
    assert verdict.cause is not None
    assert (verdict.cause.worker, verdict.cause.exit_code) == (0, 1)


def test_lost_peer_is_a_symptom_of_the_host_that_does_not_answer() -> None:
    views = [exited(0, 76, ended_seen=99.0, seen=100.0), running(1, seen=97.0, problem="connection refused")]
    verdict = judge(views, 100.0, LIMITS)
    assert verdict.kind is Kind.HOST_LOST
    assert verdict.cause is not None
    assert verdict.cause.worker == 1
    assert any("host 0" in symptom for symptom in verdict.symptoms)


def test_a_silent_host_is_the_cause_even_when_its_last_look_has_not_come_back() -> None:
    # Cut off: the connection does not break, the question simply stays open.
    views = [exited(0, 76, ended_seen=100.0, seen=104.0), running(1, seen=99.9)]
    assert judge(views, 101.0, LIMITS).kind is Kind.SETTLING
    verdict = judge(views, 104.5, LIMITS)
    assert verdict.kind is Kind.HOST_LOST
    assert verdict.cause is not None
    assert verdict.cause.worker == 1


def test_lost_peer_is_a_symptom_of_another_exit_code_whatever_the_order_of_arrival() -> None:
    views = [
        exited(0, 76, at="2026-01-01T00:00:01Z", ended_seen=98.0),
        exited(1, 137, at="2026-01-01T00:00:02Z", ended_seen=99.0),
    ]
    verdict = judge(views, 100.0, LIMITS)
    assert verdict.kind is Kind.FAILED
    assert verdict.cause is not None
    assert (verdict.cause.worker, verdict.cause.exit_code) == (1, 137)


def test_lost_peer_alone_is_reported_after_the_settling_time() -> None:
    views = [exited(0, 76, ended_seen=99.0), running(1, seen=104.0)]
    assert judge(views, 100.0, LIMITS).kind is Kind.SETTLING
    assert judge(views, 104.0, LIMITS).kind is Kind.FAILED


def test_of_two_failures_the_engine_s_earlier_one_is_the_cause() -> None:
    views = [exited(0, 1, at="2026-01-01T00:00:05Z"), exited(1, 1, at="2026-01-01T00:00:03Z")]
    verdict = judge(views, 100.0, LIMITS)
    assert verdict.cause is not None
    assert verdict.cause.worker == 1


def test_bad_configuration_is_told_apart_from_failure() -> None:
    verdict = judge([exited(0, 2), exited(1, 76)], 100.0, LIMITS)
    assert verdict.kind is Kind.BAD_INPUT
    assert verdict.kind.exit_code is Exit.BAD_INPUT


def test_all_hosts_out_of_reach_is_the_workstation_s_network_not_a_failure() -> None:
    views = [running(0, seen=0.0, problem="no route"), running(1, seen=0.0, problem="no route")]
    assert judge(views, 1000.0, LIMITS).kind is Kind.RUNNING


def test_hosts_that_stay_away_while_the_api_answers_are_lost() -> None:
    limits = Limits(unreachable=600)
    views = [running(0, seen=5.0, problem="timed out"), running(1, seen=3.0, problem="timed out")]
    assert judge(views, 9000.0, limits, api_alone=599).kind is Kind.RUNNING
    verdict = judge(views, 9000.0, limits, api_alone=601)
    assert verdict.kind is Kind.HOST_LOST
    assert verdict.cause is not None
    assert verdict.cause.worker == 1
    assert "no host has answered for 10 minutes, while Google's API did (timed out)" in verdict.cause.what


def test_hours_without_a_network_are_no_hours_in_which_the_api_answered() -> None:
    alone = ApiAlone()
    for now in (0.0, 15.0, 30.0, 9000.0, 9020.0):
        alone.api_answers(now)
    assert alone.seconds == 50.0


def test_one_host_out_of_reach_for_long_is_lost_although_nobody_complains() -> None:
    views = [running(0, seen=1000.0), running(1, seen=800.0, problem="timed out")]
    assert judge(views, 1000.0, LIMITS).kind is Kind.HOST_LOST


def test_a_host_is_not_lost_while_the_others_went_silent_with_it() -> None:
    """A maintenance takes all hosts away: the first that is noticed is no more lost than the rest."""
    views = [running(0, seen=800.0, problem="no route"), running(1, seen=801.0)]
    assert judge(views, 1000.0, LIMITS).kind is Kind.RUNNING


def test_a_short_outage_of_one_host_is_nothing() -> None:
    views = [running(0, seen=1000.0), running(1, seen=990.0, problem="timed out")]
    assert judge(views, 1000.0, LIMITS).kind is Kind.RUNNING


def test_preemption_goes_before_everything_the_hosts_say() -> None:
    verdict = judge([exited(0, 76), running(1, problem="gone", seen=0.0)], 100.0, LIMITS, slice_state="PREEMPTED")
    assert verdict.kind is Kind.PREEMPTED


def test_a_run_that_was_stopped_and_did_not_save_is_stopped_not_failed() -> None:
    assert judge([exited(0, 143), exited(1, 137)], 100.0, LIMITS, stop_requested=True).kind is Kind.STOPPED


def test_a_container_that_somebody_removed_is_named() -> None:
    views = [running(0, seen=104.0), HostView(1, ContainerState("absent"), seen=104.0, ended_seen=99.0)]
    verdict = judge(views, 104.0, LIMITS)
    assert verdict.kind is Kind.FAILED
    assert verdict.cause is not None
    assert verdict.cause.worker == 1


@given(st.lists(st.sampled_from([None, 0, 1, 2, 75, 76, 137]), min_size=1, max_size=8), st.floats(100, 1000))
def test_every_attempt_with_a_failure_is_judged_within_the_settling_time(codes: list[int | None], now: float) -> None:
    views = [
        running(w, seen=now) if code is None else exited(w, code, ended_seen=now - 5, seen=now)
        for w, code in enumerate(codes)
    ]
    failed = any(code not in (None, 0, 75) for code in codes)
    verdict = judge(views, now, LIMITS)
    assert verdict.kind is not Kind.SETTLING
    assert verdict.kind.ended == (failed or None not in codes)
    if failed:
        assert verdict.cause is not None
        assert codes[verdict.cause.worker] not in (None, 0, 75)


def test_a_run_that_says_nothing_for_too_long_is_stalled() -> None:
    limits = Limits(stall=60)
    views = [running(0, seen=1000.0), running(1, seen=1000.0)]
    assert judge(views, 1000.0, limits, quiet=59).kind is Kind.RUNNING
    verdict = judge(views, 1000.0, limits, quiet=61)
    assert verdict.kind is Kind.STALLED
    assert verdict.kind.exit_code is Exit.STALLED


def test_silence_is_no_stall_while_a_host_can_not_be_asked_or_without_a_limit() -> None:
    views = [running(0, seen=1000.0), running(1, seen=999.0, problem="timed out")]
    assert judge(views, 1000.0, Limits(stall=60), quiet=999).kind is Kind.RUNNING
    assert judge([running(0), running(1)], 100.0, LIMITS, quiet=1e9).kind is Kind.RUNNING


def test_a_deleted_slice_ends_the_run_and_says_so() -> None:
    verdict = judge([running(0, problem="no route"), running(1, problem="no route")], 100.0, LIMITS, slice_state=None)
    assert verdict.kind is Kind.DELETED
    assert verdict.kind.exit_code is Exit.PREEMPTED
    assert verdict.cause is not None
    assert "does not exist" in verdict.cause.what


def test_a_host_that_restarted_is_lost_not_a_failed_program() -> None:
    killed = ContainerState("exited", exit_code=137, finished_at="2026-01-01T00:00:05Z")
    views = [exited(0, 76, ended_seen=99.0), HostView(1, killed, seen=100.0, ended_seen=99.5, ended_away=True)]
    verdict = judge(views, 100.0, LIMITS)
    assert verdict.kind is Kind.HOST_LOST
    assert verdict.cause is not None
    assert (verdict.cause.worker, verdict.cause.exit_code) == (1, 137)
    assert "went away and came back" in verdict.cause.what


def test_a_program_that_failed_while_its_host_was_out_of_reach_is_a_failure() -> None:
    failed = ContainerState("exited", exit_code=1, finished_at="2026-01-01T00:00:05Z")
    views = [exited(0, 76, ended_seen=99.0), HostView(1, failed, seen=100.0, ended_seen=99.5, ended_away=True)]
    assert judge(views, 100.0, LIMITS).kind is Kind.FAILED


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_program_that_ran_out_of_memory_is_no_lost_host_wherever_its_host_was_meanwhile(rebooted: bool) -> None:
    """An engine knows that it killed for memory only when it saw it; the exit code is that of a host that went away."""
    state = ContainerState("exited", 137, oom_killed=True, finished_at="2026-01-01T00:00:00Z", rebooted=rebooted)
    views = [exited(0, 76), HostView(1, state, seen=100.0, ended_seen=99.5, ended_away=True)]
    verdict = judge(views, 200.0, LIMITS)
    assert (verdict.kind, verdict.cause and verdict.cause.worker) == (Kind.FAILED, 1)
    assert verdict.cause is not None
    assert "out of host memory" in verdict.cause.what
