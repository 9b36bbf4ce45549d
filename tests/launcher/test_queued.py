"""Claims about queued requests and several zones: command lines, answers, and waiting in the emulated API's queue."""

import contextlib
import copy
import itertools
import random
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from launcher.config import Config
from launcher.emulator import faults
from launcher.emulator.state import Fault
from launcher.errors import BadInput
from launcher.gcloud import Conflict, PermissionDenied, QuotaExceeded, Stockout, Unavailable
from launcher.provider import SliceState
from launcher.run.session import RunStopped
from launcher.tpu_vm import commands, creation, deletion, slice_hints, slices
from launcher.tpu_vm.slices import NotOurs
from launcher.workstation import Owner
from tests.launcher.emulated_gcloud import ANN, BOB, BOBS, DENIED, OFFLINE, UNAVAILABLE, Cloud
from tests.launcher.run_files import SLICE, load_text

ZONED = (
    "{name: s, accelerator_type: v5litepod-8, zones: [us-central1-a, us-west4-a, us-west1-c], capacity: reserved, "
    "queued: {valid_until_hours: 6}}"
)


@pytest.fixture
def zoned(tmp_path: Path) -> Config:
    return load_text(tmp_path, f"project: p\nzone: us-west1-c\nslice: {ZONED}\n")


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        ("reserved", "--reserved"),
        ("reserved, reservation: ours", "alpha --reserved --reservation=ours"),
        ("calendar, reservation: ours", "alpha --provisioning-model=reservation-bound --reservation=ours"),
        ("flex-start, max_run_hours: 2", "alpha --provisioning-model=flex-start --max-run-duration=7200s"),
    ],
)
def test_a_request_is_made_by_alpha_where_only_that_has_its_capacity(tmp_path: Path, capacity: str, words: str) -> None:
    config = load_text(tmp_path, f"project: p\nzone: us-west1-c\nslice: {ZONED.replace('reserved', capacity)}\n")
    command = commands.create_request_command(config, {"tpu-launch": "1"}, 21600)
    always = (
        "gcloud compute tpus queued-resources create s --project=p --zone=us-west1-c --quiet --node-id=s "
        "--runtime-version=v2-alpha-tpuv5-lite --valid-until-duration=21600s --accelerator-type=v5litepod-8 "
        "--scopes=https://www.googleapis.com/auth/cloud-platform --labels=tpu-launch=1"
    )
    assert sorted(command) == sorted(f"{always} {words}".split())
    assert (command[1] == "alpha") == ("alpha" in words), "elsewhere, alpha contradicts itself"
    assert "--force" in commands.delete_request_command(config)


def test_zones_are_tried_in_order_and_each_once(zoned: Config) -> None:
    assert zoned.zones == ["us-west1-c", "us-central1-a", "us-west4-a"]
    assert [here.zones for here in slice_hints.in_every_place(zoned)] == [[zone] for zone in zoned.zones]


def test_every_command_goes_to_the_zone_where_the_slice_is(zoned: Config) -> None:
    assert "--zone=us-west1-c" in commands.node_command(zoned, "describe")
    slice_hints.save_place(zoned, zoned.candidates[2])
    describe, ssh = commands.node_command(zoned, "describe"), commands.ssh_command(zoned, "true")
    for command in (describe, ssh, commands.delete_request_command(zoned)):
        assert "--zone=us-west4-a" in command
    assert slice_hints.in_current_place(zoned).zone == "us-west4-a"
    slice_hints.forget(zoned)
    assert "--zone=us-west1-c" in commands.node_command(zoned, "describe")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"zone": "mars-west1-a"}', '{"zone": 3}'])
def test_a_memory_that_is_broken_or_of_another_file_is_no_memory(zoned: Config, text: str) -> None:
    slice_hints.save_place(zoned, zoned.candidates[2])
    next((Path(zoned.folder) / "home" / "slices").iterdir()).write_text(text)
    assert slice_hints.current(zoned).zone == "us-west1-c"


def test_a_zone_that_can_not_be_one_is_named_with_its_line(tmp_path: Path) -> None:
    text = "project: p\nzone: us-west1-c\nslice:\n  name: s\n  accelerator_type: v4-8\n  zones:\n  - europe\n"
    with pytest.raises(BadInput, match=r"run\.yaml:7: .*'europe' is not the name of a zone"):
        load_text(tmp_path, text)


HOUR = 3600.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    section = "{name: s, accelerator_type: v5litepod-8, queued: {valid_until_hours: 6}}"
    return load_text(tmp_path, f"project: p\nzone: us-west1-c\nslice: {section}\n")


