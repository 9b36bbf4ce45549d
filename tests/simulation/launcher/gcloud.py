"""A simulated gcloud process: runs a command against the simulated Google, and fails as gcloud and its network do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.emulator.api.catalogue import NOT_FOUND, ApiError
from tests import gcloud_commands
from tests.gcloud_commands import Command

if TYPE_CHECKING:
    from tests.simulation.launcher.google import Slice
    from tests.simulation.launcher.hosts import Host
    from tests.simulation.launcher.world import Actor, World

Output = tuple[int, str, str]
"""Exit code, stdout, stderr."""

_OFFLINE = (
    "ERROR: gcloud crashed (TransportError): HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries "
    "exceeded with url: / (Caused by NewConnectionError('Failed to establish a new connection: "
    "[Errno -3] Temporary failure in name resolution'))"
)
_EVERY = {"project", "zone", "quiet"}
_NODE = {"accelerator-type", "labels", "scopes"}
_FLAGS = {  # of each call, beside those of every one; a node's capacity, and --dry-run, may be added
    ("tpu-vm", "create"): _NODE | {"version"},
    ("queued-resources", "create"): _NODE | {"runtime-version", "node-id", "valid-until-duration"},
    ("queued-resources", "delete"): {"force"},
    ("tpu-vm", "ssh"): {"worker", "ssh-flag", "command"},
} | {(group, verb): {"format"} for group in ("tpu-vm", "queued-resources") for verb in ("describe", "list")}
_ERRORS = {  # errors of a call that the API refuses for a time
    "unavailable": "UNAVAILABLE: The service is currently unavailable.",
    "rate": "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' "
    "of service 'tpu.googleapis.com'",
    "permission": "PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource",
    "signed out": "There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request', {'error': "
    "'invalid_grant'})\nPlease run:\n\n  $ gcloud auth login\n\nto obtain new credentials.",
    "lost": "('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
}


class Gcloud:
    def __init__(self, world: World, actor: Actor, argv: Sequence[str], stdin: str | None) -> None:
        self.world, self.google, self.scheduler, self.actor = world, world.google, world.scheduler, actor
        self.command, self._shown, self._begun = gcloud_commands.parse(argv), "", world.scheduler.now
        self.stdin = stdin
        given = {word[2:].partition("=")[0] for word in argv if word.startswith("--")} - {"dry-run"}
        capacity = {"spot"} if self.command.verb == "create" and world.config.slice.candidates else set()
        wanted = _EVERY | _FLAGS.get((self.command.group, self.command.verb), set())
        if given - capacity != wanted or argv[1] != "compute":
            world.break_promise("gcloud gets its flags", f"{given} instead of {wanted}")

    def run(self) -> Output:
        """Runs the command. Blocks its task as long as gcloud would."""
        world, command = self.world, self.command
        self.scheduler.sleep(world.rng.uniform(0.4, 1.6))
        if command.verb == "ssh":
            return self._ssh()
        if (refusal := self._refusal()) is not None:
            self.actor.out_of_stock = False  # there is another reason now
            return refusal
        try:
            output = self._call(command)
        except ApiError as error:
            if command.verb == "describe" and error.code == NOT_FOUND:
                self.actor.seen[command.full_name].append((self.scheduler.now, ""))
            return 1, "", command.api_error(error)
        if world.api_fault("lost") is not None:
            world.note(f"the answer to {command.group} {command.verb} {command.name} is lost")
            return 1, "", command.error(_ERRORS["lost"])
        slice_ = self.google.slice_of(command)
        if command.verb == "describe":
            self.actor.saw_slice |= slice_ is None or slice_.creator == self.actor.user
            self.actor.seen[command.full_name].append((self.scheduler.now, self._shown))
        return output

    def _call(self, command: Command) -> Output:
        slice_ = self.google.slice_of(command)
        if slice_ is not None and command.verb == "delete":
            self.actor.asked_to_delete = self._begun
            self._check_deletion(slice_)
        self._check_change(command)
        answer = self.google.call(command, self.actor.user, self.actor)
        if command.verb == "describe":
            self._shown = answer["state"] if command.group == "tpu-vm" else answer["state"]["state"]
        if (command.group, command.verb) == ("tpu-vm", "describe"):
            self.actor.states[answer["id"], answer["state"]] += 1
        if (command.group, command.verb) == ("tpu-vm", "describe") and answer["state"] != "DELETING":
            self.actor.shown[answer["id"]] = answer["state"]
            self.actor.looked[answer["id"]] = self.scheduler.now
        if not command.changes:
            return 0, command.output(answer), ""
        operation = self.google.wait(answer["name"], gcloud_commands.WAIT_SECONDS)
        if command.verb == "create":
            self.actor.out_of_stock = bool(operation.failure)
        error = command.operation_error(operation)
        return (1, "", error) if error else (0, command.output(answer), "")

    def _check_change(self, command: Command) -> None:
        """Checks that a command makes the change that its last look at the same node or request calls for."""
        known = [state for at, state in self.actor.seen[command.full_name] if at <= self._begun]
        seen = known[-2:] or ["unseen"]
        last = seen[-1] if command.verb == "create" else seen[-1] or seen[0]  # one answer without it may be old
        ends = ("DELETING", "SUSPENDING") if self.actor.name != "gc" else ()  # it looks at the node, not at both
        deletable = last not in ("", "unseen", *ends)
        # Another workstation was faster, after ours was deleted: Google refuses this one.
        made = last == "ACCEPTED" and seen[0] in ("DELETING", "SUSPENDING", "SUSPENDED")
        due = {"create": last == "" or made, "start": last == "STOPPED", "delete": deletable}
        if not due.get(command.verb, True):
            self.world.break_promise("a change follows a look", f"{self.actor.name}: {command}, seen as {seen}")

    def _check_deletion(self, slice_: Slice) -> None:
        self.actor.deleted.add(slice_.node.resource["id"])
        shown = self.actor.shown.get(slice_.node.resource["id"], "")
        in_use = shown in ("CREATING", "READY") and not self.world.has_expired(slice_, self.actor)
        if self.actor.name == "gc" and in_use:
            self.world.break_promise("gc deletes what is left over", f"{slice_.name}, described to it as {shown}")

    def _refusal(self) -> Output | None:
        """Returns the error of a fault that hits before the API does anything."""
        world = self.world
        if self.actor.laptop.offline:
            self.scheduler.sleep(world.rng.uniform(1.0, 8.0))
            return 1, "", _OFFLINE
        if world.api_fault("slow") is not None:
            self.scheduler.sleep(world.rng.uniform(20.0, 90.0))
        for kind in ("unavailable", "rate", "permission", "signed out"):
            if world.api_fault(kind) is not None:
                self.actor.refusals.add(kind)
                return 1, "", self.command.error(_ERRORS[kind])
        return None

    def _ssh(self) -> Output:
        if (refusal := self._refusal()) is not None:
            return refusal
        command, flags = self.command, self.command.flags
        slice_ = self.google.slice_of(command)
        self.world.reached("contact")
        if slice_ is None:
            return 1, "", command.error(f"NOT_FOUND: Resource '{command.full_name}' was not found")
        if slice_.state != "READY":
            text = f"Instance [{command.name}] is not in a READY state: terminal state {slice_.state!r}"
            return 1, "", command.error(f"FAILED_PRECONDITION: {text}")
        hosts = slice_.hosts if flags["worker"] == "all" else [slice_.hosts[int(flags["worker"])]]
        if "dry-run" in flags:
            lines = [
                f"/usr/bin/ssh -T -i key -o CheckHostIP=no -o HostKeyAlias={host.alias} -o IdentitiesOnly=yes "
                f"-o UserKnownHostsFile=known me@{host.address} -- true\n"
                for host in hosts
            ]
            return 0, "".join(lines), ""
        for host in hosts:  # gcloud distributes the key and learns those of hosts
            host.key_known = True
        return self._on_hosts(hosts)

    def _on_hosts(self, hosts: Sequence[Host]) -> Output:
        """Runs the command on all hosts at once. gcloud repeats the whole command when ssh ends with 255."""
        script, outputs, errors = self.command.flags["command"], [], []
        waiting = {host: self.world.execute(host, script, self.stdin, self.actor) for host in hosts}
        for host, execution in waiting.items():
            while execution.result is None:
                self.scheduler.wait(execution.waiters, None, f"gcloud ssh to {host}")
            code, output = execution.result
            outputs.append(output)
            if code == 255:
                errors.append(f"ssh: connect to host {host.address} port 22: Connection timed out")
        if errors:
            return 255, "".join(outputs), "\n".join([*errors, self.command.error("[255]")])
        return 0, "".join(outputs), ""
