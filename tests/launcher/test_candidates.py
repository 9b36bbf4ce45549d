"""Claims about candidates of a slice: what is asked for, what is taken, and what is withdrawn, after a kill too.
gcloud is replaced by the emulator's API in this process; the clock passes only by waiting."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from launcher.cli.main import cli
from launcher.config import Candidate, Config
from launcher.emulator.http_server import HttpResponse
from launcher.errors import BadInput, CommandTimeout, LaunchError
from launcher.gcloud import Conflict, QuotaExceeded, Refused, Stockout, Unavailable
from launcher.provider import SliceState
from launcher.run.ledger import RunRecord
from launcher.run.session import begin_run
from launcher.run.specification import Specification
from launcher.tpu_vm import candidates, commands, deletion, requests, slice_hints
from launcher.tpu_vm.connections import SliceConnections
from launcher.tpu_vm.provider import TpuVm
from launcher.tpu_vm.requests import RequestRecord
from launcher.tpu_vm.slices import NotOurs
from tests.gcloud_commands import UnknownCommand
from tests.launcher.emulated_gcloud import BOB, BOBS, NO_CAPACITY, OURS, Clock, Cloud, InOrder
from tests.launcher.run_files import load_text
from tests.servers import BucketServer

V4, V3 = Candidate("v4-16", "us-central2-b", "spot"), Candidate("v3-8", "us-central1-a", "spot")
SMALL = Candidate("v4-8", "us-central2-b", "spot")

TEXT = """\
project: p
zone: us-central2-b
slice:
  name: demo
  accelerator_type: v4-16
  capacity: spot
  candidates:
  - {accelerator_type: v4-8}
  - {accelerator_type: v3-8, zones: [us-central1-a]}
"""


def make(tmp_path: Path, more: str = "") -> Config:
    return load_text(tmp_path, TEXT + more)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make(tmp_path)


def race(cloud: Cloud, config: Config) -> candidates.Race:
    return candidates.Race(config, RequestRecord(config), print, cloud.machine(), cloud.machine())


def create(cloud: Cloud, config: Config) -> str:
    return candidates.create(config, lambda text: None, cloud.machine(), cloud.machine()).accelerator_type


def fill_v4_zone(cloud: Cloud) -> None:
    cloud.trouble = lambda zone, command, now: NO_CAPACITY if zone == V4.zone and "create" in command else None


def history(config: Config) -> list[tuple[str, str]]:
    return [(item.candidate.accelerator_type, item.outcome) for item in RequestRecord(config).read()]


def nodes(cloud: Cloud) -> list[str]:
    cloud.node()
    return ["/".join(name.split("/")[3::2]) for name in cloud.state.nodes]


def test_candidates_are_all_combinations_once_in_the_files_order_where_google_has_them(tmp_path: Path) -> None:
    more = "  - {accelerator_type: [v4-8, v2-8], capacity: [spot, on-demand], zones: [us-central2-b]}\n"
    config = make(tmp_path, more)
    assert config.candidates[:3] == [V4, SMALL, V3]
    assert [str(candidate) for candidate in config.candidates[3:]] == [
        "v4-8 (on-demand) in us-central2-b",
        "v2-8 (spot) in us-central2-b",
        "v2-8 (on-demand) in us-central2-b",
    ]
    names = [(place.zone, place.node) for place in map(config.placed, config.candidates)]
    assert len(set(names)) == len(names)
    config = make(tmp_path, "  - {accelerator_type: v2-8}\n")
    zones = [candidate.zone for candidate in config.candidates if candidate.accelerator_type == "v2-8"]
    assert zones == ["us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"]


def test_a_batch_that_does_not_divide_over_a_candidate_is_refused_with_its_line(tmp_path: Path) -> None:
    trainer = "model: {name: bert-tiny}\ndata: {train: /d, tokenizer: /t}\ntrain: {steps: 1, global_batch_size: 8}\n"
    with pytest.raises(BadInput, match=r"run\.yaml:7: .*candidates: v3-32: .*does not divide evenly over 32 devices"):
        make(tmp_path, f"  - {{accelerator_type: v3-32}}\n{trainer}output: /o\n")


def test_the_first_that_is_granted_is_the_slice_of_every_later_command(cloud: Cloud, config: Config) -> None:
    fill_v4_zone(cloud)
    assert create(cloud, config) == "v3-8"
    assert slice_hints.current(config) == V3
    assert slice_hints.in_current_place(config).accelerator.hosts == 1
    assert nodes(cloud) == ["us-central1-a/demo"]
    assert create(cloud, config) == "v3-8"
    assert history(config) == [("v4-16", "no capacity"), ("v4-8", "no capacity"), ("v3-8", "")]


@dataclass
class Answer:
    """Google's answer to one request, a slice or an error, at a time of the clock or when the request is withdrawn."""

    clock: Clock
    at: float
    answer: SliceState | Exception
    check: Any  # raises when the request is withdrawn

    def done(self) -> bool:
        try:
            self.check()
        except (candidates._Over, Conflict) as error:
            self.at, self.answer = 0.0, error
        return self.clock.now >= self.at

    def exception(self) -> Exception | None:
        return self.answer if isinstance(self.answer, Exception) else None

    def result(self) -> SliceState | Exception:
        return self.answer


