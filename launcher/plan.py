"""What `tpu-launch plan` prints: every command that up, run and down would use, exactly as it would be typed.

Nothing is touched. What only exists later (addresses, the image's digest, the run's id) stands as <name>.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from launcher import shell
from launcher.config import Config
from launcher.images import local
from launcher.owner import this_owner
from launcher.run import specification
from launcher.tpu_vm import commands, host_scripts, ownership, placement, queued
from training.machine.clock import SystemClock

_TOKEN_COMMAND = ["gcloud", "auth", "print-access-token", "--quiet"]


@dataclass(frozen=True)
class Step:
    """One command, as it would be typed."""

    verb: str
    what: str
    command: list[str]

    def text(self) -> str:
        """A comment that says what it is for, and the command."""
        return f"# {self.verb}: {self.what}\n{shell.quote(self.command)}\n"


def steps(config: Config) -> list[Step]:
    """The commands in the order in which they would run."""
    return [
        Step("up", "look for the slice", commands.describe_command(config)),
        *_creation(config),
        *_run(config),
        *_deletion(config),
    ]


def _run(config: Config) -> list[Step]:
    hosts = [f"<address of host {worker}>" for worker in range(config.accelerator.hosts)]
    image = config.image.repository + "@<digest>" if config.image.repository else "<image id>"
    attempt = specification.make_attempt(specification.describe(config, "<run id>"), config, 0, image)
    prepare = host_scripts.prepare_script(attempt, hosts, config.slice.accelerator_type)
    start = host_scripts.start_script(attempt)
    observe = host_scripts.observe_script(attempt.container, "<time of the newest line>")
    stop = host_scripts.stop_script(attempt.container, config.run.stop_seconds, remove=False)
    by_hand = "(over open ssh connections; by hand it is)"
    builds = [Step("run", "build the image, if nothing has it", command) for command in local.build_commands(config)]
    if not config.image.reference and not local.needs_engine(config):
        builds = [Step("run", "who we are to the registry, in which the image is made", _TOKEN_COMMAND)]
    return [
        *builds,
        Step("run", "how to reach the hosts", commands.ssh_command(config, "true", dry_run=True)),
        Step("run", f"prepare every host {by_hand}", commands.ssh_command(config, prepare)),
        Step("run", "start on every host", commands.ssh_command(config, start)),
        Step("run", f"look at every host, once a second {by_hand}", commands.ssh_command(config, observe)),
        Step("stop", f"stop on every host {by_hand}", commands.ssh_command(config, stop)),
    ]


def _labels(config: Config) -> dict[str, str]:
    return ownership.make_labels(config, this_owner(os.environ), SystemClock().time())


def _creation(config: Config) -> list[Step]:
    hosts, labels = f"{config.accelerator.hosts} hosts", _labels(config)
    planned = []
    for zoned in placement.in_every_zone(config):
        later = "" if zoned.zone == config.zone else ", when the zones before have no capacity"
        if zoned.slice.queued is None:
            planned.append(Step("up", f"create it: {hosts}{later}", commands.create_command(zoned, labels)))
            continue
        request = queued.create_command(zoned, labels, zoned.slice.queued.valid_until_hours * 3600)
        planned += [
            Step("up", f"ask the queue for it: {hosts}{later}", request),
            Step("up", "look at the request until it is ACTIVE", queued.describe_command(zoned)),
        ]
    return planned


def _deletion(config: Config) -> list[Step]:
    request = Step(
        "down", "delete the request in the queue, if there is one, with its node", queued.delete_command(config)
    )
    return [
        *([request] if config.slice.queued else []),
        Step("down", "delete the slice", commands.delete_command(config)),
    ]
