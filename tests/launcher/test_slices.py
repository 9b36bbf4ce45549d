"""Claims about making and deleting slices where others act and answers get lost. gcloud is the emulator's API."""

import contextlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.config import Config
from launcher.errors import BadInput, CommandTimeout, Exit, LaunchError
from launcher.gcloud import Conflict, Stockout, Unavailable
from launcher.provider import SliceState
from launcher.run.session import RunStopped
from launcher.tpu_vm import candidates, creation, deletion, slice_hints, slices
from launcher.tpu_vm.slices import NotOurs
from launcher.workstation import Owner
from tests.launcher.emulated_gcloud import ANN, BOB, BOBS, BUSY, DENIED, NO_CAPACITY, OURS, UNAVAILABLE, Cloud
from tests.launcher.run_files import SLICE, load_text

ZONE = "us-central2-b"
FOREIGN = [
    pytest.param({}, "no label tpu-launch=1", id="made by hand"),
    pytest.param(BOBS, "bob created it", id="another user"),
    pytest.param({"tpu-launch": "1"}, "an unknown user created it", id="no owner"),
    pytest.param({**OURS, "tpu-launch-account": BOB.account}, "another Google account", id="another account"),
    pytest.param({"tpu-launch": "1", "tpu-launch-owner": "ann"}, "or none|without a Google account", id="no account"),
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_text(tmp_path, SLICE)


@pytest.fixture
def zones(tmp_path: Path) -> Config:
    section = "{name: demo, accelerator_type: v5litepod-8, zones: [us-central1-a, us-west4-a]}"
    return load_text(tmp_path, f"project: p\nzone: us-west1-c\nslice: {section}\n")


def up(cloud: Cloud, config: Config, owner: Owner = ANN) -> SliceState:
    return creation.create(config, lambda text: None, cloud.machine(owner))


def down(cloud: Cloud, config: Config, owner: Owner = ANN) -> bool:
    return deletion.delete(config, lambda text: None, cloud.machine(owner))


def longer(config: Config, minutes: float) -> Config:
    return replace(config, slice=config.slice.model_copy(update={"create_minutes": minutes}))


def _first(cloud: Cloud, command: str) -> bool:
    return command == "tpu-vm create" and cloud.calls.count(f"{ZONE} tpu-vm create") == 1


@pytest.mark.parametrize(("labels", "reason"), FOREIGN)
def test_down_deletes_nothing_of_others(cloud: Cloud, config: Config, labels: dict[str, str], reason: str) -> None:
    cloud.made_by(labels)
    for owner in (Owner("ann"), ANN):
        with pytest.raises(NotOurs, match=reason) as refusal:
            down(cloud, config, owner)
    assert refusal.value.exit_code is Exit.CONFLICT
    assert not refusal.value.transient
    assert "--any-owner" in str(refusal.value)
    assert cloud.node() is not None
    assert not [call for call in cloud.calls if "delete" in call]
    assert down(cloud, replace(config, any_owner=True))
    assert cloud.node() is None


@pytest.mark.parametrize("state", ["PREEMPTED", "STOPPED", "CREATING", "DELETING"])
@pytest.mark.parametrize(("labels", "reason"), FOREIGN)
def test_a_creation_deletes_starts_and_awaits_nothing_that_is_not_ours(
    cloud: Cloud, config: Config, labels: dict[str, str], reason: str, state: str
) -> None:
    cloud.made_by(labels, state)
    with pytest.raises(NotOurs, match=reason):
        up(cloud, config)
    assert cloud.calls == [f"{ZONE} tpu-vm describe"]


def test_down_waits_until_the_api_answers_and_looks_once_at_the_queue(cloud: Cloud, config: Config) -> None:
    cloud.made_by(OURS)
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if now < begin + 20 and "tpu-vm" in command else None
    assert down(cloud, config)
    assert cloud.node() is None
    assert cloud.calls.count(f"{ZONE} queued-resources describe") == 1


@pytest.mark.parametrize("seconds", range(5, 70, 5))
def test_a_slice_that_takes_the_place_of_ours_is_left_alone(cloud: Cloud, config: Config, seconds: float) -> None:
    cloud.made_by(OURS)
    cloud.at(seconds, lambda: (cloud.state.nodes.clear(), cloud.made_by(BOBS)))
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: BUSY if "delete" in command and now - begin < seconds + 4 else None
    assert down(cloud, config)
    left = cloud.node()
    assert (left.state, left.resource["labels"]) == ("READY", BOBS)


def test_a_zone_without_capacity_is_tried_again_with_pauses(cloud: Cloud, tmp_path: Path) -> None:
    config = load_text(tmp_path, SLICE.replace("v4-16", "v4-16, stockout_minutes: 5"))
    begin, said = cloud.clock.now, list[str]()
    cloud.trouble = lambda zone, command, now: NO_CAPACITY if command == "tpu-vm create" else None
    with pytest.raises(Stockout):
        creation.create(config, said.append, cloud.machine())
    assert 100 <= cloud.clock.now - begin <= 320
    assert 3 <= cloud.calls.count(f"{ZONE} tpu-vm create") <= 8
    assert sum("capacity" in line for line in said) == cloud.calls.count(f"{ZONE} tpu-vm create") - 1


@pytest.mark.parametrize(("answer", "may_exist"), [(UNAVAILABLE, True), (DENIED, False)])
@pytest.mark.parametrize("section", ["", ", zones: [us-west4-a]", ", candidates: [{accelerator_type: v4-8}]"])
def test_a_slice_that_may_exist_is_told_at_once_when_google_does_not_describe_it(
    cloud: Cloud, tmp_path: Path, section: str, answer: str, may_exist: bool
) -> None:
    cloud.trouble = lambda zone, command, now: answer
    config, machine = load_text(tmp_path, SLICE.replace("v4-16", "v4-8" + section)), cloud.machine()
    with pytest.raises(LaunchError) as refusal:
        candidates.create(config, print, machine, machine)
    assert str(refusal.value).count("slice demo may exist, and is billed then") == may_exist
    assert len(cloud.calls) == 1 or section


def test_a_stop_while_a_slice_is_awaited_tells_its_bill_too(config: Config) -> None:
    stopped = creation.add_bill(config, RunStopped("demo-1"))
    assert (type(stopped), stopped.exit_code) == (RunStopped, Exit.STOPPED)
    assert "run demo-1 was stopped" in str(stopped)
    assert "slice demo may exist, and is billed then" in str(stopped)


def test_nothing_is_created_above_a_cost_limit(cloud: Cloud, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"price_limit"):
        up(cloud, load_text(tmp_path, SLICE.replace("v4-16", "v4-16, price_limit: 1.0")))
    assert not cloud.state.nodes


def test_a_stopped_one_without_capacity_is_not_made_twice_in_another_zone(cloud: Cloud, zones: Config) -> None:
    cloud.made_by(OURS, "STOPPED", "us-central1-a")
    node = cloud.node(zone="us-central1-a")
    cloud.trouble = lambda zone, command, now: NO_CAPACITY if command == "tpu-vm start" else None
    with pytest.raises(Stockout, match="can't be started"):
        up(cloud, zones)
    assert list(cloud.state.nodes.values()) == [node]


def test_two_ups_at_once_make_one_slice_and_both_succeed(cloud: Cloud, config: Config) -> None:
    cloud.trouble = lambda zone, command, now: cloud.made_by(OURS, "CREATING") if _first(cloud, command) else None
    assert up(cloud, config).ready
    assert cloud.calls.count(f"{ZONE} tpu-vm create") == 1


@pytest.mark.parametrize(("minutes", "told"), [(10, "no end after 10 minutes of: gcloud"), (60, "not READY after 60")])
def test_a_creation_has_as_long_as_the_file_says(cloud: Cloud, config: Config, minutes: float, told: str) -> None:
    cloud.state.create_seconds = 1e6
    begin = cloud.clock.now
    with pytest.raises(CommandTimeout, match=f"(?s){told}.*`tpu-launch down` deletes it"):
        up(cloud, longer(config, minutes))
    assert minutes * 60 <= cloud.clock.now - begin <= minutes * 60 + 30
    assert cloud.calls.count(f"{ZONE} tpu-vm create") == 1, "although gcloud gives up after half an hour"


def test_a_creation_that_is_hidden_twice_for_a_moment_is_not_requested_again(cloud: Cloud, config: Config) -> None:
    cloud.state.create_seconds = 120
    cloud.lost = lambda zone, command, now: UNAVAILABLE if command == "tpu-vm create" else None
    begin, missing = cloud.clock.now, "ERROR: (gcloud.x) NOT_FOUND: Resource 'demo' was not found"
    cloud.trouble = lambda zone, command, now: missing if int(now - begin) in (*range(20, 25), *range(60, 65)) else None
    assert up(cloud, config).ready
    assert cloud.calls.count(f"{ZONE} tpu-vm create") == 1


def test_a_create_request_that_never_arrived_is_repeated_a_few_times_only(cloud: Cloud, config: Config) -> None:
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if _first(cloud, command) else None
    assert up(cloud, config).ready
    down(cloud, config)
    cloud.calls.clear()
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if command == "tpu-vm create" else None
    with pytest.raises(Unavailable):
        up(cloud, config)
    assert cloud.calls.count(f"{ZONE} tpu-vm create") == 3


def test_the_look_for_another_owner_names_the_bill_too(config: Config) -> None:
    theirs = Mock(labels={"tpu-launch": "1", "tpu-launch-user": "ann"})
    describe = Mock(side_effect=[Unavailable("the API is away"), theirs])
    for error, words in ((Unavailable, "may exist, and is billed then"), (NotOurs, "is not yours")):
        with pytest.raises(error, match=words):
            candidates.check_owner(config, describe, Owner("me", ""))


@pytest.mark.parametrize("seconds", [5, 30, 70])
def test_a_slice_that_another_command_deletes_stays_deleted(cloud: Cloud, config: Config, seconds: float) -> None:
    cloud.state.create_seconds = 120
    cloud.at(seconds, cloud.delete)
    with pytest.raises(Conflict, match="delete"):
        up(cloud, config)
    cloud.clock.sleep(600)
    assert cloud.node() is None
    assert cloud.calls.count(f"{ZONE} tpu-vm create") == 1


@pytest.mark.parametrize("command", ["tpu-vm create", "tpu-vm describe"])
def test_ctrl_c_says_what_it_leaves(cloud: Cloud, config: Config, command: str) -> None:
    said: list[str] = []

    def interrupt(zone: str, running: str, now: float) -> None:
        if running == command and len(cloud.calls) > 1:
            raise KeyboardInterrupt

    if command == "tpu-vm describe":
        cloud.made_by(OURS, "CREATING")
    cloud.trouble = interrupt
    with pytest.raises(KeyboardInterrupt):
        creation.create(config, said.append, cloud.machine())
    assert "`tpu-launch down` deletes it" in said[-1]


def test_our_slice_is_found_behind_one_of_another_owner_in_the_first_zone(cloud: Cloud, zones: Config) -> None:
    cloud.made_by(BOBS, zone="us-west1-c")
    found = slices.describe(zones, cloud.machine())
    assert found is not None, "a run may use a slice of any owner"
    cloud.calls.clear()
    assert slices.describe(replace(zones, any_owner=True), cloud.machine()) == found
    assert len(cloud.calls) == 1, "with --any-owner, it is the one"
    cloud.node(zone="us-west1-c").resource["labels"][slices.SLICE] = "de"
    with pytest.raises(NotOurs, match=r"it is slice de of another file.*\n.*give its file to"):
        candidates.check_owner(zones, lambda: slices.describe(zones, cloud.machine()), ANN)
    cloud.made_by(OURS, "CREATING", zone="us-central1-a")
    cloud.made_by(OURS, zone="us-west4-a")
    found = slices.describe(zones, cloud.machine())
    assert (found.labels["tpu-launch-owner"], found.state) == (OURS["tpu-launch-owner"], "READY")


def test_down_looks_again_for_a_slice_that_a_killed_command_has_just_requested(cloud: Cloud, config: Config) -> None:
    slice_hints.save_create_time(config, cloud.clock.time())
    cloud.at(3.0, lambda: cloud.made_by(OURS))
    assert down(cloud, config)
    assert cloud.node() is None
    begin = cloud.clock.time()
    assert not down(cloud, config)
    assert cloud.clock.time() - begin < 5


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing is there", "the slice of a later `up` is there"])
def test_down_waits_for_a_gcloud_that_outlives_its_killed_command(cloud: Cloud, config: Config, earlier: bool) -> None:
    """On a slow network, that gcloud may send its create request only after `down` has looked."""
    clock, mark = cloud.machine().clock, contextlib.ExitStack()
    slice_hints.save_create_time(config, clock.time())
    mark.enter_context(slice_hints.mark_create_in_flight(config))
    if earlier:
        cloud.made_by(OURS)
    cloud.at(100.0, mark.close)
    cloud.at(110.0, lambda: cloud.made_by(OURS))  # Google shows it a little later
    assert down(cloud, config)
    clock.sleep(200.0)
    assert cloud.node() is None


@pytest.mark.parametrize(("age", "longest"), [(60.0, 5), (-3600.0, 40)])  # the clock was set back
def test_down_waits_only_a_moment_for_an_older_create(cloud: Cloud, config: Config, age: float, longest: float) -> None:
    slice_hints.save_create_time(config, cloud.clock.time() - age)
    begin = cloud.clock.monotonic()
    assert not down(cloud, config)
    assert cloud.clock.monotonic() - begin < longest


def test_down_ends_with_a_time_out_when_a_gcloud_that_asks_does_not_end(cloud: Cloud, config: Config) -> None:
    late = pytest.raises(CommandTimeout, match="still in flight after 5 minutes")
    with slice_hints.mark_create_in_flight(config), late:
        down(cloud, config)


def test_a_zone_that_does_not_answer_keeps_no_other_slice_alive(cloud: Cloud, zones: Config) -> None:
    for zone in ("us-central1-a", "us-west4-a"):
        cloud.made_by(OURS, zone=zone)
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if zone == "us-west1-c" else None
    with pytest.raises(LaunchError) as failure:
        down(cloud, zones)
    assert failure.value.exit_code is Exit.CLOUD_ERROR
    assert "us-west1-c" in str(failure.value)
    assert not cloud.state.nodes


def test_down_of_another_owners_slice_alone_is_refused_whatever_the_zones(cloud: Cloud, zones: Config) -> None:
    cloud.made_by(BOBS, zone="us-west1-c")
    with pytest.raises(NotOurs, match=r"no slice demo of yours was found:\nus-west1-c: .*bob created it"):
        down(cloud, zones)
    assert cloud.state.nodes


def test_slices_need_no_hints(cloud: Cloud, zones: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").write_text("")
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "full" / "home"))  # below a file: nothing can be written
    cloud.trouble = lambda zone, command, now: (
        NO_CAPACITY if (zone, command) == ("us-west1-c", "tpu-vm create") else None
    )
    assert up(cloud, zones).ready
    assert slices.describe(zones, cloud.machine()) is not None
    assert down(cloud, zones)
    assert not cloud.state.nodes
