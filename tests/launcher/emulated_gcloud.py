"""gcloud over the emulator's API, in this process: commands change a state in memory, on a clock that passes only by
waiting. What goes wrong is said by the test: `trouble` fails commands, `at` lets somebody else act."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from launcher.emulator.api import catalogue, queued_resources
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import Node, State
from launcher.errors import CommandTimeout
from launcher.owner import Owner
from launcher.providers import this_machine
from launcher.shell import Result
from launcher.workstation import Workstation
from training.machine.threads import Future, SystemThreads

WAITER_SECONDS = 1800.0  # googlecloudsdk/api_lib/util/waiter.py
ANN, BOB = Owner("ann", "a" * 12), Owner("bob", "b" * 12)

UNAVAILABLE = "ERROR: (gcloud.x) UNAVAILABLE: The service is currently unavailable."
OFFLINE = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token\n\n  $ gcloud auth login"
)
DENIED = "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource"
BUSY = "ERROR: (gcloud.x) ABORTED: unable to queue the operation"

R = TypeVar("R")
Trouble = Callable[[str, str, float], str | None]


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((event for event in self.events if event[0] <= end), key=lambda event: event[0]):
            self.events.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = max(self.now, end)


class InOrder(SystemThreads):
    """Tasks that run to their end as soon as they are made, one after the other."""

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        future = super().submit(function, *args)
        future.exception()
        return future


class Cloud:
    """One project, as the workstations of several people see it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.state = State(
            "0badcafe", 1, "/nowhere", "/nowhere", create_seconds=60.0, update_seconds=20.0, subnet="10.200.0.0/22"
        )
        self.calls: list[str] = []  # "us-central2-b tpu-vm delete"
        self.trouble: Trouble = lambda zone, command, now: None  # is given "tpu-vm delete"
        self.lost: Trouble = lambda zone, command, now: None  # the command is carried out, and this is the answer

    def machine(self, owner: Owner = ANN) -> Workstation:
        """The workstation of one of them."""
        return replace(
            this_machine(), clock=self.clock, threads=InOrder(), run=self.run, random=random.Random(1), owner=owner
        )

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        """Something that happens so many seconds from now."""
        self.clock.events.append((self.clock.now + seconds, act))

    def node(self, name: str = "demo", zone: str = "us-central2-b") -> Node | None:
        """A node, as it is now."""
        self._settle()
        return self.state.nodes.get(f"projects/p/locations/{zone}/nodes/{name}")

    def made_by(
        self, labels: dict[str, str], state: str = "READY", zone: str = "us-central2-b", name: str = "demo"
    ) -> None:
        """A node that exists already."""
        accelerator = "v4-16" if zone == "us-central2-b" else "v5litepod-8"
        body = {"acceleratorType": accelerator, "runtimeVersion": "tpu-ubuntu2204-base", "labels": dict(labels)}
        call = tpu_api.Call("POST", ("projects", "p", "locations", zone, "nodes"), "", {"nodeId": name}, body)
        operation = self.state.operations[tpu_api.answer(self.state, call, self.clock.now)["name"]]
        operation.done = state != "CREATING"
        self.state.nodes[operation.target].resource["state"] = state
        if state == "DELETING":
            tpu_api.start_operation(self.state, "delete", operation.target, self.clock.now, self.state.update_seconds)

    def delete(self, zone: str = "us-central2-b") -> None:
        """Somebody asks for the deletion of the node, and does not wait."""
        self._settle()
        tpu_api.answer(
            self.state, tpu_api.Call("DELETE", ("projects", "p", "locations", zone, "nodes", "demo")), self.clock.now
        )

    # -- gcloud

    def run(self, argv: Sequence[str], *, timeout: float, **_options: object) -> Result:
        """`launcher.shell.run`."""
        options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
        names = [word for word in argv[5:] if not word.startswith("--")]
        command, zone = f"{argv[3]} {argv[4]}", options["zone"]
        self.calls.append(f"{zone} {command}")
        self.clock.sleep(1.0)
        self._settle()
        if text := self.trouble(zone, command, self.clock.now):
            return Result(tuple(argv), 1, "", text)
        lost = self.lost(zone, command, self.clock.now)
        try:
            answer = self._call(argv[3], argv[4], names[0] if names else "", options)
            if lost:
                return Result(tuple(argv), 1, "", lost)
            if str(answer.get("name", "")).rpartition("/operations/")[1]:
                answer = self._wait(answer["name"], timeout, argv)
            shown = answer.get("nodes", answer.get("queuedResources", [])) if argv[4] == "list" else answer
            return Result(tuple(argv), 0, json.dumps(shown), "")
        except ApiError as error:
            return Result(
                tuple(argv), 1, "", f"ERROR: (gcloud.{argv[4]}) {catalogue.CODES[error.code][1]}: {error.message}"
            )

    def _call(self, kind: str, verb: str, name: str, options: dict[str, str]) -> dict[str, Any]:
        collection = "nodes" if kind == "tpu-vm" else "queuedResources"
        parent = ("projects", "p", "locations", options["zone"], collection)
        answer = tpu_api.answer if kind == "tpu-vm" else queued_resources.answer
        match verb:
            case "describe" | "list":
                call = tpu_api.Call("GET", (*parent, name) if name else parent)
            case "delete":
                call = tpu_api.Call("DELETE", (*parent, name), "", {"force": "true"})
            case "start":
                call = tpu_api.Call("POST", (*parent, name), "start")
            case "create":
                node = {
                    "acceleratorType": options["accelerator-type"],
                    "runtimeVersion": options.get("version") or options["runtime-version"],
                    "labels": dict(label.split("=") for label in options["labels"].split(",")),
                }
                if kind == "tpu-vm":
                    call = tpu_api.Call("POST", parent, "", {"nodeId": name}, node)
                else:
                    spec = {"parent": "/".join(parent[:4]), "nodeId": name, "node": node}
                    policy = {"validUntilDuration": options["valid-until-duration"]}
                    body = {"tpu": {"nodeSpec": [spec]}, "queueingPolicy": policy}
                    call = tpu_api.Call("POST", parent, "", {"queuedResourceId": name}, body)
        return answer(self.state, call, self.clock.now)

    def _wait(self, name: str, timeout: float, argv: Sequence[str]) -> dict[str, Any]:
        """As gcloud waits for an operation."""
        begin = self.clock.now
        while name in self.state.operations and not self.state.operations[name].done:
            if self.clock.now - begin > timeout:
                raise CommandTimeout(f"no answer within {timeout:.0f} s from: {' '.join(argv[:6])}")
            if self.clock.now - begin > WAITER_SECONDS:
                raise ApiError(catalogue.UNAVAILABLE, f"Operation {name} has not finished in 1800 seconds.")
            self.clock.sleep(5.0)
            self._settle()
        error = self.state.operations[name].error
        if error is not None:
            raise ApiError(error["code"], json.dumps(error))
        return {}

    def _settle(self) -> None:
        """What the emulator's threads do: operations end, queued resources go on."""
        for operation in list(self.state.operations.values()):
            node = self.state.nodes.get(operation.target)
            if operation.done or "/nodes/" not in operation.target:
                continue
            if operation.cancelled:
                operation.done, operation.error = True, {"code": 1, "message": "The creation of it was cancelled."}
            elif operation.ends_at <= self.clock.now:
                operation.done, operation.error = True, operation.failure
                if node is not None and (operation.verb == "delete" or operation.failure):
                    del self.state.nodes[operation.target]
                elif node is not None:
                    node.resource["state"] = "READY"
        queued_resources.advance(self.state, self.clock.now)
