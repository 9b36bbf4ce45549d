"""Claims about `launcher.run.recovery`: when a run is started again, and when not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput, Exit, HostsUnreachable, LaunchError
from launcher.gcloud import Busy, Conflict, PermissionDenied, Preempted, QuotaExceeded, Stockout, Unavailable
from launcher.provider import SliceState
from launcher.run import recovery
from launcher.run.events import NOT_STARTED, Ended, Recovering, RunEvent, SliceReplaced
from launcher.run.recovery import Retries, SliceDeleted, _list_files, decide, spent_so_far
from launcher.run.verdict import Cause, Kind, Verdict
from training import storage

AGAIN, REPLACE, GIVE_UP = (True, False), (True, True), (False, False)  # whether another round follows; replaced before


def test_a_lost_connection_between_hosts_does_not_end_a_run_whose_file_names_no_budget() -> None:
    lost = Verdict(Kind.CONNECTION_LOST)
    decisions = [decide(lost, Retries(n, 0), Retries(), stop_requested=False) for n in range(4)]
    assert [decision.retry for decision in decisions] == [True, True, True, False]


def test_no_attempt_follows_where_it_would_change_nothing_or_the_user_has_stopped_the_run() -> None:
    for kind in (Kind.FINISHED, Kind.STOPPED, Kind.DELETED, Kind.BAD_INPUT):
        assert not decide(Verdict(kind), Retries(), Retries(9, 9), stop_requested=False).retry
    assert not decide(Verdict(Kind.FAILED), Retries(), Retries(9, 9), stop_requested=True).retry
    assert spent_so_far([Recovering(0, kind.value, "", 0.0) for kind in (Kind.PREEMPTED, Kind.FAILED)]) == Retries(1, 1)


def test_failures_wait_at_most_five_minutes() -> None:
    spent = [Retries(0, failures) for failures in (0, 6, 20)]
    decisions = [decide(Verdict(Kind.FAILED), each, Retries(0, 99), stop_requested=False) for each in spent]
    assert [decision.delay for decision in decisions] == [5.0, 300.0, 300.0]


def ended(worker: int, kind: Kind = Kind.FAILED) -> RunEvent:
    return Ended(0, kind.value, Cause(worker, ""))


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], (-1, 0)),
        ([ended(1), ended(1)], (1, 2)),
        ([ended(1), ended(0)], (0, 1)),
        ([ended(1), Recovering(0, "failed", "", 0.0), ended(1, Kind.HOST_LOST)], (1, 2)),
        ([ended(1), ended(-1, Kind.PREEMPTED)], (-1, 0)),
        ([ended(1), ended(1, Kind.STALLED)], (-1, 0)),
        ([ended(1), Ended(0, "preempted"), ended(1)], (1, 1)),
        ([ended(1), ended(1), SliceReplaced(0, 1, ""), ended(1)], (1, 1)),
        ([ended(1), Ended(1, NOT_STARTED, Cause(-1, "503")), ended(1)], (1, 2)),
    ],
)
def test_a_host_is_bad_that_is_the_first_cause_on_one_slice(events: list[RunEvent], found: tuple[int, int]) -> None:
    assert recovery.bad_host(events) == found


UNSEEN = Ended(0, "host lost", Cause(1, "the host has not answered for 120 s"))
EXITED = Ended(0, "failed", Cause(1, "exit code 1", 1))


@pytest.mark.parametrize(
    ("last", "state", "health", "blamed", "silent", "proof"),
    [
        (None, "READY", "HEALTHY", False, 59.0, ""),
        (None, "READY", "HEALTHY", False, 60.0, "its trainer has written nothing for 1 minutes"),
        (None, "READY", "UNHEALTHY_TPU", False, 0.0, "Google's API says UNHEALTHY_TPU"),
        (None, "REPAIRING", "", True, 0.0, "Google's API says REPAIRING"),
        (UNSEEN, "READY", "", False, 0.0, ""),
        (UNSEEN, "READY", "", True, 0.0, ""),
        (replace(UNSEEN, cause=None), "READY", "", True, 0.0, ""),
        (replace(UNSEEN, symptoms=("host 0: 76",)), "READY", "", False, 0.0, "other hosts have lost a host too"),
        (EXITED, "READY", "HEALTHY", True, 0.0, "host 1 itself reported its end"),
        (EXITED, "READY", "HEALTHY", False, 0.0, ""),
        (replace(EXITED, symptoms=("host 0: 76",)), "READY", "", False, 0.0, ""),
        (Ended(0, "preempted", symptoms=("host 0: 76",)), "READY", "", False, 0.0, ""),
    ],
)
def test_only_what_this_machines_connections_did_not_show_proves_that_a_slice_is_broken(
    last: Ended | None, state: str, health: str, blamed: bool, silent: float, proof: str
) -> None:
    slice_state = SliceState("demo", state, health, "v4-16", ())
    assert recovery.find_proof(last, slice_state, blamed=blamed, silent=silent, limit=60.0) == proof


def test_only_files_that_were_listed_in_a_bucket_tell_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(output: str | None) -> Any:
        trainer = None if output is None else SimpleNamespace(output=output)
        return SimpleNamespace(config=SimpleNamespace(trainer=trainer), ledger=SimpleNamespace(run_id="r"))

    files = [storage.Stat(f"gs://b/runs/r/{name}", 0, 0) for name in ("launcher/events/1.json", "launcher.txt")]
    monkeypatch.setattr(storage, "listing", lambda url: files if url == "gs://b/runs/r" else [])
    assert _list_files(session("gs://b/runs")) == files[1:], "not the launcher's own"
    assert _list_files(session("/data/runs")) == _list_files(session(None)) == []
    monkeypatch.setattr(storage, "listing", Mock(side_effect=storage.NotAllowed("403")))
    assert _list_files(session("gs://b/runs")) == []


@pytest.mark.parametrize(
    ("error", "following"),
    [
        (HostsUnreachable("no ssh"), REPLACE),
        *((error("?"), AGAIN) for error in (Preempted, Unavailable, Stockout, Busy, LaunchError)),
        (LaunchError("the slice is PREEMPTED", exit_code=Exit.PREEMPTED), AGAIN),
        *((error("no"), GIVE_UP) for error in (PermissionDenied, QuotaExceeded, Conflict, BadInput, SliceDeleted)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else type(value).__name__,
)
def test_what_is_not_known_to_be_permanent_may_pass(error: LaunchError, following: tuple[bool, bool]) -> None:
    decision = recovery.decide_round(error, 1, 0.0, limit=60, may_replace=True)
    assert (decision.retry, decision.replace) == following


@given(
    st.lists(st.sampled_from([Preempted("gone"), HostsUnreachable("no ssh"), Unavailable("503")]), min_size=1),
    st.floats(0, 7200),
    st.floats(0, 600),
    st.sampled_from([True, False, None]),
)
def test_a_recovery_is_tried_for_its_time_and_no_longer(
    errors: list[LaunchError], limit: float, round_seconds: float, may_replace: bool | None
) -> None:
    """From its first failure on; a round that has begun ends by itself."""
    now, delays = 0.0, [0.0]
    for failed, error in enumerate(errors, 1):
        decision = recovery.decide_round(error, failed, now, limit=limit, may_replace=may_replace)
        if not decision.retry:
            assert now + min(300, 5 * 2 ** (failed - 1)) > limit
            return
        assert delays[-1] <= decision.delay <= 300, "pauses grow"
        assert decision.replace == (isinstance(error, HostsUnreachable) and may_replace is True)
        advises = isinstance(error, HostsUnreachable) and may_replace is False
        assert ("run.replace_after: 2 would" in decision.reason) == advises
        delays.append(decision.delay)
        now += decision.delay
        assert now <= limit
        now += round_seconds
