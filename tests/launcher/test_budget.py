"""Claims about a run's budget: what is counted, and that the run saves, stops and loses its slice when it is spent."""

from pathlib import Path

import pytest

from launcher.errors import BadInput, Exit, LaunchError
from launcher.run import events
from launcher.run.budget import exceeds, spent
from launcher.run.events import Entry
from launcher.run.verdict import Kind
from tests.launcher.test_runs import Hosts, Workstation
from training.machine import format_time

START = 1_800_000_000.0


def at(hours: float, event: events.RunEvent) -> Entry:
    return Entry(format_time(START + hours * 3600), event)


def began(attempt: int, dollars: float) -> events.AttemptBegan:
    return events.AttemptBegan(attempt, dollars_an_hour=dollars)


def test_each_attempt_counts_with_the_price_of_its_slice_and_a_preempted_slice_costs_nothing() -> None:
    entries = [
        at(0, began(0, 10.0)),
        at(2, events.Ended(0, "preempted")),
        at(2, events.Recovering(0, "preempted", "", 0.0)),
        at(5, began(1, 4.0)),
        at(6, events.Ended(1, "failed")),
        at(6, events.Recovering(1, "failed", "", 0.0)),  # the slice stays
        at(7, began(2, 4.0)),
        at(8, events.Ended(2, "host lost")),
        at(8, events.Recovering(2, "host lost", "", 0.0)),
        at(9, events.SliceReplaced(2, 1, "a bad host")),
    ]
    assert spent(entries[:-3], START + 7 * 3600) == pytest.approx(2 * 10 + 4 + 4)
    assert spent(entries[:-3], START + 8 * 3600) == pytest.approx(2 * 10 + 4 + 4 + 4)
    assert spent(entries, START + 99 * 3600) == pytest.approx(2 * 10 + 4 + 4 + 4 + 4)
    assert spent(entries[:2], START + 100 * 3600) == pytest.approx(20)
    assert spent([at(0, events.AttemptBegan(0))], START + 3600) == 0, "an unknown price"


def test_a_run_whose_budget_is_spent_saves_and_its_slice_is_deleted(tmp_path: Path) -> None:
    work = Workstation(tmp_path, Hosts([None, 0]))
    config = work.config("run.budget=1.0", "run.preemption_retries=9", command=["train"])
    ends = START + 2 - config.run.stop_seconds
    assert exceeds(config, [at(0, began(0, 3600.0))], ends), "the cost of the save is kept back"
    work.clock.skipped = -3600.0
    # The first observation is an hour later: a v4-16 costs 25.76 dollars an hour.
    work.hosts.hooks["observe"] = [lambda: work.clock.sleep(3600.0)]
    told: list[bool] = []
    work.hosts.hooks["delete"] = [lambda: told.append(work.ledger.state.budget_spent)]
    outcome = work.run(config)
    assert outcome.verdict.kind is Kind.SAVED
    assert len(work.hosts.attempts) == 1
    assert work.hosts.slice_state is None
    assert work.ledger.events()[-1] == events.RecoveryGivenUp(0, "the budget is spent", "no slice is left")
    assert told == [True], "a supervisor deletes it if this process is killed before it has"
    assert any("the budget is spent (about $25." in line for line in work.messages)
    work.hosts.slice_state = "READY"
    with pytest.raises(LaunchError, match=r"raise run\.budget") as refused:
        work.run(config)
    assert refused.value.exit_code is Exit.STOPPED
    assert work.hosts.slice_state is None
    work.hosts.slice_state = "READY"
    assert work.run(work.config("run.budget=100", command=["train"])).verdict.kind is Kind.FINISHED


def test_a_slice_is_left_to_another_run_that_began_on_it(tmp_path: Path) -> None:
    work = Workstation(tmp_path, Hosts([0, None, 0]))
    work.run(work.config(command=["other"]))
    work.hosts.hooks["observe"] = [lambda: work.clock.sleep(3600.0)]
    with work.ledger.supervising():
        work.run(work.config("run.budget=1.0", command=["train"]), new=True)
    assert work.hosts.slice_state == "READY"
    with pytest.raises(LaunchError, match=r"raise run\.budget"):
        work.run(work.config("run.budget=1.0", command=["train"]))
    assert work.hosts.slice_state is None, "no process supervises the other run any more"


def test_a_run_that_has_finished_keeps_its_slice_although_its_budget_is_spent(tmp_path: Path) -> None:
    work = Workstation(tmp_path, Hosts([0]))
    work.clock.skipped = -3600.0
    work.hosts.hooks["observe"] = [lambda: work.clock.sleep(3600.0)]
    outcome = work.run(work.config("run.budget=1.0", command=["train"]))
    assert (outcome.verdict.kind, work.hosts.slice_state) == (Kind.FINISHED, "READY")


def test_a_budget_needs_the_price_of_every_candidate(tmp_path: Path) -> None:
    work = Workstation(tmp_path, Hosts([0]))
    candidates = "slice.candidates=[{accelerator_type: v6e-8, zones: [southamerica-west1-a], capacity: spot}]"
    with pytest.raises(BadInput, match=r"run\.budget: the price of v6e-8 \(spot\) in southamerica-west1-a"):
        work.run(work.config("run.budget=5", candidates, command=["train"]))