Plan = dict[str, list[tuple[float, bool | Exception]]]


@dataclass
class Answers(InOrder):
    """Threads whose creations end as `plan` says, by type: seconds and whether it is granted, or why it is not, one
    request each. Withdrawals in threads end when they are waited for, if `is_slow`."""

    clock: Clock
    plan: Plan
    is_slow: bool = False
    asked: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # when each type was asked for

    def submit(self, function: Any, *args: Any) -> Any:
        if not isinstance(args[0], Config):
            return Mock(result=lambda: function(*args)) if self.is_slow else super().submit(function, *args)
        name = args[0].slice.accelerator_type
        self.asked[name].append(self.clock.now)
        seconds, granted = self.plan[name].pop(0) if self.plan.get(name) else (1e9, False)
        answer = granted if isinstance(granted, Exception) else Stockout("no capacity")
        state = SliceState("demo", "READY", "", name, ())
        return Answer(self.clock, self.clock.now + seconds, state if granted is True else answer, args[1].clock.check)


@dataclass
class Won:
    """How a race ended: the slice's type, the seconds that it took, when each type was asked for and withdrawn."""

    kept: str
    took: float
    asked: dict[str, list[float]]
    withdrawn: dict[str, float]


def run_race(cloud: Cloud, config: Config, plan: Plan, is_slow: bool = False) -> Won:
    threads, begun, withdrawn = Answers(cloud.clock, plan, is_slow), cloud.clock.now, dict[str, float]()
    machine = replace(cloud.machine(), threads=threads)

    def delete(_config: Config, places: Sequence[Config], *_: Any, **__: Any) -> None:
        withdrawn.update({place.slice.accelerator_type: cloud.clock.now - begun for place in places})

    with patch.object(deletion, "delete_places", delete), candidates.turn(config, print, machine) as record:
        kept = candidates.Race(config, record, print, machine, machine).run().accelerator_type
    assert [item.candidate.accelerator_type for item in record.open()] == [kept]
    asked = {name: [moment - begun for moment in moments] for name, moments in threads.asked.items()}
    return Won(kept, cloud.clock.now - begun, asked, withdrawn)


