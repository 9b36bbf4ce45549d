"""gcloud over the emulator's API, in this process; waiting moves its clock. `trouble` injects errors, `at` acts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api import queued_resources
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import EmulatorState, Node
from launcher.errors import CommandTimeout
from launcher.providers import this_machine
from launcher.shell import Result
from launcher.workstation import Owner, Workstation
from tests import gcloud_commands
from tests.gcloud_commands import Command
from training.machine import Future, Threads

ANN, BOB = Owner("ann", "a" * 12), Owner("bob", "b" * 12)
OURS = {"tpu-launch": "1", "tpu-launch-owner": "ann", "tpu-launch-account": ANN.account}  # ANN's
BOBS = {"tpu-launch": "1", "tpu-launch-owner": "bob"}

UNAVAILABLE = "ERROR: (gcloud.x) UNAVAILABLE: The service is currently unavailable."
OFFLINE = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token\n\n  $ gcloud auth login"
)
DENIED = "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource"
NO_CAPACITY = 'ERROR: (gcloud.x) {"code": 8, "message": "There is no more capacity in the zone"}'
BUSY = "ERROR: (gcloud.x) ABORTED: unable to queue the operation"

R = TypeVar("R")
Trouble = Callable[[str, str, float], str | None]


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.slept: list[float] = []
        self.events: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        end = self.now + seconds
        while due := sorted((event for event in self.events if event[0] <= end), key=lambda event: event[0]):
            self.events.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = max(self.now, end)


class InOrder(Threads):
    """Runs each task to its end as soon as it is made."""

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        future = super().submit(function, *args)
        future.exception()
        return future


class Cloud:
    """One project, as the workstations of several users see it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.state = EmulatorState(
            "0badcafe", 1, "/nowhere", "/nowhere", create_seconds=60.0, update_seconds=20.0, subnet="10.200.0.0/22"
        )
        self.calls: list[str] = []  # "us-central2-b tpu-vm delete"
        self.trouble: Trouble = lambda zone, command, now: None  # is given "tpu-vm delete"
        self.lost: Trouble = lambda zone, command, now: None  # the command is carried out, and this is the answer

    def machine(self, owner: Owner = ANN) -> Workstation:
        plain, rng = this_machine(), random.Random(1)
        return replace(plain, clock=self.clock, threads=InOrder(), run=self.run, random=rng, find_owner=lambda: owner)

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        self.clock.events.append((self.clock.now + seconds, act))

    def node(self, name: str = "demo", zone: str = "us-central2-b") -> Node | None:
        """Returns a node as it is now."""
        self._advance()
        return self.state.nodes.get(f"projects/p/locations/{zone}/nodes/{name}")

    def made_by(
        self, labels: dict[str, str], state: str = "READY", zone: str = "us-central2-b", name: str = "demo"
    ) -> None:
        """Makes a node that exists already."""
        accelerator = "v4-16" if zone == "us-central2-b" else "v5litepod-8"
        body = {"acceleratorType": accelerator, "runtimeVersion": "tpu-ubuntu2204-base", "labels": dict(labels)}
        operation = tpu_api.create(self.state, f"projects/p/locations/{zone}", name, body, self.clock.now)
        operation.done = state != "CREATING"
        self.state.nodes[operation.target].resource["state"] = state
        if state == "DELETING":
            tpu_api.start_operation(self.state, "delete", operation.target, self.clock.now, self.state.update_seconds)

    def delete(self, zone: str = "us-central2-b", name: str = "demo") -> None:
        """Asks for the deletion of the node, as another user who does not wait."""
        self._advance()
        Command("tpu-vm", "delete", name, {"project": "p", "zone": zone}).call(self.state, self.clock.now)

    def run(self, argv: Sequence[str], *, timeout: float, **_options: object) -> Result:
        """Stands in for `launcher.shell.run`."""
        command = gcloud_commands.parse(argv)
        shown = f"{command.group} {command.verb}"
        self.calls.append(f"{command.zone} {shown}")
        self.clock.sleep(1.0)
        self._advance()
        if text := self.trouble(command.zone, shown, self.clock.now):
            return Result(tuple(argv), 1, "", text)
        lost = self.lost(command.zone, shown, self.clock.now)
        try:
            answer = command.call(self.state, self.clock.now)
        except ApiError as error:
            return Result(tuple(argv), 1, "", command.api_error(error))
        failure = lost or (self._wait(command, answer["name"], timeout) if command.changes else "")
        return Result(tuple(argv), int(bool(failure)), "" if failure else command.output(answer), failure or "")

    def _wait(self, command: Command, name: str, timeout: float) -> str:
        """Waits for an operation as gcloud does. Returns gcloud's error."""
        begin, operation = self.clock.now, self.state.operations[name]
        while not operation.done and self.clock.now - begin <= gcloud_commands.WAIT_SECONDS:
            if self.clock.now - begin > timeout:
                raise CommandTimeout(f"no answer within {timeout:.0f} s from: gcloud {command.group} {command.verb}")
            self.clock.sleep(5.0)
            self._advance()
        return command.operation_error(operation)

    def _advance(self) -> None:
        """Ends the operations that are due, and moves queued resources on."""
        now = self.clock.now
        for operation in list(self.state.operations.values()):
            due = operation.cancelled or operation.ends_at <= now
            if due and not operation.done and "/nodes/" in operation.target:
                tpu_api.finish_operation(self.state, operation, now)
        queued_resources.advance(self.state, now)
