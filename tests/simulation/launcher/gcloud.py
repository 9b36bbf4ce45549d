"""gcloud, simulated: an argument list in; exit code, output and errors out, in gcloud's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.launcher.google import GCLOUD_WAITS, ApiError, Node, Operation, Request, dump

if TYPE_CHECKING:
    from tests.simulation.launcher.hosts import Host
    from tests.simulation.launcher.world import Actor, World

Answer = tuple[int, str, str]
"""Exit code, output, errors."""

_OFFLINE = (
    "ERROR: gcloud crashed (TransportError): HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries "
    "exceeded with url: / (Caused by NewConnectionError('Failed to establish a new connection: "
    "[Errno -3] Temporary failure in name resolution'))"
)
_WEATHER = {  # what gcloud prints of a call that the API refuses for a time
    "unavailable": "ERROR: ({command}) UNAVAILABLE: The service is currently unavailable.",
    "rate": "ERROR: ({command}) RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' and limit 'Read "
    "requests per minute' of service 'tpu.googleapis.com'",
    "permission": "ERROR: ({command}) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource",
    "lost": "ERROR: ({command}) ('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
}


class UnknownCommand(Exception):
    """The launcher calls gcloud in a way that this module must learn."""


class Gcloud:
    """One gcloud process."""

    def __init__(self, world: World, actor: Actor, argv: Sequence[str]) -> None:
        self.world, self.google, self.scheduler, self.actor = world, world.google, world.scheduler, actor
        words = [word for word in argv[1:] if word not in ("alpha", "beta")]
        if words[:2] != ["compute", "tpus"]:
            raise UnknownCommand(" ".join(argv)[:300])
        self.positional = [word for word in words if not word.startswith("--")]
        self.flags: dict[str, str] = {}
        for word in words:
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                self.flags[name] = value
        self.kind, self.verb = self.positional[2], self.positional[3]
        self.name = self.positional[4].rsplit("/", 1)[-1] if len(self.positional) > 4 else ""
        self.zone, self.project = self.flags.get("zone", ""), self.flags.get("project", "")
        self.command = f"gcloud.{'.'.join(self.positional[:4])}"

    def run(self) -> Answer:
        """Runs the command. Blocks its task as long as gcloud would."""
        world = self.world
        self.scheduler.sleep(world.chance.uniform(0.4, 1.6))
        if self.kind == "tpu-vm" and self.verb == "ssh":
            return self._ssh()
        if (refusal := self._refusal()) is not None:
            self.actor.out_of_stock = False  # there is another reason now
            return refusal
        method: Callable[[], Answer] | None = getattr(
            self, f"_{self.kind.replace('-', '_')}_{self.verb.replace('-', '_')}", None
        )
        if method is None:
            raise UnknownCommand(f"{self.kind} {self.verb}")
        changes = self.verb in ("create", "delete", "start", "update")
        if changes and world.weather("busy") is not None:
            return self._fail("ABORTED: unable to queue the operation")
        try:
            answer = method()
        except ApiError as error:
            return self._fail(str(error))
        if self.world.weather("lost") is not None:
            self.world.note(f"the answer to {self.kind} {self.verb} {self.name} is lost")
            return 1, "", _WEATHER["lost"].format(command=self.command)
        if self.verb == "describe" and answer[0] == 0:
            self.actor.looked = True
        return answer

    def _refusal(self) -> Answer | None:
        """The answer of weather that hits before the API does anything."""
        world = self.world
        if world.is_offline(self.actor.workstation):
            self.scheduler.sleep(world.chance.uniform(1.0, 8.0))
            return 1, "", _OFFLINE
        if world.weather("slow") is not None:
            self.scheduler.sleep(world.chance.uniform(20.0, 90.0))
        for kind in ("unavailable", "rate", "permission"):
            if world.weather(kind) is not None:
                return 1, "", _WEATHER[kind].format(command=self.command)
        return None

    def _fail(self, text: str) -> Answer:
        return 1, "", f"ERROR: ({self.command}) {text}"

    def _not_found(self, kind: str = "nodes") -> Answer:
        parent = f"projects/{self.project}/locations/{self.zone}"
        return self._fail(f"NOT_FOUND: Resource '{parent}/{kind}/{self.name}' was not found")

    def _node(self) -> Node | None:
        return self.google.nodes.get((self.zone, self.name))

    def _wait(self, operation: Operation) -> Answer:
        """Waits for an operation as gcloud does: half an hour."""
        deadline = self.scheduler.now + GCLOUD_WAITS
        while not operation.done and self.scheduler.now < deadline:
            self.scheduler.wait(operation.waiters, deadline - self.scheduler.now, f"operation {operation.name}")
        if not operation.done:
            return 1, "", f"ERROR: ({self.command}) Operation {operation.name} has not finished in 1800 seconds."
        if operation.kind == "create":
            self.actor.out_of_stock = bool(operation.error)
        if operation.error:
            return 1, "", f"ERROR: ({self.command}) {dump(operation.error)}"
        return 0, "", f"Done [{self.name}]"

    # -- tpu-vm -------------------------------------------------------------------------------------------------------

    def _tpu_vm_describe(self) -> Answer:
        node = self._node()
        if node is None:
            return self._not_found()
        self.actor.shown[node.uid] = node.state
        return 0, dump(node.document()), ""

    def _tpu_vm_list(self) -> Answer:
        return 0, dump(self.google.listed("nodes", self.zone, self._age_of_lists())), ""

    def _tpu_vm_create(self) -> Answer:
        operation = self.google.create_node(
            (self.zone, self.name), self.project, self.flags["accelerator-type"], self._labels(),
            self._is_spot(), self.actor.person, by=self.actor,
        )  # fmt: skip
        if "async" in self.flags:
            return self._started(operation)
        return self._wait(operation)

    def _tpu_vm_delete(self) -> Answer:
        node = self._node()
        if node is None:
            return self._not_found()
        shown = self.actor.shown.get(node.uid, "")
        if self.actor.command == "gc" and shown in ("CREATING", "READY"):
            self.world.break_promise("gc deletes what is left over", f"{node.name}, which it has seen to be {shown}")
        operation = self.google.delete_node(node, self.actor.person)
        return self._started(operation) if "async" in self.flags else self._wait(operation)

    def _tpu_vm_start(self) -> Answer:
        node = self._node()
        if node is None:
            return self._not_found()
        operation = self.google.start_node(node)
        return self._started(operation) if "async" in self.flags else self._wait(operation)

    def _started(self, operation: Operation) -> Answer:
        name = f"projects/{self.project}/locations/{self.zone}/operations/{operation.name}"
        document = dump({"name": name, "metadata": {"target": self.name}}) if self.flags.get("format") == "json" else ""
        return 0, document, f"Create request issued for: [{self.name}]\nCheck operation [{name}] for status.\n"

    def _operations_describe(self) -> Answer:
        operation = self.google.operations.get(self.name)
        if operation is None:
            return self._not_found("operations")
        document = {"name": operation.name, "done": operation.done}
        return 0, dump({**document, "error": operation.error} if operation.error else document), ""

    def _operations_list(self) -> Answer:
        return 0, dump([{"name": item.name, "done": item.done} for item in self.google.operations.values()]), ""

    # -- queued-resources ---------------------------------------------------------------------------------------------

    def _queued_resources_describe(self) -> Answer:
        request = self.google.requests.get((self.zone, self.name))
        return self._not_found("queuedResources") if request is None else (0, dump(request.document()), "")

    def _queued_resources_list(self) -> Answer:
        return 0, dump(self.google.listed("requests", self.zone, self._age_of_lists())), ""

    def _queued_resources_create(self) -> Answer:
        seconds = float(self.flags["valid-until-duration"].rstrip("s"))
        now = self.scheduler.now
        self.google.create_request(
            Request(
                self.name, self.zone, self.project, self.flags["accelerator-type"], self._labels(), self._is_spot(),
                self.actor.person, now, now + seconds, by=self.actor,
            )
        )  # fmt: skip
        return 0, "", f"Create request issued for: [{self.name}]"

    def _queued_resources_delete(self) -> Answer:
        request = self.google.requests.get((self.zone, self.name))
        if request is None:
            return self._not_found("queuedResources")
        return self._wait(self.google.delete_request(request, self.actor.person))

    def _labels(self) -> dict[str, str]:
        return dict(item.split("=", 1) for item in self.flags.get("labels", "").split(",") if item)

    def _is_spot(self) -> bool:
        return "spot" in self.flags or "preemptible" in self.flags

    def _age_of_lists(self) -> float:
        return self.world.chance.uniform(20.0, 300.0) if self.world.weather("stale") is not None else 0.0

    # -- ssh ----------------------------------------------------------------------------------------------------------

    def _ssh(self) -> Answer:
        if (refusal := self._refusal()) is not None:
            return refusal
        node = self._node()
        if node is None:
            return self._not_found()
        if node.state != "READY":
            text = f"Instance [{self.name}] is not in a READY state: terminal state {node.state!r}"
            return self._fail(f"FAILED_PRECONDITION: {text}")
        hosts = node.hosts if self.flags["worker"] == "all" else [node.hosts[int(self.flags["worker"])]]
        if "dry-run" in self.flags:
            lines = [
                f"/usr/bin/ssh -T -i key -o CheckHostIP=no -o HostKeyAlias={host.alias} -o IdentitiesOnly=yes "
                f"-o UserKnownHostsFile=known me@{host.address} -- true\n"
                for host in hosts
            ]
            return 0, "".join(lines), ""
        for host in hosts:  # gcloud spreads the key and learns those of hosts
            host.key_known = True
        return self._on_hosts(hosts)

    def _on_hosts(self, hosts: Sequence[Host]) -> Answer:
        """Runs the command on all hosts at once. ssh that ends with 255 is tried again with the whole command."""
        script, outputs, errors = self.flags["command"], [], []
        waiting = {host: self.world.execute(host, script, None, self.actor, tries=3) for host in hosts}
        for host, execution in waiting.items():
            while execution.result is None:
                self.scheduler.wait(execution.waiters, None, f"gcloud ssh to {host}")
            code, output = execution.result
            outputs.append(output)
            if code == 255:
                errors.append(f"ssh: connect to host {host.address} port 22: Connection timed out")
        if errors:
            return 255, "".join(outputs), "\n".join([*errors, f"ERROR: ({self.command}) [255]"])
        return 0, "".join(outputs), ""


def is_create(argv: Sequence[str]) -> bool:
    """Whether a command asks for hosts."""
    return "create" in argv and re.search(r"tpus", " ".join(argv[:5])) is not None
