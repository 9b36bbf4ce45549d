"""`tpu-launch plan`: every command that up, run, stop and down would use, exactly as it would be typed.

The provider's own code makes the list: it works on a machine that records gcloud's commands and runs none, in a folder
that is removed. What only exists later (addresses, the image's digest, the run's id) stands as <name>.
"""

import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from launcher import shell
from launcher.config import Config
from launcher.images import build, local
from launcher.providers import this_machine
from launcher.run import specification
from launcher.shell import Result
from launcher.tpu_vm import slice_hints
from launcher.tpu_vm.provider import TpuVm
from launcher.workstation import Address, ConnectionFailed, HostConnection
from training.machine import Clock

_PURPOSES = {  # any other command runs a script on the hosts
    "--dry-run": "find out how to reach the hosts",
    "tpu-vm describe": "look for the slice",
    "tpu-vm create": "create the slice",
    "tpu-vm delete": "delete the slice",
    "queued-resources describe": "look at the request in the queue",
    "queued-resources create": "ask the queue for the slice",
    "queued-resources delete": "delete the request in the queue, with its node",
}
_BY_HAND = "(over open ssh connections; by hand it is)"


@dataclass(frozen=True)
class PlannedCommand:
    """One command, as it would be typed."""

    verb: str
    what: str
    command: list[str]

    def text(self) -> str:
        """Returns a comment with the step's purpose, and the command."""
        return f"# {self.verb}: {self.what}\n{shlex.join(self.command)}\n"


def list_commands(config: Config) -> list[PlannedCommand]:
    """Returns the commands of up, run, stop and down in the order of a run: those on the slice, after them in `up` the
    creations of all other candidates, and before `run` those that make the image. Runs none of them, but may ask gcloud
    for its account and whether an engine answers, and hashes the image's files. Always for a Cloud TPU VM, whichever
    the provider. Raises BadInput."""
    later = [config.placed(other) for other in config.candidates if other != slice_hints.current(config)]
    when = "asked for too, within cost limits" if config.slice.candidates else "if the zones before have no capacity"
    steps = list(_record_commands(slice_hints.in_current_place(config)))
    up = [step for step in steps if step.verb == "up"]
    creations = [
        replace(step, what=f"{step.what}, {when}")
        for zoned in later
        for step in _record_commands(zoned)
        if "create" in step.command
    ]
    return [*up, *creations, *_list_image_commands(config), *steps[len(up) :]]


def _list_image_commands(config: Config) -> list[PlannedCommand]:
    """Returns the commands that still have to run to make and push the image: [] for a given one, the token's alone
    where no engine is needed. Asks an engine if one answers, but no registry. Raises BadInput, without a docker client
    that is needed too; LaunchError if this installation has no images."""
    if config.image.reference:
        return []
    if not local.needs_engine(config):
        command = ["gcloud", "auth", "print-access-token", "--quiet"]
        return [PlannedCommand("run", "get the token of the registry, in which the image is made", command)]
    what = "build the image, if it does not exist"
    return [PlannedCommand("run", what, command) for command in build.list_commands(local.image_spec(config))]


def _record_commands(config: Config) -> Iterator[PlannedCommand]:
    """Yields the commands that up, run, stop and down would run on the slice in this order, each once, but stop's again
    for down: lets the provider act on a machine that records commands and runs none. Ignores owners and cost limits.
    Until the iterator ends, TPU_LAUNCH_HOME of this process is a temporary folder."""
    unlimited = config.slice.model_copy(update={"max_cost_per_hour": None, "price_limit": None})
    config = replace(config, any_owner=True, slice=unlimited)
    recorder = _Recorder(config)
    machine = replace(this_machine(), clock=_SkippingClock(), run=recorder.run, connect=_refuse)
    built = f"{config.image.repository}@<digest>" if config.image.repository else "<image id>"
    spec = specification.describe(config, "<run id>")
    attempt = specification.make_attempt(spec, config, 0, config.image.reference or built)
    provider = TpuVm(config, lambda text: None, machine)
    grace, since = config.run.stop_seconds, "<time of the newest line>"
    actions: tuple[tuple[str, str, Callable[[], object]], ...] = (
        ("up", "wait for every host's engine", provider.create),
        ("run", "start on every host", lambda: provider.start(attempt)),
        ("run", f"observe each host, once a second {_BY_HAND}", lambda: provider.observe(0, attempt.container, since)),
        (
            "stop",
            f"stop on each host {_BY_HAND}",
            lambda: provider.stop(attempt.container, grace=grace, remove=False, workers=[0]),
        ),
        ("down", "delete the slice", provider.delete),
    )
    with tempfile.TemporaryDirectory() as home, shell.environment({"TPU_LAUNCH_HOME": home}):
        for verb, what, act in actions:
            known = len(recorder.commands)
            act()
            for command in recorder.commands[known:]:
                key = "--dry-run" if "--dry-run" in command else _group_and_verb(command)
                yield PlannedCommand(verb, _PURPOSES.get(key, what), command)
                if verb == "stop":
                    yield PlannedCommand("down", f"if a detached run goes on: {what}", command)


def _group_and_verb(command: Sequence[str]) -> str:
    """Returns the two words after "tpus" of a gcloud command, for example "tpu-vm create"."""
    after = list(command).index("tpus") + 1
    return " ".join(command[after : after + 2])


def _refuse(_address: Address) -> HostConnection:
    """Raises ConnectionFailed, so that the provider runs every command on a host through gcloud."""
    raise ConnectionFailed("a plan connects to no host", refused=True)


class _SkippingClock(Clock):
    """The machine's clock, without waiting."""

    def sleep(self, seconds: float) -> None:
        pass


class _Recorder:
    """Records gcloud's commands, and answers as Google and the hosts do when everything succeeds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.commands: list[list[str]] = []  # each once
        self.existing: set[str] = set()  # tpu-vm, queued-resources

    def run(
        self, argv: Sequence[str], *, timeout: float, input: str | bytes | None = None, pass_fds: Sequence[int] = ()
    ) -> Result:
        """Records a command once; returns a made-up result without running it: exit code 1 for what is missing."""
        command = list(argv)
        if command not in self.commands:
            self.commands.append(command)
        output = self._answer(command)
        if output is None:
            return Result(tuple(argv), 1, "", "ERROR: (gcloud) NOT_FOUND: it does not exist")
        return Result(tuple(argv), 0, output, "")

    def _answer(self, command: list[str]) -> str | None:
        """Returns a command's made-up output; None for a description of what was not created, or is deleted."""
        group, verb = _group_and_verb(command).split()
        workers = range(self.config.accelerator.hosts)
        if verb == "ssh" and "--dry-run" in command:
            words = ["ssh", "-i", "key", "-o", "HostKeyAlias=tpu-{0}", "me@<address of host {0}>", "--", "true"]
            return "\n".join(shlex.join(words).format(worker) for worker in workers)
        if verb == "ssh" and "--worker=all" not in command:
            return "absent"  # as observe.sh reports a host without the container
        if verb == "ssh":
            return "\n".join(f"tpu-launch {worker} up" for worker in workers)
        if verb == "create":
            self.existing |= {group, "tpu-vm"}
        elif verb == "delete":
            self.existing.clear()
        elif group not in self.existing:
            return None
        elif group == "tpu-vm":
            hosts = [{"ipAddress": f"<address of host {worker}>"} for worker in workers]
            return json.dumps({"name": self.config.node, "state": "READY", "networkEndpoints": hosts})
        return json.dumps({"name": self.config.node, "state": {"state": "ACTIVE"}})