@pytest.fixture
def cloud() -> Cloud:
    """A cloud without capacity."""
    cloud = Cloud()
    cloud.state.faults.append(Fault("stockout", "tpu"))
    return cloud


def create(config: Config, cloud: Cloud, seed: int = 1) -> tuple[SliceState, list[str]]:
    said: list[str] = []
    return creation.create(config, said.append, replace(cloud.machine(), random=random.Random(seed))), said


def make_request(config: Config, cloud: Cloud, owner: Owner = ANN) -> None:
    labels = slices.make_labels(config, owner, 0.0)
    made = cloud.machine(owner).run(commands.create_request_command(config, labels, 6 * HOUR), timeout=60)
    assert made.ok, made.stderr


def request_state(cloud: Cloud) -> str:
    return "".join(queued.state for queued in cloud.state.queued.values())


def requests(cloud: Cloud) -> int:
    """Returns how often a request was made."""
    return cloud.calls.count("us-west1-c queued-resources create")


def preempt_first(cloud: Cloud) -> None:
    """Takes the node of the first request away before it is seen to be READY."""

    def take_away(_zone: str, command: str, _now: float) -> None:
        for node in cloud.state.nodes.values():
            if command == "tpu-vm describe" and requests(cloud) == 1:
                node.resource["state"] = "PREEMPTED"

    cloud.trouble = take_away


@pytest.mark.parametrize("earlier", [False, True], ids=["of this command", "of an earlier one"])
def test_a_request_is_made_once_and_told_of_once_a_minute(config: Config, cloud: Cloud, earlier: bool) -> None:
    if earlier:
        make_request(config, cloud)
        cloud.clock.sleep(HOUR)
    begin = cloud.clock.now
    cloud.at(HOUR, cloud.state.faults.clear)
    if earlier:
        cloud.trouble = lambda zone, command, now: UNAVAILABLE if now < begin + 20 and "queued" in command else None
    node, said = create(config, cloud)
    assert node.ready
    assert requests(cloud) == 1
    assert 55 <= sum("is WAITING_FOR_RESOURCES" in line for line in said) <= 65
    age, left = ("1 h 10 min", "4 h 49 min") if earlier else ("10 min", "5 h 49 min")
    assert f"request s is WAITING_FOR_RESOURCES, requested {age} ago, valid for {left} more" in said


