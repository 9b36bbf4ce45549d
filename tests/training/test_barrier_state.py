"""The state of the rendezvous gives all hosts the same answers, however they arrive, repeat, leave and break."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.distributed.handshake import Identity, Refusal
from training.distributed.server_protocol import BarrierState

ME = Identity("run", 0, 3)


def state_of(hosts: int) -> BarrierState:
    state = BarrierState(Identity("run", 0, hosts))
    for worker in range(hosts):
        assert state.connect(worker, state.identity, 0.0) is None
    return state


def test_a_repeated_arrival_counts_once_with_its_first_payload() -> None:
    state = state_of(2)
    assert state.arrive(0, "p", "first", 10, 0.0) == []
    assert state.arrive(0, "p", "second", 10, 0.0) == []
    [(_, message), _] = state.arrive(1, "p", "other", 10, 0.0)
    assert message["payloads"] == ["first", "other"]
    assert state.arrive(0, "p", "third", 10, 99.0) == [(0, message)], "also when it comes late"


def test_the_time_out_names_missing_hosts_and_their_last_phases() -> None:
    state = BarrierState(ME)
    for worker in (0, 1):
        state.connect(worker, ME, 0.0)
    state.set_phase(1, "step 39", 5.0)
    state.arrive(0, "checkpoint 40", None, 10, 6.0)
    assert state.check_deadlines(15.9) == []
    messages = state.check_deadlines(16.0)
    assert {worker for worker, _ in messages} == {0, 1}
    message = messages[0][1]["lost"]
    assert "'checkpoint 40'" in message
    assert "host 1 was last heard of 11 s ago in phase 'step 39'" in message
    assert "host 2 never connected" in message


def test_later_arrivals_do_not_move_the_deadline_of_a_barrier() -> None:
    state = state_of(3)
    state.arrive(0, "p", None, 10, 0.0)
    state.arrive(1, "p", None, 60, 9.0)
    assert state.check_deadlines(9.9) == []
    assert "within 10 s: host 2" in state.check_deadlines(10.0)[0][1]["lost"]


def test_hosts_of_another_run_attempt_or_size_are_refused() -> None:
    state = BarrierState(Identity("run", 1, 2))
    refusal = Refusal("host 0 is in run 'run', this host in run 'other'", False)
    assert state.connect(0, Identity("other", 1, 2), 0.0) == refusal
    stale = state.connect(0, Identity("run", 0, 2), 0.0)
    assert "attempt 1" in stale.reason
    assert stale.final
    early = state.connect(0, Identity("run", 2, 2), 0.0)
    assert not early.final  # host 0 of that attempt may be about to start
    assert state.connect(0, Identity("run", 1, 4), 0.0) is not None
    assert state.connect(0, state.identity, 0.0) is None
    assert "already" in str(state.connect(0, state.identity, 0.0))


def test_a_broken_connection_ends_the_attempt_for_all() -> None:
    state = state_of(3)
    state.set_phase(2, "step 7", 1.0)
    messages = state.disconnect(2)
    assert [worker for worker, _ in messages] == [0, 1]
    assert "host 2 is gone" in messages[0][1]["lost"]
    assert "step 7" in messages[0][1]["lost"]
    assert state.arrive(0, "later", None, 10, 2.0) == [(0, {"lost": state.lost, "code": 76})]
    assert state.connect(2, state.identity, 3.0) is None, "a host that comes late is told why the attempt is over"
    assert "already" in str(state.connect(1, state.identity, 3.0))


def test_an_orderly_exit_is_no_loss_and_a_failure_is() -> None:
    state = state_of(2)
    assert state.leave(1, 0, "") == []
    assert state.disconnect(1) == []
    assert state.lost is None
    state = state_of(2)
    assert "exit code 2: no such file" in state.leave(1, 2, "no such file")[0][1]["lost"]


@pytest.mark.parametrize("waits_before", [True, False])
@pytest.mark.parametrize(("code", "others"), [(0, 76), (75, 75)])
def test_no_host_waits_at_a_barrier_for_one_that_has_left(code: int, others: int, waits_before: bool) -> None:
    state = state_of(2)
    messages = state.arrive(0, "p", None, 10, 0.0) if waits_before else []
    messages += state.leave(1, code, "")
    messages += [] if waits_before else state.arrive(0, "p", None, 10, 0.0)
    [(worker, message)] = messages
    assert (worker, message["code"]) == (0, others)


KINDS = (("arrive", 2, "abc"), ("phase", 2, "xy"), ("closed", 2, [""]), ("tick", 30, [""]))
said = (st.tuples(st.just(kind), st.integers(0, most), st.sampled_from(names)) for kind, most, names in KINDS)
events = st.lists(st.one_of(*said), max_size=40)


def test_an_overdue_exit_stops_the_others_with_the_same_code() -> None:
    state = state_of(2)
    [(worker, message)] = state.leave(1, 75, "out of time", overdue=True)
    assert (worker, message["code"]) == (0, 75)
    assert "out of time" in message["lost"]
    assert state.arrive(0, "checkpoint 4", None, 10, 2.0) == [(0, message)]


@given(events)
def test_a_barrier_has_one_answer_and_a_lost_attempt_stays_lost(history: list[tuple[str, int, str]]) -> None:
    state, now = state_of(3), 0.0
    answers: dict[str, Any] = {}
    lost: set[str] = set()
    for kind, number, text in history:
        if kind == "arrive" and state.members[number].connected:
            messages = state.arrive(number, text, f"{number}-{len(answers)}-{now}", 10, now)
        elif kind == "closed":
            messages = state.disconnect(number)
        elif kind == "tick":
            now += number
            messages = state.check_deadlines(now)
        else:
            messages = []
        for worker, message in messages:
            assert state.members[worker].connected
            if "complete" in message:
                assert answers.setdefault(message["complete"], message["payloads"]) == message["payloads"]
                assert len(message["payloads"]) == 3
            else:
                lost.add(message["lost"])
        assert len(lost) <= 1


def test_many_missing_hosts_are_all_named_in_a_short_message() -> None:
    """It goes to every host and into every log."""
    state = BarrierState(Identity("run", 0, 512))
    state.connect(0, state.identity, 0.0)
    state.arrive(0, "start", None, 10, 0.0)
    [(_, message)] = state.check_deadlines(10.0)
    assert "host 1 never connected; host 2 never connected" in message["lost"]
    assert message["lost"].endswith("; and hosts 17-511")
    assert len(message["lost"]) < 600
