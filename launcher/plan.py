"""What `tpu-launch plan` prints: every command that up, run and down would use, exactly as it would be typed. Touches
nothing.

What only exists later (addresses, the image's digest, the run's id) stands as <name>.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher import shell
from launcher.config import Config
from launcher.images import local
from launcher.run.launch import make_attempt
from launcher.tpu_vm import gcloud, host_scripts, placement, queued, slices


@dataclass(frozen=True)
class Step:
    """One command, as it would be typed."""

    verb: str
    what: str
    command: list[str]

    def text(self) -> str:
        return f"# {self.verb}: {self.what}\n{shell.quote(self.command)}\n"


def steps(config: Config) -> list[Step]:
    """The commands in the order in which they would run."""
    hosts = [f"<address of host {worker}>" for worker in range(config.accelerator.hosts)]
    attempt = make_attempt(
        config, "<run id>", 0, config.image.repository + "@<digest>" if config.image.repository else "<image id>"
    )
    ready = host_scripts.prepare_script(attempt, hosts, config.slice.accelerator_type)
    start = host_scripts.start_script(attempt, gated=config.run.transport == "auto" and not config.slice.iap)
    look = host_scripts.observe_script(attempt.container, "<time of the newest line>")
    stop = host_scripts.stop_script(attempt.container, config.run.stop_seconds, remove=False)
    planned = [Step("up", "look for the slice", gcloud.describe_command(config)), *_creation(config)]
    planned += [Step("run", "build the image, if nothing has it", command) for command in local.build_commands(config)]
    planned += [
        Step("run", "how to reach the hosts", gcloud.ssh_command(config, "true", dry_run=True)),
        Step("run", "prepare every host (over open ssh connections; by hand it is)", gcloud.ssh_command(config, ready)),
        Step(
            "run",
            "start on every host (called before that, each host waits until all are prepared)",
            gcloud.ssh_command(config, start),
        ),
        Step(
            "run",
            "look at every host, once a second (over open ssh connections; by hand it is)",
            gcloud.ssh_command(config, look),
        ),
        Step("stop", "stop on every host (over open ssh connections; by hand it is)", gcloud.ssh_command(config, stop)),
        *_deletion(config),
    ]
    return planned


def _creation(config: Config) -> list[Step]:
    hosts, labels = f"{config.accelerator.hosts} hosts", slices.owner_labels(config)
    planned = []
    for here in placement.in_every_zone(config):
        tried = "" if here.zone == config.zone else ", when the zones before have no capacity"
        if here.slice.queued is None:
            planned.append(Step("up", f"create it: {hosts}{tried}", gcloud.create_command(here, labels)))
            continue
        asked = queued.create_command(here, labels, here.slice.queued.valid_until_hours * 3600)
        planned += [
            Step("up", f"ask the queue for it: {hosts}{tried}", asked),
            Step("up", "look at the request until it is ACTIVE", queued.describe_command(here)),
        ]
    return planned


def _deletion(config: Config) -> list[Step]:
    request = Step(
        "down", "delete the request in the queue, if there is one, with its node", queued.delete_command(config)
    )
    return [
        *([request] if config.slice.queued else []),
        Step("down", "delete the slice", gcloud.delete_command(config)),
    ]
