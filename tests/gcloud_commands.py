"""gcloud's command lines, words and exit codes over the emulator's API: what a `compute tpus` command calls and prints.

How gcloud waits is left to the users of this module: each has a clock of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.emulator.api import calls, catalogue
from launcher.emulator.api.calls import Call
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import EmulatorState, Operation

WAIT_SECONDS = 1800.0  # for which gcloud waits for an operation: googlecloudsdk/api_lib/util/waiter.py
_COLLECTIONS = {"tpu-vm": "nodes", "queued-resources": "queuedResources"}


class UnknownCommand(Exception):
    """Raised for a command line of the launcher that this module does not know yet."""


@dataclass(frozen=True)
class Command:
    """A command `gcloud compute tpus GROUP VERB [NAME] [--FLAG[=VALUE]...]`."""

    group: str
    verb: str
    name: str
    flags: dict[str, str]

    @property
    def changes(self) -> bool:
        return self.verb in ("create", "delete", "start", "stop")

    @property
    def zone(self) -> str:
        return self.flags["zone"]

    @property
    def parent(self) -> str:
        return f"projects/{self.flags['project']}/locations/{self.zone}"

    @property
    def full_name(self) -> str:
        """Returns the resource's name in the API."""
        return f"{self.parent}/{_COLLECTIONS[self.group]}/{self.name}"

    def error(self, text: str) -> str:
        """Returns what gcloud prints when the command fails."""
        return f"ERROR: (gcloud.compute.tpus.{self.group}.{self.verb}) {text}"

    def api_error(self, error: ApiError) -> str:
        """Returns what gcloud prints when the API refuses the call."""
        return self.error(f"{catalogue.CODES[error.code][1]}: {error.message}")

    def operation_error(self, operation: Operation) -> str:
        """Returns what gcloud prints after a failed or unfinished (WAIT_SECONDS) operation; "" after a success."""
        if not operation.done:
            name = operation.name.rpartition("/")[2]
            return self.error(f"Operation {name} has not finished in {WAIT_SECONDS:.0f} seconds.")
        return self.error(json.dumps(operation.error)) if operation.error else ""

    def call(self, state: EmulatorState, now: float) -> dict[str, Any]:
        """Makes the command's call, and returns the API's answer: for a change, an operation. Raises ApiError."""
        return calls.answer(state, self._api_call(), now)

    def output(self, answer: dict[str, Any]) -> str:
        """Returns what the command prints of an answer with --format=json."""
        return json.dumps(answer.get(_COLLECTIONS[self.group], []) if self.verb == "list" else answer)

    def _api_call(self) -> Call:
        collection = (*self.parent.split("/"), _COLLECTIONS[self.group])
        resource = (*collection, self.name)
        match self.verb:
            case "list":
                return Call("GET", collection)
            case "describe":
                return Call("GET", resource)
            case "delete":
                return Call("DELETE", resource, "", {"force": "true"} if "force" in self.flags else {})
            case "start" | "stop":
                return Call("POST", resource, self.verb)
            case "create" if self.group == "tpu-vm":
                return Call("POST", collection, "", {"nodeId": self.name}, self._node())
            case "create":
                return Call("POST", collection, "", {"queuedResourceId": self.name}, self._queued_resource())
        raise UnknownCommand(f"{self.group} {self.verb}")

    def _node(self) -> dict[str, Any]:
        node: dict[str, Any] = {
            "acceleratorType": self.flags["accelerator-type"],
            "runtimeVersion": self.flags.get("version") or self.flags["runtime-version"],
            "labels": dict(label.split("=", 1) for label in self.flags.get("labels", "").split(",") if label),
        }
        if self.group == "tpu-vm":
            node["schedulingConfig"] = {key: True for key in ("spot", "preemptible") if key in self.flags}
        return node

    def _queued_resource(self) -> dict[str, Any]:
        spec = {"parent": self.parent, "nodeId": self.flags.get("node-id", self.name), "node": self._node()}
        policy = {"validUntilDuration": self.flags["valid-until-duration"]}
        capacity = {"spot": {}} if "spot" in self.flags else {}
        if model := self.flags.get("provisioning-model"):
            capacity |= {"provisioningModel": model.replace("-", "_").upper()}
            capacity |= {"runDuration": {"maxRunDuration": self.flags["max-run-duration"]}}
        return {"tpu": {"nodeSpec": [spec]}, "queueingPolicy": policy, **capacity}


def parse(argv: Sequence[str]) -> Command:
    """Parses a command line. Raises UnknownCommand."""
    words = [word for word in argv[1:] if word not in ("alpha", "beta")]
    names = [word for word in words if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    if names[:2] != ["compute", "tpus"] or names[2] not in _COLLECTIONS:
        raise UnknownCommand(" ".join(argv)[:300])
    return Command(names[2], names[3], names[4].rpartition("/")[2] if len(names) > 4 else "", flags)
