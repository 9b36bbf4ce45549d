"""Claims about prices, budgets and estimates: what is known, what it adds up to, what a limit refuses."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.estimate import FIVE, TYPES
from launcher import costs
from launcher.checks import preflight
from launcher.config import Config, load
from launcher.errors import BadInput, Exit, LaunchError
from launcher.estimate import PUBLISHED, PUBLISHED_SOURCE, Shares, estimate, line, notes, step_bound
from launcher.providers import this_machine
from launcher.run import events
from launcher.run.budget import exceeds, spent
from launcher.run.events import Entry
from launcher.run.ledger import RunRecord
from launcher.run.session import begin_run
from launcher.run.specification import describe
from launcher.run.verdict import Kind
from launcher.tpu_vm import slices
from launcher.workstation import Owner
from tests.launcher import test_preflight
from tests.launcher.run_files import launch, load_text
from tests.launcher.test_runs import Workstation
from training.accelerators import ACCELERATORS, accelerator
from training.machine import format_time, parse_time


def config(folder: Path, **slice_: object) -> Config:
    keys = {"name": "s", "accelerator_type": "v4-16", **slice_}
    lines = "".join(f"  {key}: {value}\n" for key, value in keys.items())
    return load_text(folder, f"project: p\nzone: us-central2-b\nslice:\n{lines}")


@pytest.mark.parametrize(
    ("accelerator", "zone", "capacity", "dollars"),
    [
        ("v4-16", "us-central2-b", "on-demand", 8 * 3.22), ("v4-16", "us-central2-b", "spot", 8 * 0.9215),
        ("v3-8", "europe-west4-a", "on-demand", 8.80), ("v3-32", "europe-west4-a", "on-demand", 32.0),
        ("v5litepod-8", "us-west4-a", "on-demand", 9.60), ("v4-16", "europe-west4-a", "on-demand", None),
        ("v6e-4", "southamerica-west1-a", "spot", None),
    ],
)  # fmt: skip
def test_a_slice_costs_its_chips_times_the_price_of_its_region_and_capacity_if_that_is_known(
    accelerator: str, zone: str, capacity: str, dollars: float | None
) -> None:
    assert costs.per_hour(accelerator, zone, capacity) == (dollars and pytest.approx(dollars))


def test_spot_is_never_dearer_than_on_demand() -> None:
    for name, each in ACCELERATORS.items():
        for zone in each.zones():
            spot, full = costs.per_hour(name, zone, "spot"), costs.per_hour(name, zone, "on-demand")
            assert spot is None or (full is not None and 0 < spot < full), (name, zone)


def test_a_limit_refuses_what_is_dearer_or_unknown(tmp_path: Path) -> None:
    assert "unknown" in costs.line(config(tmp_path, accelerator_type="v5litepod-8"))
    assert costs.so_far("tpu7x-8", "us-central1-c", "on-demand", 60) is None
    costs.check(config(tmp_path))
    costs.check(config(tmp_path, max_cost_per_hour=25.77))
    with pytest.raises(BadInput, match=r"25\.70 an hour, but cost: about \$25\.76"):
        costs.check(config(tmp_path, max_cost_per_hour=25.7))
    with pytest.raises(BadInput, match="unknown"):
        costs.check(config(tmp_path, max_cost_per_hour=1000, accelerator_type="v5litepod-8"))


def test_age_and_cost_are_counted_from_the_time_of_creation(tmp_path: Path) -> None:
    created = "2026-11-20T08:00:00.500000Z"
    begun = parse_time(created)
    assert begun == parse_time("2026-11-20T09:00:00.5+01:00") == 1795161600.5
    told = "created 1 h 30 min ago, cost so far: about $38.64 (list prices of 2026-11)"
    assert costs.since(config(tmp_path), created, begun + 5400) == told
    assert costs.since(config(tmp_path), "", begun) == ""
    assert [costs.duration(seconds) for seconds in (40, 90, 7500, 273600)] == ["40 s", "1 min", "2 h 5 min", "3 d 4 h"]


def test_an_expiry_is_a_label_in_unix_seconds(tmp_path: Path) -> None:
    assert "tpu-launch-expires" not in slices.make_labels(config(tmp_path), Owner("ann"), 1000.0)
    assert slices.make_labels(config(tmp_path, expires_hours=1.5), Owner("ann"), 1000.0)["tpu-launch-expires"] == "6400"


START = 1_800_000_000.0


def at(hours: float, event: events.RunEvent) -> Entry:
    return Entry(format_time(START + hours * 3600), event)


def began(attempt: int, dollars: float) -> events.AttemptBegan:
    return events.AttemptBegan(attempt, dollars_an_hour=dollars)


def test_each_attempt_counts_with_the_price_of_its_slice_and_a_preempted_slice_costs_nothing() -> None:
    def end(hours: float, attempt: int, kind: str) -> list[Entry]:
        return [at(hours, events.Ended(attempt, kind)), at(hours, events.Recovering(attempt, kind, "", 0.0))]

    entries = [
        at(0, began(0, 10.0)), *end(2, 0, "preempted"),
        at(5, began(1, 4.0)), *end(6, 1, "failed"),  # the slice stays
        at(7, began(2, 4.0)), *end(8, 2, "host lost"),
        at(9, events.SliceReplaced(2, 1, "a bad host")),
    ]  # fmt: skip
    stop, failed = events.RunStopRequested(1), events.RoundFailed(2, "", "", 300.0)
    for each, hours, dollars in (
        (entries[:-3], 7, 28), (entries[:-3], 8, 32), (entries, 99, 36), (entries[:2], 100, 20),
        # Its user may delete the slice, and resume the run later. Another machine may record a stop a moment before.
        ([*entries[:-4], at(6.5, stop), at(90, began(2, 4.0))], 91, 30),
        ([*entries[:5], at(6, stop), entries[5]], 99, 24),
        ([*entries[:-3], at(7.5, events.Ended(2, "not started")), at(7.5, failed)], 9, 36),
        ([*entries[:3], at(3, failed)], 99, 20),
    ):  # fmt: skip
        assert spent(each, START + hours * 3600) == pytest.approx(dollars)
    assert spent([at(0, events.AttemptBegan(0))], START + 3600) == 0, "an unknown price"


def let_an_hour_pass(work: Workstation) -> None:
    """Makes the first observation an hour later: a v4-16 costs 25.76 dollars an hour."""
    work.clock.skipped = -3600.0
    work.hosts.hooks["observe"] = [lambda: work.clock.sleep(3600.0)]


def test_a_run_whose_budget_is_spent_saves_and_its_slice_is_deleted(work: Workstation) -> None:
    let_an_hour_pass(work)
    work.hosts.exits[0] = None
    config = work.config("run.budget=1.0", "run.preemption_retries=9", command=["train"])
    ends = START + 2 - config.run.stop_seconds
    assert exceeds(config, [at(0, began(0, 3600.0))], ends), "the cost of the save is kept back"
    told: list[bool] = []
    work.hosts.hooks["delete"] = [lambda: told.append(work.ledger.state.budget_spent)]
    assert work.run(config).verdict.kind is Kind.SAVED
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


def test_failed_rounds_of_a_recovery_end_when_they_have_spent_the_budget(work: Workstation) -> None:
    work.hosts.exits[0] = 1
    work.hosts.hooks["start"] = [lambda: None, *[Mock(side_effect=LaunchError("?", exit_code=Exit.CLOUD_ERROR))] * 9]
    with pytest.raises(LaunchError, match=r"raise run\.budget"):
        work.run(work.config("run.budget=1.0", "run.failure_retries=1", command=["train"]))
    assert work.hosts.slice_state is None


def test_a_slice_is_left_to_another_run_that_began_on_it(work: Workstation) -> None:
    work.hosts.exits[1] = None
    work.run(work.config(command=["other"]))
    work.hosts.hooks["observe"] = [lambda: work.clock.sleep(3600.0)]
    with work.ledger.supervising():
        work.run(work.config("run.budget=1.0", command=["train"]), new=True)
    assert work.hosts.slice_state == "READY"
    with pytest.raises(LaunchError, match=r"raise run\.budget"):
        work.run(work.config("run.budget=1.0", command=["train"]))
    assert work.hosts.slice_state is None, "no process supervises the other run any more"


def test_a_run_that_has_finished_keeps_its_slice_although_its_budget_is_spent(work: Workstation) -> None:
    let_an_hour_pass(work)
    outcome = work.run(work.config("run.budget=1.0", command=["train"]))
    assert (outcome.verdict.kind, work.hosts.slice_state) == (Kind.FINISHED, "READY")


def test_a_budget_needs_the_price_of_every_candidate(work: Workstation) -> None:
    candidates = "slice.candidates=[{accelerator_type: v6e-8, zones: [southamerica-west1-a], capacity: spot}]"
    with pytest.raises(BadInput, match=r"run\.budget: the price of v6e-8 \(spot\) in southamerica-west1-a"):
        work.run(work.config("run.budget=5", candidates, command=["train"]))


FLOPS, BYTES = 7.0e12, 2.0e10  # of the whole batch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return test_preflight.write_inputs(tmp_path, FIVE)


def keep(config: Config, name: str, *, fits: bool = True) -> float:
    """Keeps an answer of preflight for a type. Returns the examples a second that it allows."""
    size = accelerator(name)
    rate = 256 * size.generation.bf16_flops_per_chip * size.chips / FLOPS
    work = {"flops": FLOPS / size.devices, "bytes": BYTES / size.devices, "bound_by": "FLOPs"}
    candidate = next(item for item in config.all_candidates if item.accelerator_type == name)
    graph = {"kind": "training", "rows": 256, "hash": f"hash of {name}", "costs": {**work, "examples_per_second": rate}}
    test_preflight.keep(config.placed(candidate), name, fits=fits, **graph)
    return rate


def test_five_types_are_estimated_from_kept_preflights_within_a_second(folder: Path) -> None:
    config = load("run.yaml")
    rates = {name: keep(config, name) for name in TYPES}
    begin = time.process_time()
    items = estimate(config, folder / "home", this_machine())
    assert time.process_time() - begin < 1.0
    assert [item.candidate.accelerator_type for item in items] == list(TYPES)
    assert {item.shares for item in items} == {Shares(*PUBLISHED, PUBLISHED_SOURCE)}
    for item in items:
        name, zone = item.candidate.accelerator_type, item.candidate.zone
        hours = 100000 * 256 / rates[name] / 3600
        assert (item.fits, item.bound.source) == (True, "compiled")
        assert item.hours == pytest.approx((hours / PUBLISHED[1], hours / PUBLISHED[0]))
        price = costs.per_hour(name, zone, "spot")
        assert item.spot == pytest.approx([price * each for each in item.hours])
    assert "first to finish: v6e-8 in us-east5-a" in notes(items)


def test_a_type_that_was_not_compiled_takes_figures_of_another_and_says_how_to_get_its_own(folder: Path) -> None:
    config = load("run.yaml")
    keep(config, "v4-16")
    items = estimate(config, folder / "home", this_machine())
    bound = {item.candidate.accelerator_type: item.bound for item in items}
    v4, v3 = bound["v4-8"], bound["v3-8"]
    assert v4.seconds == pytest.approx(FLOPS / (275e12 * 4))
    assert v3.seconds == pytest.approx(max(FLOPS / (123e12 * 4), BYTES / (900e9 * 4)))
    assert v4.source == "from the compiler's figures for v4-16"
    assert "`tpu-launch preflight --accelerator v3-8,v4-8,v5litepod-8,v6e-8` compiles" in "\n".join(notes(items))


def test_without_preflight_the_models_sizes_and_the_dataset_bound_a_step(folder: Path, monkeypatch: Any) -> None:
    manifest = Mock(**{"manifest.sequence_length": 128, "manifest.vocabulary": 30522})
    monkeypatch.setattr("launcher.estimate.load_manifest", lambda data, url: manifest)
    flops = 6 * 256 * (128 * 12 * 12 * 768**2 + 20 * 30522 * 768)  # 12 layers; 15% of the tokens are masked
    assert step_bound(load("run.yaml"), folder / "home").seconds == pytest.approx(flops / (275e12 * 8))


def test_without_a_dataset_nothing_is_guessed_and_a_program_of_ones_own_is_not_estimated(folder: Path) -> None:
    assert step_bound(load("run.yaml"), folder / "home") is None
    assert line(load("run.yaml"), folder / "home", this_machine()) is None
    (folder / "run.yaml").write_text(FIVE.partition("model:")[0])
    with pytest.raises(BadInput, match="only the trainer's step"):
        estimate(load("run.yaml"), folder / "home", this_machine())


def test_shares_are_of_the_type_else_of_all_and_margins_narrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, home, machine = load("run.yaml"), folder / "home", this_machine()
    keep(config, "v3-8")
    step = 256 / keep(config, "v4-16")

    def record(number: int, *shares: float) -> None:
        record = RunRecord(f"demo-{number}", "my-project", config.zone, "demo", "", float(number), "tpu-vm")
        ledger = begin_run(home, machine, record, config.document.dump(), describe(config, record.run_id), None)
        for attempt, share in enumerate(shares):
            ledger.append(events.AttemptBegan(attempt, slice=str(config.candidates[0]), dollars_an_hour=25.76))
            ledger.append(events.Started(attempt))
            ledger.append(events.Ended(attempt, "preempted", step_seconds=step / share))

    def shares(name: str) -> Shares:
        return next(item.shares for item in estimate(config, home, machine) if item.candidate.accelerator_type == name)

    for number, told, names, low, high in (
        (0, (0.4,), "1 attempt on v4-16", 0.4 / 1.5, 0.4 * 1.5),
        (1, (0.5, 0.45, 0.45, 0.45), "5 attempts on v4-16", 0.4 / 1.1, 0.5 * 1.1),
    ):
        record(number, *told)
        found = shares("v4-16")
        assert found.source == f"measured in {names}, of this folder's runs"
        assert (found.low, found.high) == pytest.approx((low, high))
    assert shares("v3-8").source == "measured in 5 attempts on other types, of this folder's runs"
    monkeypatch.setattr("launcher.estimate.step_bound", bounds := Mock(wraps=step_bound))
    hours = estimate(config, home, machine)[0].hours
    assert bounds.call_count == len(TYPES) + 1, "reads the bucket once for five attempts with one file and place"
    assert hours == pytest.approx((100000 * step / 3600 / 0.55, 100000 * step / 3600 / 0.4 * 1.1))
    assert "measured in 5 attempts" in (line(config, home, machine) or "")


def test_a_candidate_on_which_the_step_does_not_fit_is_not_asked_for_now_and_by_later_attempts(folder: Path) -> None:
    config = load("run.yaml")
    keep(config, "v4-16", fits=False)
    keep(config, "v3-8")
    said: list[str] = []
    chosen, hashes = preflight.leave_out_unfit(config, folder / "home", said.append)
    assert [item.accelerator_type for item in chosen.candidates] == list(TYPES[1:])
    assert hashes == ("hash of v3-8",)
    assert said == ["preflight: the step does not fit on v4-16, which is not asked for"]
    assert describe(chosen, "demo").config().candidates == chosen.candidates
    assert replace(chosen, left_out=()).candidates == config.candidates


def test_the_command_prints_a_table_and_plan_one_line(folder: Path) -> None:
    keep(load("run.yaml"), "v4-16")
    shown = launch(folder, "estimate", "-f", "run.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "v4-16" in shown.stdout
    assert "first to finish: v6e-8" in shown.stdout
    assert "# estimate: v4-16: " in launch(folder, "plan", "-f", "run.yaml").stdout