@pytest.mark.parametrize(
    ("limit", "plan", "kept", "seconds", "asked"),
    [  # a granted slice waits for two minutes for a better one
        ("", {"v3-8": [(10, True)], "v4-16": [(90, True)]}, "v4-16", 90, {}),
        ("", {"v3-8": [(10, True)], "v4-16": [(200, True)]}, "v3-8", 130, {}),
        ("", {"v3-8": [(10, True)], "v4-8": [(20, False)], "v4-16": [(40, False)]}, "v3-8", 40, {}),
        ("", {"v4-8": [(10, True)], "v3-8": [(20, True)], "v4-16": [(40, False)]}, "v4-8", 40, {}),
        # a request gives way after ten minutes without room for others, and is made again ten minutes later
        ("8.0", {"v4-16": [(1e9, False), (5, True)]}, "v4-16", 1205,
         {"v4-16": [0, 1200], "v4-8": [600], "v3-8": [600]}),
        ("8.0", {"v4-8": [(630, True)], "v3-8": [(588, True)]}, "v4-8", 1230, {"v4-16": [0]}),  # not for a granted one
        ("14.0", {"v4-16": [(700, True)]}, "v4-16", 700, {"v4-16": [0], "v4-8": [0], "v3-8": [0]}),  # no need
    ],
)  # fmt: skip
def test_the_best_candidate_in_time_is_kept(
    cloud: Cloud, tmp_path: Path, limit: str, plan: Plan, kept: str, seconds: float, asked: dict[str, list[float]]
) -> None:
    won = run_race(cloud, make(tmp_path, f"  price_limit: {limit}\n" if limit else ""), plan)
    assert won.kept == kept
    assert 0 <= won.took - seconds <= (2 if seconds < 1000 else 5)
    assert {name: won.asked[name] for name in asked} == {name: pytest.approx(asked[name], abs=5) for name in asked}
    if seconds == 40 and kept == "v4-8":
        assert won.withdrawn["v3-8"] <= 12, "what can't become the slice is withdrawn at once"


def test_a_request_whose_answer_came_after_the_last_look_does_not_give_way(cloud: Cloud, tmp_path: Path) -> None:
    starting = race(cloud, make(tmp_path, "  price_limit: 8.0\n"))
    request = starting.record.ask(V4, "demo", 1.0)
    starting.entries[V4] = candidates._Entry(request, threading.Event(), -1e9, Mock(done=lambda: True))
    starting._make_room()
    assert V4 in starting.entries


