"""What `tpu-launch plan` prints: every command that up, run and down would use, exactly as it would be typed. Touches nothing.

What only exists later (addresses, the image's digest, the run's id) stands as <name>.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher import local, shell
from launcher.config import Config
from launcher.run.launch import make_attempt
from launcher.tpu_vm import containers, gcloud, slices


@dataclass(frozen=True)
class Step:
    """One command; `script` is what it runs on every host."""

    verb: str
    what: str
    command: list[str]
    script: str = ""

    def text(self) -> str:
        shown = [f"# {self.verb}: {self.what}", shell.quote(self.command)]
        if self.script:
            shown += ["#   which runs on every host:", *(f"#   {line}" for line in self.script.splitlines())]
        return "\n".join(shown) + "\n"


def steps(config: Config) -> list[Step]:
    """The commands in the order in which they would run."""
    hosts = [f"<address of host {worker}>" for worker in range(config.accelerator.hosts)]
    attempt = make_attempt(config, "<run id>", 0, config.image.repository + "@<digest>" if config.image.repository else "<image id>")
    ready = containers.prepare_script(attempt, hosts, config.slice.accelerator_type)
    start = containers.start_script(attempt)
    planned = [
        Step("up", "look for the slice", gcloud.describe_command(config)),
        Step("up", f"create it: {config.accelerator.hosts} hosts", gcloud.create_command(config, slices.owner_labels(config))),
    ]
    planned += [Step("run", "build the image, if nothing has it", command) for command in local.build_commands(config)]
    planned += [
        Step("run", "how to reach the hosts", gcloud.ssh_command(config, "true", dry_run=True)),
        Step("run", "prepare every host, over ssh", gcloud.ssh_command(config, "<script>"), ready),
        Step("run", "start on every host", gcloud.ssh_command(config, "<script>"), start),
        Step(
            "run",
            "look at every host, over ssh, once a second",
            ["sh", "-c", "<script>"],
            containers.observe_script(attempt.container, "<time of the newest line>"),
        ),
        Step(
            "stop",
            "stop on every host, over ssh",
            ["sh", "-c", "<script>"],
            containers.stop_script(attempt.container, config.run.stop_seconds, remove=False),
        ),
        Step("down", "delete the slice", gcloud.delete_command(config)),
    ]
    return planned
