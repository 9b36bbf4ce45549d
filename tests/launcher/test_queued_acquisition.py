"""Claims about waiting for a slice in the queue. The clock is simulated, and so is the API: gcloud's calls change its
state as the test says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config import Config, load
from launcher.emulator import faults
from launcher.emulator.state import Fault
from launcher.errors import LaunchError
from launcher.gcloud.errors import Conflict, PermissionDenied, QuotaExceeded, ResourceNotFound, Stockout
from launcher.provider import SliceState
from launcher.providers import this_machine
from launcher.shell import Result
from launcher.tpu_vm import ownership, queued, slices
from launcher.tpu_vm.ownership import NotOurs
from tests.launcher.emulated_gcloud import BOB, DENIED, OFFLINE, UNAVAILABLE, Clock, Cloud
from training.machine.clock import format_time

HOUR = 3600.0


class Queue:
    """The API: one request, whose state is a function of its age in seconds."""

    def __init__(self, clock: Clock, state: Callable[[int, float], str], error: str = "") -> None:
        self.clock, self.state, self.error = clock, state, error
        self.created: float | None = None
        self.calls: list[str] = []

    def request(self, config: Config) -> None:
        """As if it had been made before."""
        self.created = self.clock.now
        self.calls.append("create")

    def run(self, argv: Sequence[str], **_options: object) -> Result:
        try:
            return Result(tuple(argv), 0, self.call(argv), "")
        except ResourceNotFound as error:
            return Result(tuple(argv), 1, "", f"ERROR: NOT_FOUND: {error}")

    def call(self, argv: Sequence[str]) -> str:
        verb = argv[4]
        if verb == "describe":
            if self.created is None:
                raise ResourceNotFound("no such request")
            state = self.state(self.calls.count("create"), self.clock.now - self.created)
            document = {
                "name": "projects/p/locations/z/queuedResources/s",
                "state": {"state": state, "stateInitiator": "SERVICE"},
                "createTime": format_time(self.created),
                "tpu": {
                    "nodeSpec": [
                        {"node": {"labels": {"tpu-launch": "1", "tpu-launch-owner": this_machine().owner.user}}}
                    ]
                },
            }
            if self.error:
                document["state"]["failedData"] = {"error": {"message": self.error}}  # type: ignore[index]
            return json.dumps(document)
        self.calls.append(verb)
        self.created = self.clock.now if verb == "create" else None
        return ""

    def node(self) -> SliceState | None:
        if self.created is None or self.state(self.calls.count("create"), self.clock.now - self.created) != "ACTIVE":
            return None
        return SliceState("s", "READY", "HEALTHY", "v5litepod-8", ("10.0.0.1",))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    section = "{name: s, accelerator_type: v5litepod-8, queued: {valid_until_hours: 6}}"
    (tmp_path / "run.yaml").write_text(f"project: p\nzone: us-west1-c\nslice: {section}\n")
    return load(tmp_path / "run.yaml")


def obtain(config: Config, queue: Queue, seed: int = 0) -> list[str]:
    said: list[str] = []
    machine = replace(this_machine(), clock=queue.clock, run=queue.run, random=random.Random(seed))
    queued.obtain(config, {}, queue.node, said.append, machine)
    return said


def test_a_request_is_made_once_and_waited_for(config: Config) -> None:
    queue = Queue(Clock(), lambda attempt, age: "ACTIVE" if age > HOUR else "WAITING_FOR_RESOURCES")
    said = obtain(config, queue)
    assert queue.calls == ["create"]
    reports = [line for line in said if "is WAITING_FOR_RESOURCES" in line]
    assert 55 <= len(reports) <= 65, "once a minute"


def test_one_that_is_there_is_waited_for_and_its_age_counts(config: Config) -> None:
    queue = Queue(Clock(), lambda attempt, age: "WAITING_FOR_RESOURCES")
    queue.request(config)
    queue.clock.now += 5 * HOUR
    begin = queue.clock.now
    with pytest.raises(Stockout, match="within 6 h"):
        obtain(config, queue)
    assert HOUR <= queue.clock.now - begin <= HOUR + 120
    assert queue.calls == ["create", "delete"]


def test_one_that_is_being_provided_at_the_end_gets_the_time_of_a_creation(config: Config) -> None:
    late = 6 * HOUR + 300
    queue = Queue(Clock(), lambda attempt, age: "ACTIVE" if age > late else "PROVISIONING")
    obtain(config, queue)
    assert queue.calls == ["create"]


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_request_is_made_again_with_growing_pauses(config: Config, seed: int) -> None:
    queue = Queue(Clock(), lambda attempt, age: "ACTIVE" if attempt == 6 else "SUSPENDED" if age > 60 else "ACCEPTED")
    said = obtain(config, queue, seed)
    assert queue.calls == [*(["create", "delete"] * 5), "create"]
    assert sum("was SUSPENDED (by SERVICE): deleted it" in line for line in said) == 5
    pauses = [seconds for seconds in queue.clock.slept if seconds > 2.0]
    assert all(
        low <= pause <= high for pause, low, high in zip(pauses, (5, 10, 20, 40), (15, 30, 60, 120), strict=True)
    )


def test_a_failure_that_waiting_does_not_mend_ends_it_at_once(config: Config) -> None:
    queue = Queue(Clock(), lambda attempt, age: "FAILED", error="Quota limit 'TPUs' has been exceeded")
    with pytest.raises(QuotaExceeded):
        obtain(config, queue)
    assert queue.calls == ["create", "delete"], "a failed request would keep its quota"


# -- a cloud that does not always answer ------------------------------------------------------------------------------


@pytest.fixture
def cloud() -> Cloud:
    cloud = Cloud()
    cloud.state.faults.append(Fault("stockout", "tpu"))
    return cloud


def create(config: Config, cloud: Cloud) -> tuple[SliceState, list[str]]:
    said: list[str] = []
    return slices.create(config, said.append, cloud.machine()), said


def request_state(cloud: Cloud) -> str:
    return "".join(queued.state for queued in cloud.state.queued.values())


@pytest.mark.parametrize("answer", [UNAVAILABLE, OFFLINE, DENIED])
def test_waiting_survives_minutes_of_failures_and_says_so(config: Config, cloud: Cloud, answer: str) -> None:
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: answer if 2 * HOUR < now - begin < 2 * HOUR + 400 else None
    cloud.at(3 * HOUR, cloud.state.faults.clear)
    node, said = create(config, cloud)
    assert node.ready
    assert sum("still waiting, although" in line for line in said) == 1
    assert not [line for line in said if "sign in" in line]
    assert cloud.calls.count("us-west1-c queued-resources create") == 1


def test_a_night_without_a_network_is_waited_out(config: Config, cloud: Cloud) -> None:
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: OFFLINE if HOUR < now - begin < 5 * HOUR else None
    cloud.at(2 * HOUR, cloud.state.faults.clear)
    assert create(config, cloud)[0].ready


def test_a_permission_that_stays_away_ends_it_and_the_request_that_is_left_is_named(
    config: Config, cloud: Cloud
) -> None:
    begin = cloud.clock.now
    cloud.trouble = lambda zone, command, now: DENIED if now - begin > HOUR else None
    with pytest.raises(PermissionDenied, match="is billed when it is granted") as refusal:
        create(config, cloud)
    assert "`tpu-launch down` deletes it" in str(refusal.value)
    assert 600 <= cloud.clock.now - begin - HOUR <= 800


def test_a_request_whose_answer_is_lost_is_found_and_made_once(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    cloud.lost = lambda zone, command, now: UNAVAILABLE if command == "queued-resources create" else None
    assert create(config, cloud)[0].ready
    assert cloud.calls.count("us-west1-c queued-resources create") == 1


def test_a_request_is_looked_for_after_the_last_answer_that_is_lost_too(config: Config, cloud: Cloud) -> None:
    """Otherwise `up` ends without naming a request that Google received, when only the answer was lost."""
    cloud.state.faults.clear()

    def asked(command: str) -> bool:
        return command == "queued-resources create"

    def times() -> int:
        return cloud.calls.count("us-west1-c queued-resources create")

    cloud.trouble = lambda zone, command, now: UNAVAILABLE if asked(command) and times() < 3 else None
    cloud.lost = lambda zone, command, now: UNAVAILABLE if asked(command) else None
    assert create(config, cloud)[0].ready
    assert times() == 3


def test_a_request_that_never_arrives_is_made_a_few_times_only(config: Config, cloud: Cloud) -> None:
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if command == "queued-resources create" else None
    with pytest.raises(LaunchError, match="temporary failure"):
        create(config, cloud)
    assert cloud.calls.count("us-west1-c queued-resources create") == 3


def test_a_request_that_another_command_deletes_meanwhile_stays_deleted(config: Config, cloud: Cloud) -> None:
    cloud.at(60, lambda: cloud.machine().run(queued.delete_command(config), timeout=60))
    with pytest.raises(Conflict, match="was deleted by another command"):
        create(config, cloud)
    assert request_state(cloud) == ""


def test_a_request_that_is_being_deleted_already_is_waited_out_and_made_again(config: Config) -> None:
    queue = Queue(Clock(), lambda attempt, age: "DELETING" if attempt == 1 else "ACTIVE")
    queue.request(config)
    sleep = queue.clock.sleep

    def gone_after_five_minutes(seconds: float) -> None:
        sleep(seconds)
        if queue.calls == ["create"] and queue.clock.now > 1_800_000_300.0:
            queue.created = None

    queue.clock.sleep = gone_after_five_minutes  # type: ignore[method-assign]
    said = obtain(config, queue)
    assert queue.calls == ["create", "create"]
    assert "is DELETING: waiting until it is gone" in said[0]


def test_one_answer_that_the_node_is_not_there_does_not_delete_a_granted_slice(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    missing = iter(["ERROR: (gcloud.x) NOT_FOUND: Resource 'n' was not found"])

    def once(zone: str, command: str, now: float) -> str | None:
        return next(missing, None) if command == "tpu-vm describe" and request_state(cloud) == "ACTIVE" else None

    cloud.trouble = once
    assert create(config, cloud)[0].ready
    assert not [call for call in cloud.calls if "delete" in call]


def test_a_request_of_another_owner_is_neither_waited_for_nor_deleted(config: Config, cloud: Cloud) -> None:
    bobs = cloud.machine(BOB)
    made = bobs.run(queued.create_command(config, ownership.make_labels(config, BOB, 0.0), HOUR), timeout=60)
    assert made.ok, made.stderr
    for act in (slices.create, slices.delete):
        with pytest.raises(NotOurs, match="bob created it"):
            act(config, lambda text: None, cloud.machine())
    assert request_state(cloud) == "WAITING_FOR_RESOURCES"
    assert slices.delete(config, lambda text: None, bobs)
    assert request_state(cloud) == ""


def test_a_request_that_was_made_after_down_had_looked_for_one_goes_with_its_node(config: Config, cloud: Cloud) -> None:
    """Another `up` made it between the two looks: only its node was deleted, and the request kept its quota."""
    cloud.state.faults.clear()
    create(config, cloud)
    missing = iter(["ERROR: (gcloud.x) NOT_FOUND: Resource 'r' was not found"])

    def not_yet(zone: str, command: str, now: float) -> str | None:
        return next(missing, None) if command == "queued-resources describe" else None

    cloud.trouble = not_yet
    assert slices.delete(config, lambda line: None, cloud.machine())
    assert request_state(cloud) == ""


def test_a_node_that_google_deletes_after_a_preemption_counts_as_preempted(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    create(config, cloud)
    (node,) = cloud.state.nodes.values()
    faults.begin_preemption(node, cloud.clock.now, cloud.clock.now)
    while node.state != "DELETING":
        cloud.node()
    assert slices.describe(config, cloud.machine()).state == "PREEMPTED"


def test_a_node_that_a_user_deletes_does_not(config: Config, cloud: Cloud) -> None:
    cloud.state.faults.clear()
    create(config, cloud)
    cloud.delete(config.zone, config.slice.name)
    assert slices.describe(config, cloud.machine()).state == "DELETING"