def test_after_a_sleep_a_request_has_its_time(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, long = cloud.clock.sleep, iter([2000.0])
    monkeypatch.setattr(cloud.clock, "sleep", lambda seconds: sleep(next(long, seconds)))
    assert run_race(cloud, make(tmp_path, "  price_limit: 8.0\n"), {"v4-16": [(2004, True)]}).asked == {"v4-16": [0]}


def test_a_withdrawal_is_made_once(cloud: Cloud, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answer was lost: Google may have accepted it. One that Google refuses needs no withdrawal."""
    plan: Plan = {"v4-16": [(10, Unavailable("lost"))], "v4-8": [(5, QuotaExceeded("TPUs"))], "v3-8": [(300, True)]}
    won = run_race(cloud, config, plan, is_slow=True)
    assert (won.kept, list(won.withdrawn), won.asked["v4-16"]) == ("v3-8", ["v4-16"], [0])
    assert history(config)[:2] == [("v4-16", requests.WITHDRAWN), ("v4-8", requests.REFUSED)]
    assert capsys.readouterr().out.count("withdrawing") == 1


def test_an_interrupt_keeps_a_granted_slice_only(cloud: Cloud, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_hints, "save_place", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_race(cloud, config, {"v4-16": [(10, True)]})
    assert history(config) == [("v4-16", ""), ("v4-8", requests.WITHDRAWN), ("v3-8", requests.WITHDRAWN)]


def test_nothing_is_asked_for_again_after_a_down_or_an_error_of_this_machine(cloud: Cloud, tmp_path: Path) -> None:
    record = RequestRecord(config := make(tmp_path, "  stockout_minutes: 2\n"))
    cloud.at(12, lambda: record.end(record.open(), requests.DELETED, 1.0))
    with pytest.raises(Conflict, match="deleted by another command"):
        run_race(cloud, config, {"v4-16": [(10, False), (0, True)]})
    with pytest.raises(OSError, match="full"):
        run_race(cloud, config, {"v4-16": [(10, OSError("full"))]})


def test_a_slice_of_an_unrecorded_grant_is_kept(cloud: Cloud, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has recorded it in a bucket that does not answer now."""
    monkeypatch.setattr(RequestRecord, "grant", lambda *_: None)
    won = run_race(cloud, config, {"v3-8": [(10, True)], "v4-8": [(20, False)], "v4-16": [(40, False)]})
    assert won.kept == "v3-8"
    assert "v3-8" not in won.withdrawn


@pytest.mark.parametrize(
    ("error", "seconds"), [(CommandTimeout("no answer"), 300), (Refused("no"), 0), (KeyboardInterrupt(), 0)]
)
def test_a_withdrawal_is_given_up_at_once_or_after_five_minutes_without_an_answer(
    cloud: Cloud, config: Config, capsys: pytest.CaptureFixture[str], error: BaseException, seconds: float
) -> None:
    begun, starting = cloud.clock.now, race(cloud, config)
    asked = starting.record.ask(V4, "demo", 1.0)
    with patch.object(deletion, "delete_places", side_effect=error), contextlib.suppress(KeyboardInterrupt):
        starting.withdraw([asked])
    assert starting.record.open() == [asked]
    assert seconds <= cloud.clock.now - begun < seconds + 10
    assert "not withdrawn yet, and billed once granted" in capsys.readouterr().out


def test_a_withdrawal_looks_once_more_after_its_thread_has_ended(cloud: Cloud, config: Config) -> None:
    starting, looks, end, over = race(cloud, config), list[float](), cloud.clock.now + 10, threading.Event()
    request = starting.record.ask(V4, "demo", 1.0)
    starting.entries[V4] = candidates._Entry(request, over, 0.0, Mock(done=lambda: cloud.clock.now >= end))
    with patch.object(deletion, "delete_places", lambda *_, **__: looks.append(cloud.clock.now)):
        starting.withdraw([request])
    assert (over.is_set(), looks[-1] >= end) == (True, True)


def test_after_a_stockout_everywhere_the_first_that_is_due_is_asked_for_again(cloud: Cloud, tmp_path: Path) -> None:
    """Pauses for half to one and a half times 15 seconds, then 30."""
    config, none = make(tmp_path, "  stockout_minutes: 2\n"), [(0.0, False)]
    plan = {"v4-16": [*none * 2, (0.0, True)], "v4-8": none * 9, "v3-8": none * 9}
    first, second, third = run_race(cloud, config, plan).asked["v4-16"]
    assert 7 <= second - first <= 26
    assert 15 <= third - second <= 48
    begun = cloud.clock.now
    with pytest.raises(Stockout):
        run_race(cloud, config, dict.fromkeys(("v4-16", "v4-8", "v3-8"), none * 99))
    assert 30 <= cloud.clock.now - begun <= 120
    assert not RequestRecord(config).open()


def test_requests_of_a_killed_command_are_withdrawn_but_that_of_the_used_slice(cloud: Cloud, config: Config) -> None:
    create(cloud, config)
    record = RequestRecord(config)
    record.ask(V3, "demo-3", cloud.clock.time())
    with record.try_lock(), pytest.raises(Conflict, match="another tpu-launch asks for candidates of slice demo"):
        candidates.withdraw_unused(config, lambda text: None, cloud.machine())
    TpuVm(config, print, cloud.machine()).withdraw_unused()
    assert [outcome for _, outcome in history(config)] == ["", *[requests.WITHDRAWN] * 3]
    assert nodes(cloud) == ["us-central2-b/demo"]
    cloud.delete()
    cloud.clock.sleep(60)
    create(cloud, config)
    assert history(config)[0] == ("v4-16", requests.DELETED)
    cloud.delete()
    create(cloud, config)
    assert history(config)[4] == ("v4-16", requests.TAKEN), "it is DELETING"


@pytest.mark.parametrize(("state", "granted"), [("READY", False), ("CREATING", True)])
def test_the_slice_of_a_killed_command_is_used_alone(cloud: Cloud, config: Config, state: str, granted: bool) -> None:
    record = RequestRecord(config)
    cloud.made_by(OURS, state)
    used, _ = record.ask(V4, "demo", 1.0), record.ask(V3, "demo", 2.0)
    if granted:
        record.grant(used, 3.0)
    assert create(cloud, config) == "v4-16"
    assert history(config) == [("v4-16", ""), ("v3-8", requests.WITHDRAWN)]
    assert record.open()[0].granted is not None
    edited = config.slice.model_copy(update={"capacity": "on-demand", "candidates": []})
    assert create(cloud, replace(config, slice=edited)) == "v4-16", "the edited file names the same node"
    record.end(record.open(), requests.TAKEN, 3.0)
    record.grant(record.ask(V3, "demo", 4.0), 5.0)
    candidates.withdraw_unused(config, print, cloud.machine())
    assert slice_hints.current(config) == V3, "the candidate of the last grant"


def test_a_request_or_preempted_slice_that_fits_the_limit_no_more_is_withdrawn(cloud: Cloud, tmp_path: Path) -> None:
    create(cloud, make(tmp_path))
    cloud.node().resource["state"] = "PREEMPTED"
    config = make(tmp_path, "  price_limit: 4.0\n")
    asked = RequestRecord(config).ask(V4, "demo-9", cloud.clock.time())
    assert create(cloud, config) == "v4-8"
    assert nodes(cloud) == ["us-central2-b/demo-2"]
    assert history(config)[asked.number - 1] == ("v4-16", requests.WITHDRAWN)


def test_a_slice_of_another_type_is_not_deleted_with_the_request_of_its_name(cloud: Cloud, config: Config) -> None:
    cloud.made_by(OURS)
    cloud.node().resource["acceleratorType"] = "v4-8"
    RequestRecord(config).ask(V4, "demo", 1.0)
    with pytest.raises(Conflict, match="exists and is a v4-8"):
        create(cloud, config)
    assert nodes(cloud) == ["us-central2-b/demo"]


@pytest.mark.parametrize("state", ["READY", "CREATING"])
def test_the_slice_of_a_killed_command_counts_if_it_is_ready(cloud: Cloud, config: Config, state: str) -> None:
    cloud.made_by(OURS, state)
    RequestRecord(config).ask(V4, "demo", cloud.clock.time())
    candidates.withdraw_unused(config, lambda text: None, cloud.machine())
    assert [item.granted for item in RequestRecord(config).open()] == [cloud.clock.now] * (state == "READY")
    assert nodes(cloud) == ["us-central2-b/demo"] * (state == "READY")


def test_another_user_s_slice_is_left_alone_where_requests_are_withdrawn(cloud: Cloud, config: Config) -> None:
    cloud.made_by(BOBS)
    said: list[str] = []
    places = [config.placed(V4)]
    assert not deletion.delete_places(config, places, said.append, cloud.machine(), all_requests=True)
    assert any(line.startswith("left alone: ") for line in said)
    with pytest.raises(NotOurs):
        deletion.delete_places(config, places, said.append, cloud.machine(), all_requests=False)
    assert nodes(cloud) == ["us-central2-b/demo"]


@pytest.mark.parametrize("state", ["CREATING", "READY"])
@pytest.mark.parametrize("labels", [BOBS, {**OURS, "tpu-launch-slice": "demo-2"}])
def test_a_node_of_a_candidates_name_is_another_users_or_another_files_slice(
    cloud: Cloud, config: Config, state: str, labels: dict[str, str]
) -> None:
    assert cloud.machine(BOB).run(commands.create_command(config.placed(SMALL), labels), timeout=900).ok
    cloud.node("demo-2").resource["state"] = state
    fill_v4_zone(cloud)
    slice_hints.save_place(config, V4 if labels is BOBS else SMALL)
    assert create(cloud, config) == "v3-8"
    assert history(config)[1] == ("v4-8", requests.REFUSED)
    assert deletion.delete(config, print, cloud.machine())
    assert nodes(cloud) == ["us-central2-b/demo-2"]


def test_down_alone_deletes_a_slice_that_the_file_does_not_name_any_more(cloud: Cloud, config: Config) -> None:
    cloud.made_by(OURS, name="demo-9")
    (record := RequestRecord(config)).grant(record.ask(Candidate("v4-32", V4.zone, "spot"), "demo-9", 1.0), 2.0)
    for file in config, replace(config, slice=config.slice.model_copy(update={"candidates": []})):
        with pytest.raises(Conflict, match=r"as v4-32 .*, node demo-9, .*: `tpu-launch down` deletes it"):
            create(cloud, file)
    assert deletion.delete(config, print, cloud.machine())
    assert (nodes(cloud), RequestRecord(config).open()) == ([], [])


def test_the_time_to_a_grant_leaves_out_what_was_not_granted() -> None:
    asked = requests.Recorded(1, V4, "demo", 100.0)
    assert asked.describe() == "open"
    assert requests.median_seconds_to_grant([asked]) is None
    granted = replace(asked, granted=160.0)
    assert requests.median_seconds_to_grant([asked, granted]) == 60
    assert granted.describe() == "granted after 60 s"


def test_a_command_tells_once_that_it_waits_for_another_one(cloud: Cloud, config: Config) -> None:
    said, begun = list[str](), cloud.clock.now
    with contextlib.ExitStack() as other:
        assert other.enter_context(RequestRecord(config).try_lock())
        cloud.clock.events.append((begun + 60.0, other.close))
        with candidates.turn(config, said.append, cloud.machine()):
            assert cloud.clock.now >= begun + 60.0
    assert len(said) == 1
    assert f"another tpu-launch is asking for candidates of slice {config.slice.name}" in said[0]


def test_a_stopped_slice_above_the_price_limit_is_not_started(cloud: Cloud, tmp_path: Path) -> None:
    cloud.made_by(OURS, "STOPPED")
    wanted = r"demo is STOPPED and is not started: .*price_limit\) is \$4\.00 .*about \$7\.3\d.*\n +raise the limit"
    with pytest.raises(BadInput, match=wanted):
        create(cloud, make(tmp_path, "  price_limit: 4.0\n"))
    assert not any("start" in call for call in cloud.calls)


def test_no_request_is_made_beyond_the_price_limit(cloud: Cloud, tmp_path: Path) -> None:
    config = make(tmp_path, "  price_limit: 4.0\n")  # v4-16: 7.37, v4-8: 3.69, v3-8: 2.04 dollars an hour
    said: list[str] = []
    asked: list[float] = []
    cloud.trouble = lambda zone, command, now: asked.append(len(RequestRecord(config).open()))
    candidates.create(config, said.append, cloud.machine(), cloud.machine())
    assert any("not asking for v4-16" in line and "$7.37" in line for line in said)
    assert [item.candidate for item in RequestRecord(config).read()] == [SMALL]
    assert max(asked) == 1


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("verb", ["describe", "create"])
def test_nothing_is_left_of_requests_that_a_down_ends(cloud: Cloud, config: Config, granted: bool, verb: str) -> None:
    record = RequestRecord(config)
    if granted:
        create(cloud, config)
        record.ask(V3, "demo", 1.0)

    def trouble(zone: str, command: Sequence[str], now: float) -> None:
        if granted and "queued-resources" in command:  # of what is withdrawn
            cloud.state.nodes.clear()
        if verb in command and not (granted and cloud.state.nodes):
            record.end(record.open(), requests.DELETED, now)

    cloud.trouble = trouble
    with pytest.raises(Conflict, match="deleted by another command"):
        create(cloud, config)
    assert not nodes(cloud)
    assert not record.open()


def test_a_command_on_another_machine_looks_for_the_candidate_that_exists(cloud: Cloud, config: Config) -> None:
    cloud.made_by(BOBS)
    cloud.made_by(OURS, zone=V3.zone)
    with pytest.raises(UnknownCommand, match="ssh"):
        SliceConnections(config, cloud.machine()).run_through_gcloud(0, "true")
    assert cloud.calls[-1].startswith(f"{V3.zone} tpu-vm ssh")


def test_a_supervisor_on_another_machine_uses_and_withdraws_the_requests_of_the_one_before(
    config: Config, tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have asked for other candidates of a slice of this name before."""
    url, first, second = "gs://bucket/runs/r/launcher/requests", *config.candidates[:2]
    laptop = RequestRecord(config)
    laptop.ask(first, "before", 1.0)
    laptop.share(url)
    laptop.grant(laptop.ask(second, "spot", 2.0), 3.0)
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "elsewhere"))
    elsewhere = RequestRecord(config)
    elsewhere.end([elsewhere.ask(first, "own", 4.0)], requests.WITHDRAWN, 5.0)
    left = elsewhere.ask(first, "left", 6.0)
    elsewhere.share(url)
    found = [(item.number, item.node, item.granted) for item in elsewhere.open()]
    assert found == [(1, "before", None), (2, "spot", 3.0), (3, left.node, None)]
    elsewhere.end(elsewhere.open(), requests.WITHDRAWN, 7.0)
    laptop.share(url)
    assert laptop.open() == []
    assert laptop.read() == elsewhere.read()
    server.fault = lambda request: HttpResponse(403)
    with pytest.raises(LaunchError, match="request 4 was not made, because it can't be recorded"):
        elsewhere.ask(first, "late", 8.0)


def test_a_grant_of_another_machine_is_copied_before_a_request_and_when_the_bucket_answers_again(
    cloud: Cloud, config: Config, tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, laptop = "gs://bucket/runs/r/launcher/requests", RequestRecord(config)
    asked = laptop.ask(V4, "demo", 1.0)
    laptop.share(url)
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "elsewhere"))
    elsewhere = RequestRecord(config)
    elsewhere.share(url)
    elsewhere.grant(asked, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.storage, "read", Mock(side_effect=requests.storage.StorageError("no answer")))
        laptop.grant(asked, 3.0)
        assert laptop.read()[0].granted is None
        elsewhere.end([asked], requests.DELETED, 4.0)
        laptop.end([asked], requests.WITHDRAWN, 5.0)
    assert not laptop.open()  # or it would be made again
    laptop.pull()
    assert laptop.read()[0].granted == 2.0
    laptop.grant(laptop.ask(V4, "demo", 6.0), 7.0)
    laptop.share(url)
    assert [item.number for item in laptop.open()] == [2], "although each machine has its own end of request 1"
    create(cloud, config)
    assert nodes(cloud) == ["us-central2-b/demo"], "what it creates is not withdrawn as a request of before"


def test_a_share_that_is_killed_loses_and_doubles_no_open_request(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each write of a machine that shares first, of one that has other requests of the same numbers, and
    of one that has none. A folder stands for the bucket."""
    first, second = config.candidates[:2]
    left = steps = -1
    complete = {("before", None), ("granted", 5.0), ("left", None)}

    def count_and_kill(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    def share(record: RequestRecord) -> None:
        writes = (requests.storage, "write"), (requests.home, "write_private"), (Path, "unlink"), (os, "link")
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for place, name in writes:
                patch.setattr(place, name, count_and_kill(getattr(place, name)))
            record.share(url)
        names = RequestRecord(config)._listed()
        assert names >= {f"{name[:6]}.asked.json" for name in names}, "no end is left without its request"

    def move_to(machine: str) -> RequestRecord:
        monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / f"{machine} {steps}"))
        return RequestRecord(config)

    def opened() -> set[tuple[str, float | None]]:
        found = [(item.node, item.granted) for item in RequestRecord(config).open()]
        assert len(set(found)) == len(found), f"killed at write {steps}"
        return set(found)

    while left <= 0:
        steps += 1
        left, url = steps + 1, str(tmp_path / f"bucket {steps}")
        laptop = move_to("laptop")
        laptop.end([laptop.ask(second, "tried", 0.0)], requests.REFUSED, 0.5)
        laptop.ask(first, "before", 1.0)
        share(laptop)
        assert opened() == {("before", None)}
        elsewhere = move_to("elsewhere")
        elsewhere.end([elsewhere.ask(first, "own", 2.0)], requests.WITHDRAWN, 3.0)
        elsewhere.grant(elsewhere.ask(second, "granted", 4.0), 5.0)
        elsewhere.ask(first, "left", 6.0)
        share(elsewhere)
        assert opened() >= {("granted", 5.0), ("left", None)}, f"killed at write {steps}"
        is_unharmed, third = left > 0, move_to("third")
        share(third)
        third.pull()
        assert not is_unharmed or opened() in (set(), complete), f"killed at write {steps}, and then pulled"
        for machine in ("laptop", "elsewhere", "third", "laptop", "elsewhere"):
            move_to(machine).share(url)
        for machine in ("laptop", "elsewhere", "third"):
            move_to(machine)
            assert opened() == complete, f"killed at write {steps}"
    assert steps > 20


def test_the_command_shows_requests_that_another_machine_made_for_a_run_of_a_bucket(
    cloud: Cloud,
    tmp_path: Path,
    server: BucketServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a machine that has nothing of the run, and on the one that began it, after a takeover."""
    url, laptop = "gs://bucket/runs/r/launcher", str(tmp_path / "laptop")
    monkeypatch.setenv("TPU_LAUNCH_HOME", laptop)
    config = make(tmp_path)
    record = RunRecord("r", "p", "us-central2-b", "demo", "hash", 0.0, "tpu-vm", bucket=url, user="ann")
    spec = Specification(run="", provider="tpu-vm", file="f.yaml", configuration=config.document.value)
    ledger = begin_run(Path(laptop), cloud.machine(), record, config.document.dump(), spec, None)
    ledger.publish()
    requests_here = RequestRecord(config)
    requests_here.end([requests_here.ask(V4, "first", 1.0)], requests.TAKEN, 2.0)
    requests_here.share(f"{url}/requests")

    def shown(file: str) -> list[tuple[str, str]]:
        cli(["capacity", "-f", file, "--json"], standalone_mode=False)
        return [(item["node"], item["outcome"]) for item in json.loads(capsys.readouterr().out)]

    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "elsewhere"))
    assert shown("gs://bucket/runs/r") == [("first", "taken away")]
    RequestRecord(config).ask(V3, "second", 3.0)
    monkeypatch.setenv("TPU_LAUNCH_HOME", laptop)
    for file in "gs://bucket/runs/r", str(tmp_path / "run.yaml"):
        assert shown(file) == [("first", "taken away"), ("second", "")]
    requests_here.grant(requests_here.open()[0], 63.0)
    server.fault = lambda request: HttpResponse(403)
    cli(["capacity", "-f", str(tmp_path / "run.yaml")], standalone_mode=False)
    output = capsys.readouterr()
    assert "requests of other machines are not shown" in output.err
    lines = output.out.splitlines()
    assert any("v4-16" in line and "$7.37" in line and "never granted here" in line for line in lines)
    assert any("v3-8 (spot) in us-central1-a" in line and "granted after 60 s" in line for line in lines)
    assert sum("taken away" in line for line in lines) == 1


@pytest.mark.parametrize("damage", ["", "\0\0", None])
def test_a_request_that_a_power_loss_damaged_stops_no_command(config: Config, damage: str | None) -> None:
    record, folder = RequestRecord(config), requests.home.of_slice("p", "demo", "requests")
    for place in V4, V3, SMALL:
        record.grant(record.ask(place, "demo", 1.0), 2.0)
    record.end(record.read()[::2], requests.WITHDRAWN, 3.0)
    for name in "000001.ended.json", "000003.asked.json":
        (folder / name).unlink() if damage is None else (folder / name).write_text(damage)
    record = RequestRecord(config)
    assert [item.number for item in record.open()] == ([2] if damage is not None else [1, 2])
    assert record.ask(V4, "demo", 4.0) == record.open()[-1]


def test_two_processes_share_no_scratch_file_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link, synced = tmp_path / "000001.asked.json", os.link, Mock(wraps=os.fsync)
    monkeypatch.setattr(os, "fsync", synced)

    def the_other_first(source: Path, target: Path) -> None:
        assert synced.called, "or a power loss may leave an empty file"
        monkeypatch.setattr(os, "link", link)
        program = "import sys; from launcher.tpu_vm.requests import *; create_only(Path(sys.argv[1]), 'theirs')"
        subprocess.run([sys.executable, "-c", program, path], check=True)
        link(source, target)

    monkeypatch.setattr(os, "link", the_other_first)
    assert not any(requests.create_only(path, "ours") for _ in range(2))
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]
