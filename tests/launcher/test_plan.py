"""`tpu-launch plan` lists what the provider's own code would run, in order, and leaves no trace."""

from pathlib import Path

import pytest

from launcher.plan import list_commands
from tests.launcher.run_files import SLICE, load_text

FILE = f"""\
{SLICE}image: {{reference: 'r/i@sha256:{"0" * 64}'}}
run: {{command: [train], secrets: [TOKEN]}}
"""
DESCRIBE, CREATE, SSH = "up: tpu-vm describe", "up: tpu-vm create", "up: tpu-vm ssh"
RUN = ["run: tpu-vm ssh"] * 2 + ["stop: tpu-vm ssh", "down: tpu-vm ssh"]
DOWN = ["down: queued-resources describe", "down: tpu-vm delete"]  # after the stop of a run that is detached
QUEUED = [DESCRIBE, "up: queued-resources describe", "up: queued-resources create", SSH, SSH]


@pytest.mark.parametrize(
    ("overrides", "commands"),
    [
        ([], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["slice.accelerator_type=v4-8"], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["run.transport=gcloud"], [DESCRIBE, CREATE, SSH, *RUN, *DOWN]),
        (["slice.iap=true"], [DESCRIBE, CREATE, SSH, *RUN, *DOWN]),
        (["slice.max_cost_per_hour=0.01"], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["slice.queued={valid_until_hours: 1}"], [*QUEUED, *RUN, "down: queued-resources delete"]),
    ],
)
def test_a_plan_is_what_the_provider_would_run(tmp_path: Path, overrides: list[str], commands: list[str]) -> None:
    shown = []
    for step in list_commands(load_text(tmp_path, FILE, overrides)):
        group, verb = step.command[step.command.index("tpus") + 1 :][:2]
        shown.append(f"{step.verb}: {group} {verb}")
    assert shown == commands
    assert not (tmp_path / "home").exists()


def test_all_zones_are_asked_for_the_slice(tmp_path: Path) -> None:
    overrides = ["slice.accelerator_type=v5litepod-8", "zone=us-central1-a", "slice.zones=[us-west4-a]"]
    created = [step for step in list_commands(load_text(tmp_path, FILE, overrides)) if "create" in step.command]
    assert [next(word for word in step.command if "--zone" in word) for step in created] == [
        "--zone=us-central1-a",
        "--zone=us-west4-a",
    ]
    assert created[1].what.endswith("if the zones before have no capacity")
