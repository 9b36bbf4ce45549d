"""The scripts of `launcher/tpu_vm/scripts` on simulated hosts, recognized by their text and parameters.

Each method does what the script of its name does, with the same pauses between its steps, because other users'
commands and reboots come in between. It returns the exit code and the output.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from launcher.provider import Overlay
from launcher.tpu_vm.host_scripts import load_script
from tests.simulation.launcher.hosts import EPOCH, Container, Host, timestamp
from tests.simulation.launcher.jobs import SECRET

if TYPE_CHECKING:
    from tests.simulation.launcher.world import Actor, World

_ASSIGNMENT = re.compile(r"(\w+)=((?:'[^']*'|\"'\"|[^\s'\"])*)\n")
_NAMES = ("observe", "stop", "start", "check_engine", "deliver_secrets", "stacks", "evidence", "copy_overlay",
          "execute", "end_execution")  # fmt: skip


class UnknownScript(BaseException):
    """Raised for a command that is none of the launcher's scripts, or a changed one: teach it to this module."""


@functools.cache
def _bodies() -> list[tuple[str, str]]:
    return [(name, load_script(name)) for name in _NAMES]


@functools.lru_cache(maxsize=2_000)  # the same text goes to all hosts
def parse(text: str) -> tuple[str, dict[str, str], str]:
    """Parses a script. Returns its name, its parameters, and the line of its arguments."""
    for name, body in _bodies():  # noqa: B007
        if text.endswith(body):
            header = text[: -len(body)]
            break
    else:
        raise UnknownScript(text[:400])
    parameters: dict[str, str] = {}
    at = 0
    while match := _ASSIGNMENT.match(header, at):
        value = match[2]
        if "'" in value:
            value = value.replace("'\"'\"'", "\0").replace("'", "").replace("\0", "'")
        parameters[match[1]] = value
        at = match.end()
    return name, parameters, header[at:]


def unquote(command: str) -> str:
    """Returns the script in `sh -c '<script>'`."""
    assert command.startswith("sh -c '")
    return command[7:-1].replace("'\"'\"'", "'")


def observe(world: World, host: Host, parameters: Mapping[str, str], arguments: str) -> tuple[int, str]:
    """observe.sh. Runs in the caller's task, because it is by far the most frequent."""
    scheduler = world.scheduler
    container = host.containers.get(parameters["container"])
    if parameters["patience"] and container is not None and container.running:
        scheduler.wait(container.waiters, float(parameters["patience"]), "the end of a container")
        container = host.containers.get(parameters["container"])
    if not host.engine_up:
        return 0, "no engine: no socket\n"
    if container is None:
        return 0, "absent\n"
    words = arguments.split()
    since = words[words.index("--since") + 1] if "--since" in words else ""
    cut = slice(int(parameters["log_bytes"]))
    tail = int(words[words.index("--tail") + 1]) if "--tail" in words else None
    if tail and since and host.clock_jumped and timestamp(scheduler.now + host.wall)[:19] < since[:19]:
        since, cut = "", slice(-cut.stop, None)  # its clock stepped back
    lines = container.lines(since, tail)
    state = {
        "Status": container.status,
        "ExitCode": container.exit_code,
        "OOMKilled": container.oom_killed,
        "Error": container.error,
        "StartedAt": container.started_at,
        "FinishedAt": container.finished_at,
    }
    summary = {
        "state": state,
        "created_on": container.boot,
        "boot": host.boot,
        "booted": int(host.booted + host.wall),
        "time": int(scheduler.now + host.wall),
    }
    told = container.progress() if parameters["progress"] else ""
    return 0, f"{json.dumps(summary)}\n{told}" + "".join(f"{at} {text}" for at, text in lines)[cut]


