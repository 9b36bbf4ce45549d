"""Claims about waiting for a slice in the queue. The clock is simulated, and so is the API: gcloud's calls change its
state as the test says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.clock import format_time
from launcher.config import Config, load
from launcher.errors import LaunchError
from launcher.gcloud.errors import NotFound, QuotaExceeded, Stockout
from launcher.provider import SliceState
from launcher.providers import this_machine
from launcher.shell import Result
from launcher.tpu_vm import queued

HOUR = 3600.0


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


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
        except NotFound as error:
            return Result(tuple(argv), 1, "", f"ERROR: NOT_FOUND: {error}")

    def call(self, argv: Sequence[str]) -> str:
        verb = argv[4]
        if verb == "describe":
            if self.created is None:
                raise NotFound("no such request")
            state = self.state(self.calls.count("create"), self.clock.now - self.created)
            document = {
                "name": "projects/p/locations/z/queuedResources/s",
                "state": {"state": state, "stateInitiator": "SERVICE"},
                "createTime": format_time(self.created),
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
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "home"))
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


def test_one_that_somebody_deletes_is_not_made_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(Clock(), lambda attempt, age: "WAITING_FOR_RESOURCES")
    sleep = queue.clock.sleep

    def delete_after_ten_minutes(seconds: float) -> None:
        sleep(seconds)
        if queue.clock.now > 1_800_000_600.0:
            queue.created = None

    monkeypatch.setattr(queue.clock, "sleep", delete_after_ten_minutes)
    with pytest.raises(LaunchError, match="was deleted while it was waited for"):
        obtain(config, queue)
    assert queue.calls == ["create"]
