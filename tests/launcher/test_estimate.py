"""Claims about estimates: hours and dollars of a run on each candidate, from what is known without renting anything."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.estimate import FIVE, TYPES
from launcher import costs
from launcher.checks import preflight
from launcher.config import Config, load
from launcher.errors import BadInput
from launcher.estimate import PUBLISHED, PUBLISHED_SOURCE, Shares, estimate, line, notes, step_bound
from launcher.home import write_private
from launcher.providers import this_machine
from launcher.run import events
from launcher.run.ledger import RunRecord
from launcher.run.session import begin_run
from launcher.run.specification import describe
from tests.launcher.test_bad_input import launch
from tests.launcher.test_preflight import write_inputs
from training.accelerators import accelerator

FLOPS, BYTES = 7.0e12, 2.0e10  # of the whole batch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_inputs(tmp_path, FIVE)


def keep(folder: Path, config: Config, name: str, *, fits: bool = True) -> float:
    """Keeps an answer of preflight for a type. Returns the examples a second that it allows."""
    size = accelerator(name)
    peak = size.generation.bf16_flops_per_chip * size.chips
    rate = 256 / (FLOPS / peak)
    work = {"flops": FLOPS / size.devices, "bytes": BYTES / size.devices, "bound_by": "FLOPs"}
    verdict = {"fits": fits, "reason": None if fits else "too large", "costs": {**work, "examples_per_second": rate}}
    graph = {"graph": "training, 256 x 128", "kind": "training", "rows": 256, "hash": f"hash of {name}", **verdict}
    answer: dict[str, Any] = {"accelerator": name, "fits": fits, "graphs": [graph], "max_batch": None, "lines": []}
    candidate = next(item for item in config.all_candidates if item.accelerator_type == name)
    path = preflight._path(config.placed(candidate), folder / "home", name)
    write_private(path, json.dumps({"format": preflight.FORMAT, "result": answer}))
    return rate


def test_five_types_are_estimated_from_kept_preflights_within_a_second(folder: Path) -> None:
    config = load("run.yaml")
    rates = {name: keep(folder, config, name) for name in TYPES}
    begin = time.process_time()
    items = estimate(config, folder / "home", this_machine())
    assert time.process_time() - begin < 1.0
    assert [item.candidate.accelerator_type for item in items] == list(TYPES)
    assert {item.shares for item in items} == {Shares(*PUBLISHED, PUBLISHED_SOURCE)}
    for item in items:
        name, zone = item.candidate.accelerator_type, item.candidate.zone
        hours = 100000 * 256 / rates[name] / 3600
        assert item.fits
        assert item.bound.source == "compiled"
        assert item.hours == pytest.approx((hours / PUBLISHED[1], hours / PUBLISHED[0]))
        price = costs.per_hour(name, zone, "spot")
        assert item.spot == pytest.approx([price * each for each in item.hours])
    assert "first to finish: v6e-8 in us-east5-a" in notes(items)


def test_a_type_that_was_not_compiled_takes_figures_of_another_and_says_how_to_get_its_own(folder: Path) -> None:
    config = load("run.yaml")
    keep(folder, config, "v4-16")
    items = estimate(config, folder / "home", this_machine())
    bound = {item.candidate.accelerator_type: item.bound for item in items}
    v4, v3 = bound["v4-8"], bound["v3-8"]
    assert v4.seconds == pytest.approx(FLOPS / (275e12 * 4))
    assert v3.seconds == pytest.approx(max(FLOPS / (123e12 * 4), BYTES / (900e9 * 4)))
    assert v4.source == "from the compiler's figures for v4-16"
    assert "`tpu-launch preflight --accelerator v3-8,v4-8,v5litepod-8,v6e-8` compiles" in "\n".join(notes(items))


def test_without_a_dataset_nothing_is_guessed(folder: Path) -> None:
    assert step_bound(load("run.yaml"), folder / "home") is None
    assert line(load("run.yaml"), folder / "home", this_machine()) is None


def test_a_program_of_ones_own_is_not_estimated(folder: Path) -> None:
    (folder / "run.yaml").write_text(FIVE.partition("model:")[0])
    with pytest.raises(BadInput, match="only the trainer's step"):
        estimate(load("run.yaml"), folder / "home", this_machine())


def test_shares_are_those_of_attempts_on_the_type_else_of_all_with_a_margin_that_narrows(folder: Path) -> None:
    config, home, machine = load("run.yaml"), folder / "home", this_machine()
    keep(folder, config, "v3-8")
    step = 256 / keep(folder, config, "v4-16")

    def record(number: int, *shares: float) -> None:
        record = RunRecord(f"demo-{number}", "my-project", config.zone, "demo", "", float(number), "tpu-vm")
        ledger = begin_run(home, machine, record, config.document.dump(), describe(config, record.run_id), None)
        for attempt, share in enumerate(shares):
            ledger.append(events.AttemptBegan(attempt, slice=str(config.candidates[0]), dollars_an_hour=25.76))
            ledger.append(events.Started(attempt))
            ledger.append(events.Ended(attempt, "preempted", step_seconds=step / share))

    def shares(name: str) -> Shares:
        return next(item.shares for item in estimate(config, home, machine) if item.candidate.accelerator_type == name)

    record(0, 0.4)
    assert shares("v4-16").source == "measured in 1 attempt on v4-16, of this folder's runs"
    assert (shares("v4-16").low, shares("v4-16").high) == pytest.approx((0.4 / 1.5, 0.4 * 1.5))
    record(1, 0.5, 0.45, 0.45, 0.45)
    assert shares("v4-16").source == "measured in 5 attempts on v4-16, of this folder's runs"
    assert (shares("v4-16").low, shares("v4-16").high) == pytest.approx((0.4 / 1.1, 0.5 * 1.1))
    assert shares("v3-8").source == "measured in 5 attempts on other types, of this folder's runs"
    hours = estimate(config, home, machine)[0].hours
    assert hours == pytest.approx((100000 * step / 3600 / 0.55, 100000 * step / 3600 / 0.4 * 1.1))
    assert "measured in 5 attempts" in (line(config, home, machine) or "")


def test_a_candidate_on_which_the_step_does_not_fit_is_not_asked_for_now_and_by_later_attempts(folder: Path) -> None:
    config = load("run.yaml")
    keep(folder, config, "v4-16", fits=False)
    keep(folder, config, "v3-8")
    said: list[str] = []
    chosen, hashes = preflight.leave_out_unfit(config, folder / "home", said.append)
    assert [item.accelerator_type for item in chosen.candidates] == list(TYPES[1:])
    assert hashes == ("hash of v3-8",)
    assert said == ["preflight: the step does not fit on v4-16, which is not asked for"]
    assert describe(chosen, "demo").config().candidates == chosen.candidates
    assert replace(chosen, left_out=()).candidates == config.candidates


def test_the_command_prints_a_table_and_plan_one_line(folder: Path) -> None:
    keep(folder, load("run.yaml"), "v4-16")
    shown = launch(folder, "estimate", "-f", "run.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "v4-16" in shown.stdout
    assert "first to finish: v6e-8" in shown.stdout
    planned = launch(folder, "plan", "-f", "run.yaml").stdout
    assert "# estimate: v4-16: " in planned