@pytest.mark.parametrize("state", ["SUSPENDED", "DELETING"])  # it lost its node, or goes away
def test_an_ended_request_has_no_age(config: Config, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    make_request(config, cloud)
    describe, old = slices.describe_request, slices.describe_request(config, cloud.machine())
    answers = [replace(old, state=state)] * (2 if state == "DELETING" else 0)
    cloud.clock.sleep(5.9 * HOUR)
    cloud.at(1.1 * HOUR, cloud.state.faults.clear)
    for request in cloud.state.queued.values():
        request.state = state
    if answers:
        cloud.state.queued.clear()
    monkeypatch.setattr(slices, "describe_request", lambda *words: answers.pop() if answers else describe(*words))
    assert create(config, cloud)[0].ready


def test_one_that_is_being_provided_at_the_end_gets_the_time_of_a_creation(config: Config, cloud: Cloud) -> None:
    cloud.state.create_seconds = 600.0
    cloud.at(6 * HOUR - 300, cloud.state.faults.clear)
    assert create(config, cloud)[0].ready
    assert requests(cloud) == 1


@pytest.mark.parametrize("seconds", [2 * HOUR, 600.0])
def test_one_that_is_provided_for_longer_or_taken_away_is_deleted(config: Config, cloud: Cloud, seconds: float) -> None:
    cloud.state.create_seconds = seconds
    preempt_first(cloud)
    cloud.at(6 * HOUR - 300, cloud.state.faults.clear)
    with pytest.raises(Stockout, match=r"the request was deleted\n  ask"):
        create(config, cloud)
    assert (request_state(cloud), requests(cloud)) == ("", 1)


def test_a_request_that_another_command_deletes_is_not_made_again_and_not_billed(config: Config, cloud: Cloud) -> None:
    cloud.at(HOUR, cloud.state.queued.clear)
    with pytest.raises(Conflict, match=r"deleted by another command .* makes a new one$"):
        create(config, cloud)
    assert requests(cloud) == 1


@pytest.mark.parametrize("looks", [0, 2, -2])  # at the request, before one is refused; -2: at one made before
def test_an_error_after_a_request_says_that_it_may_be_billed(config: Config, cloud: Cloud, looks: int) -> None:
    seen, words, look = itertools.count(), "stays" if looks else "may be", "queued-resources describe"
    if looks < 0:
        make_request(config, cloud)
        for request in cloud.state.queued.values():
            request.resource.pop("createTime")  # its age is not known
    cloud.trouble = lambda zone, command, now: (
        DENIED if command == look and (looks < 0 or requests(cloud)) and next(seen) >= abs(looks) else None
    )
    with pytest.raises(PermissionDenied, match=f"the request {words} in the queue and is billed when it is granted"):
        create(config, cloud)
    assert request_state(cloud) != ""


def test_a_stop_while_a_request_is_awaited_tells_that_it_stays(config: Config, cloud: Cloud) -> None:
    def stop(zone: str, command: str, now: float) -> None:
        if cloud.state.queued:
            raise RunStopped("demo-1")

    cloud.trouble = stop
    with pytest.raises(RunStopped, match=r"(?s)run demo-1 was stopped.*the request may be in the queue"):
        create(config, cloud)


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_request_is_made_again_with_growing_pauses(config: Config, cloud: Cloud, seed: int) -> None:
    def take_back(_zone: str, command: str, now: float) -> None:
        for request in cloud.state.queued.values():
            created = datetime.fromisoformat(request.resource["createTime"]).timestamp()
            if command == "queued-resources describe" and requests(cloud) < 6 and now > created + 60:
                request.state, request.initiator = "SUSPENDED", "SERVICE"
        if requests(cloud) == 6:
            cloud.state.faults.clear()

    cloud.trouble = take_back
    node, said = create(config, cloud, seed)
    assert node.ready
    assert requests(cloud) == 6
    assert sum("was SUSPENDED (by SERVICE): deleted it" in line for line in said) == 5
    pauses = [seconds for seconds in cloud.clock.slept if seconds > 2.0 and seconds != 5.0]  # 5 s: gcloud's own polls
    limits = zip(pauses, (5, 10, 20, 40), (15, 30, 60, 120), strict=True)
    assert all(low <= pause <= high for pause, low, high in limits)


def test_a_request_whose_node_is_taken_away_before_it_is_ready_is_replaced(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    preempt_first(cloud)
    node, said = create(config, cloud)
    assert node.ready
    assert requests(cloud) == 2
    assert said.count("the node of request s is PREEMPTED: deleting the request, then a new one") == 1


def test_a_failure_that_waiting_does_not_mend_ends_it_at_once(config: Config, cloud: Cloud) -> None:
    def fail(_zone: str, _command: str, _now: float) -> None:
        for request in cloud.state.queued.values():
            request.state, request.error = "FAILED", {"code": 8, "message": "Quota limit 'TPUs' has been exceeded"}

    cloud.trouble = fail
    with pytest.raises(QuotaExceeded):
        create(config, cloud)
    assert requests(cloud) == 1
    assert request_state(cloud) == "", "a failed request would keep its quota"


@pytest.mark.parametrize("answer", [UNAVAILABLE, OFFLINE, DENIED])
def test_waiting_survives_minutes_of_failures_and_says_so(config: Config, cloud: Cloud, answer: str) -> None:
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: answer if 2 * HOUR < now - begin < 2 * HOUR + 400 else None
    cloud.at(3 * HOUR, cloud.state.faults.clear)
    node, said = create(config, cloud)
    assert node.ready
    assert sum("still waiting, although" in line for line in said) == 1
    assert not [line for line in said if "sign in" in line]
    assert requests(cloud) == 1


def test_a_request_is_made_three_times_and_looked_for_after_each_lost_answer(config: Config, cloud: Cloud) -> None:
    """Otherwise `up` ends without naming a request that Google received, when only the answer was lost."""
    cloud.state.faults.clear()
    asks = "queued-resources create"
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if command == asks and requests(cloud) < 6 else None
    with pytest.raises(Unavailable):
        create(config, cloud)
    assert requests(cloud) == 3
    cloud.lost = lambda zone, command, now: UNAVAILABLE if command == asks else None
    assert create(config, cloud)[0].ready
    assert requests(cloud) == 6


@pytest.mark.parametrize("stale", ["tpu-vm describe", "queued-resources describe"])
def test_one_answer_without_it_does_not_delete_a_granted_slice(config: Config, cloud: Cloud, stale: str) -> None:
    cloud.state.faults.clear()
    answers: list[float] = []

    def once(zone: str, command: str, now: float) -> str | None:
        if command != stale or request_state(cloud) != "ACTIVE":
            return None
        answers.append(now)
        return "ERROR: (gcloud.x) NOT_FOUND: Resource 'n' was not found" if now < answers[0] + 2.0 else None

    cloud.trouble = once
    assert create(config, cloud)[0].ready
    assert not [call for call in cloud.calls if "delete" in call]


def test_a_request_of_another_owner_is_neither_waited_for_nor_deleted(config: Config, cloud: Cloud) -> None:
    make_request(config, cloud, BOB)
    for act in (creation.create, deletion.delete):
        with pytest.raises(NotOurs, match="bob created it"):
            act(config, lambda text: None, cloud.machine())
    assert request_state(cloud) == "WAITING_FOR_RESOURCES"
    assert deletion.delete(config, lambda text: None, cloud.machine(BOB))
    assert request_state(cloud) == ""


def test_down_needs_no_permission_for_a_queue_that_is_not_used(config: Config, cloud: Cloud, tmp_path: Path) -> None:
    cloud.trouble = lambda zone, command, now: DENIED if command == "queued-resources describe" else None
    with pytest.raises(PermissionDenied):
        deletion.delete(config, print, cloud.machine())
    assert not deletion.delete(load_text(tmp_path, SLICE), print, cloud.machine())


@pytest.mark.parametrize("seen", [0, 1])
def test_a_request_that_one_look_does_not_show_goes_with_its_node(config: Config, cloud: Cloud, seen: int) -> None:
    """Another `up` made it after the first look, or the second answer is stale: it would keep its quota."""
    cloud.state.faults.clear()
    create(config, cloud)
    missing = iter([*[None] * seen, "ERROR: (gcloud.x) NOT_FOUND: Resource 'r' was not found"])
    cloud.trouble = lambda zone, command, now: next(missing, None) if command == "queued-resources describe" else None
    assert deletion.delete(config, lambda line: None, cloud.machine())
    assert request_state(cloud) == ""


@pytest.mark.parametrize(("before", "replaced"), [(True, True), (True, False), (False, True)])
def test_only_a_node_left_by_its_request_is_deleted(config: Config, cloud: Cloud, before: bool, replaced: bool) -> None:
    """By then, a node of another owner may have taken the name."""
    make_request(config, cloud)
    if before:
        cloud.made_by(slices.make_labels(config, ANN, 0.0), zone=config.zone, name="s")
    kept = copy.deepcopy(cloud.state.nodes)

    def after_the_request(_zone: str, command: str, _now: float) -> None:
        if command == "tpu-vm describe" and cloud.calls[-3].endswith("queued-resources delete"):
            cloud.state.nodes |= kept
            if replaced:
                cloud.state.nodes.clear()
                cloud.made_by(BOBS, zone=config.zone, name="s")

    cloud.trouble = after_the_request
    with contextlib.nullcontext() if before else pytest.raises(NotOurs, match="bob created it"):
        assert deletion.delete(config, print, cloud.machine())
    assert [node.resource["labels"] for node in cloud.state.nodes.values()] == [BOBS] * replaced


def test_a_request_that_takes_the_place_of_ours_is_left_alone(config: Config, cloud: Cloud) -> None:
    make_request(config, cloud)
    machine, said = cloud.machine(), list[str]()
    doomed = slices.describe_request(config, machine)
    cloud.clock.sleep(1.0)
    cloud.state.queued.clear()
    make_request(config, cloud, BOB)
    deletion.remove(config, doomed, said.append, machine, machine.clock.monotonic() + 600)
    assert said == ["request s was recreated in the meantime by bob: left alone"]
    assert request_state(cloud) == "WAITING_FOR_RESOURCES"


def test_a_node_that_google_deletes_after_a_preemption_counts_as_preempted(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    create(config, cloud)
    (node,) = cloud.state.nodes.values()
    faults.preempt(node)
    while node.state != "DELETING":
        cloud.node()
    assert slices.describe(config, cloud.machine()).state == "PREEMPTED"


def test_a_node_that_a_user_deletes_does_not(config: Config, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.state.faults.clear()
    create(config, cloud)
    cloud.delete(config.zone, config.slice.name)
    before = slices.Request("s", "ACTIVE", "", "v5litepod-8", (), initiator="SERVICE")
    with monkeypatch.context() as patch:
        patch.setattr(slices, "describe_request", lambda *_: before)
        assert slices.describe(config, cloud.machine()).state == "DELETING", "SERVICE made it, and took nothing away"
    assert slices.describe(config, cloud.machine()).state == "DELETING"
    for _ in range(4):
        cloud.clock.sleep(60.0)
        cloud.node()
    assert request_state(cloud) == "SUSPENDED"
    assert slices.describe(config, cloud.machine()) is None