class Shell:
    def __init__(self, world: World, host: Host, actor: Actor) -> None:
        self.world, self.host, self.actor = world, host, actor
        self.rng, self.scheduler, self.stdin = world.rng, world.scheduler, ""

    def pause(self, least: float = 0.02, most: float = 0.2) -> None:
        """Waits as a step of the script does; for as long as the host hangs."""
        self.world.scheduler.sleep(self.rng.uniform(least, most))
        while self.host.hung:
            self.world.scheduler.sleep(1.0)

    def report(self, text: str, code: int = 0) -> tuple[int, str]:
        """Returns an exit code and the output of report.sh."""
        return code, f"tpu-launch {self.host.worker} {text}\n"

    def run(self, text: str, stdin: str | None) -> tuple[int, str]:
        """Runs a script. Returns its exit code and output."""
        name, parameters, arguments = parse(text)
        self.stdin = stdin or ""
        if self.actor.name == "explain" and (name not in ("observe", "stacks") or parameters.get("native")):
            self.world.break_promise("`explain` disturbs nothing", f"{name} on {self.host!r}")
        if name == "observe":
            return observe(self.world, self.host, parameters, arguments)
        function: Callable[..., tuple[int, str]] = getattr(self, name)
        return function(parameters, arguments)

    def _get(self, parameters: Mapping[str, str]) -> Container | None:
        return self.host.containers.get(parameters["container"])

    # -- the scripts --------------------------------------------------------------------------------------------------

    def check_engine(self, _parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        self.pause()
        if self.host.engine_up:
            return self.report("up")
        return self.report("failed its container engine does not answer yet: no socket")

    def _survey(self, parameters: Mapping[str, str]) -> str | tuple[int, str]:
        """Returns a refusal, "there" if the container runs or has run, or "" to create it."""
        host, name = self.host, parameters["container"]
        self.pause()
        if f"{name}.over" in host.marks:
            return self.report("failed this attempt was ended before it started on the host", 1)
        if not host.engine_up:
            return self.report("failed its container engine does not answer: no socket", 1)
        for container in host.containers.values():
            if container.run != parameters["run_id"]:
                if container.running:
                    return self.report(f"busy {container.run}", 1)
            elif container.attempt > int(parameters["attempt"]):
                return self.report(f"failed attempt {container.attempt} of this run is on the host already", 1)
        existing = host.containers.get(name)
        return "there" if existing is not None and existing.status != "created" else ""

    def start(self, parameters: Mapping[str, str], arguments: str) -> tuple[int, str]:
        host, world = self.host, self.world
        world.reached("prepare")
        self.pause()
        if f"{host.worker}={host.address}" not in parameters["hosts"].split():
            return self.report(f"moved to {host.address}", 1)
        if parameters["image"] not in host.images:
            found = self._survey(parameters)
            if isinstance(found, tuple):
                return found
            self.pause(0.2, world.pull_seconds)
            if host.disk_full:
                return self.report("failed the image can not be pulled (1G free): no space left on device", 1)
            host.images.add(parameters["image"])
        until = self.scheduler.now + 60.0
        while host.starting:  # the lock
            if self.scheduler.now > until:
                return self.report("failed another start on this host has not ended within 60 s", 1)
            self.pause()
        host.starting = True
        try:
            return self._start_alone(parameters, arguments)
        finally:
            host.starting = False

    def _start_alone(self, parameters: Mapping[str, str], arguments: str) -> tuple[int, str]:
        """Does what start.sh does under its lock."""
        host, name, world = self.host, parameters["container"], self.world
        found = self._survey(parameters)
        if isinstance(found, tuple):
            return found
        if not found:
            for stale in [item for item in host.containers.values() if item.run == parameters["run_id"]]:
                self.pause()
                world.remove_container(stale, self.actor, "start")
            if any(item.running for item in host.containers.values()):
                return self.report("failed its TPU is held by 4711:python ", 1)
            self.pause()
            if host.disk_full:
                return self.report("failed the container can not be created: no space left on device", 1)
            attempt = int(re.search(r"tpu-launch\.attempt=(\d+)", arguments)[1])  # type: ignore[index]
            hosts = ",".join(each.address for each in world.hosts if each.slice_name == host.slice_name)
            words = ("--privileged --network host", "=TPU ", f"NAMES={hosts} ", f"ATTEMPT={attempt} ", "A=b ", " train")
            if missing := [word for word in words if word not in arguments]:
                world.break_promise("a container gets what its file says", f"{name}: no {missing} in {arguments}")
            container = Container(name, parameters["run_id"], attempt, host, host.boot, parameters["image"])
            container.awaits_secrets = "/run/tpu-launch:" in arguments
            if container.awaits_secrets:
                container.secrets_seconds = float(re.search(r"seconds=(\d+)", arguments)[1])  # type: ignore[index]
            host.containers[name] = container
            self.pause()
            if f"{name}.over" in host.marks:
                if host.containers.get(name) is container:
                    world.remove_container(container, self.actor, "start")
                return self.report("failed this attempt was ended before it started on the host", 1)
            self.pause()
            if host.containers.get(name) is not container:
                return self.report(f"failed the container can not be started: no such container: {name}", 1)
            world.start_container(container, self.actor)
        return self.report(f"started {parameters['image']} {int(self.scheduler.now + host.wall)}")

    def stop(self, parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        host, name, grace = self.host, parameters["container"], float(parameters["grace"])
        mark = f"{name}.stopping"
        host.marks.add(f"{name}.over")
        self.pause()
        container = self._get(parameters)
        if not host.engine_up:
            return self.report("failed its container engine does not answer: no socket", 1)
        if container is not None and container.status == "created":
            self.world.remove_container(container, self.actor, "stop")
        elif container is not None:
            if container.running:
                first = mark not in host.marks
                host.marks.add(mark)
                self.world.stop_container(container, self.actor, first=first)
                deadline = self.world.scheduler.now + grace
                while container.running and self.world.scheduler.now < deadline:
                    self.world.scheduler.wait(container.waiters, deadline - self.world.scheduler.now, "a stop")
                if container.running:
                    self.world.kill_container(container, self.actor)
            if parameters["remove"] == "yes":
                self.pause()
                if host.containers.get(name) is container:
                    self.world.remove_container(container, self.actor, "stop")
        if parameters["remove"] == "yes":
            host.marks.discard(mark)
        return self.report("stopped")

    def _check_secrets(self, container: Container) -> None:
        """Checks that a container gets the secrets as the user gave them, and the same as those of its attempt."""
        job, lines = container.job, self.stdin.splitlines()[:-1]
        given = dict(line[7:].split("=", 1) for line in lines if "TPU_LAUNCH_SECRET=" not in line)
        wanted = {"HF_TOKEN": SECRET} | ({"OF_FILE": "'a b'"} if self.world.env_file is not None else {})
        assert job is not None
        job.secrets = job.secrets or self.stdin
        if given != wanted or self.stdin != job.secrets:
            self.world.break_promise("secrets reach each host", f"{container.name} on {self.host!r}: {self.stdin}")

    def stacks(self, parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        self.pause(1.0, 8.0)
        container = self._get(parameters)
        if container is None or not container.running:
            return 1, "Error response from daemon: the container is not running\n"
        assert container.job is not None
        return 0, container.job.stacks(container, self.actor, native=bool(parameters["native"]))

    def evidence(self, _parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        self.pause()
        return 0, f"disks and memory at {EPOCH + self.world.scheduler.now:.0f}\n"

    def execute(self, parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        """execute.sh. The command prints a line, which has no end on some hosts, and succeeds on host 0 only."""
        mark, host = parameters["mark"], self.host
        self.pause()
        if parameters["held"] == "no" and mark in host.marks:  # gcloud repeats the script
            return 0, f"{mark} failed the connection broke after it had begun\n"
        host.marks.add(mark)
        container = self._get(parameters)
        if container is None or not container.running:
            return 0, f"{mark} failed its container is not running\n"
        host.executed.append(self.actor)
        self.pause(0.1, 6.0)
        end = "\n" if host.worker % 2 else ""
        return 0, f"works on {host.worker} with {SECRET}{end}{mark} exit {host.worker}\n"

    def end_execution(self, _parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        return 0, ""

    def copy_overlay(self, parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        self.pause()
        container, sent = self._get(parameters), Overlay(parameters["target"], base64.b64decode(self.stdin))
        if container is None or sent.digest != parameters["digest"]:
            return self.report("failed the overlay can not be copied", 1)
        if not container.awaits_secrets and container.overlay != sent:  # the same may come again, as answers get lost
            self.world.break_promise("a program begins with its overlay", f"{container.name} runs already")
        container.overlay = sent
        return self.report("copied")

    def deliver_secrets(self, parameters: Mapping[str, str], _arguments: str) -> tuple[int, str]:
        self.pause()
        container = self._get(parameters)
        if container is None or not container.running:
            return self.report("failed the secrets can not be passed on", 1)
        self._check_secrets(container)
        self.world.give_secrets(container)
        return self.report("delivered")
