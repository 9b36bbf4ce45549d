"""All promises hold in every simulated run: 1,000 a side (SIMULATED_RUNS changes it), with other seeds each day."""

import os
import statistics
from dataclasses import replace
from datetime import date

import pytest

from tests.simulation.__main__ import FIRST_SEED, SEEDS_A_DAY, first_seed, load, sides, simulate_and_report
from tests.simulation.capacity import weeks
from tests.simulation.trainer.plan import draw
from tests.simulation.trainer.simulated_run import kill_at_every_write, simulate_plan

RUNS = int(os.environ.get("SIMULATED_RUNS", "1000"))


@pytest.mark.parametrize("side", sides())
def test_a_seed_decides_the_whole_run(side):
    simulate = load(side).simulate
    assert simulate(7, trace=True).trace == simulate(7, trace=True).trace


@pytest.mark.timeout(600 + 4 * RUNS)  # only idle time is used in make test
@pytest.mark.parametrize("side", sides())
def test_promises_hold_in_every_simulated_run(side, capsys):
    first = first_seed()
    with capsys.disabled():
        print()
        broken = simulate_and_report(side, range(first, first + RUNS))
    replay = {promise: f"make simulate SIDE={side} SEED={found[0][0]}" for promise, found in broken.items()}
    assert not replay


def test_promises_hold_after_a_kill_at_every_write_of_the_trainer():
    plan = replace(draw(first_seed()), hosts=2, steps=6, every_steps=2, keep_last=1, evaluate_every=3, export=True)
    broken = {str(each.faults[0]): simulate_plan(each).broken for each in kill_at_every_write(plan)}
    assert len(broken) > 80
    assert not {fault: promises for fault, promises in broken.items() if promises}


@pytest.mark.timeout(600 + 4 * RUNS)  # only idle time is used in make test
def test_promises_hold_in_weeks_of_capacity():
    first = first_seed()
    broken = {seed: found for seed in range(first, first + RUNS // 200) if (found := weeks.simulate(seed).broken)}
    assert not broken


def test_a_run_that_follows_capacity_ends_sooner_than_one_of_one_type():
    one, many = (
        [weeks.Week(seed, follows=follows, kills=False, trace=False).play().hours for seed in range(5)]
        for follows in (False, True)
    )
    assert statistics.median(many) < statistics.median(one)


def test_each_day_has_seeds_of_its_own(monkeypatch):
    monkeypatch.delenv(FIRST_SEED, raising=False)
    assert first_seed(date(2026, 3, 2)) - first_seed(date(2026, 3, 1)) == SEEDS_A_DAY > RUNS
    monkeypatch.setenv(FIRST_SEED, "4711")
    assert first_seed() == 4711
