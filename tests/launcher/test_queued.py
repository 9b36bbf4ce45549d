"""Claims about queued requests and several zones: command lines, the API's answers, where a slice is remembered."""

from pathlib import Path

import pytest

from launcher.config import Config
from launcher.errors import BadInput
from launcher.tpu_vm import commands, queued, slice_hints
from tests.launcher.run_files import load_text

SLICE = (
    "{name: s, accelerator_type: v5litepod-8, zones: [us-central1-a, us-west4-a, us-west1-c], capacity: reserved, "
    "queued: {valid_until_hours: 6}}"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_text(tmp_path, f"project: p\nzone: us-west1-c\nslice: {SLICE}\n")


def test_a_request_always_names_zone_type_and_end(config: Config) -> None:
    command = queued.create_command(config, {"tpu-launch": "1"}, 21600)
    assert command[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "s"], "alpha contradicts itself"
    for flag in ("--zone=us-west1-c", "--node-id=s", "--accelerator-type=v5litepod-8",
                 "--runtime-version=v2-alpha-tpuv5-lite",
                 "--valid-until-duration=21600s", "--reserved", "--labels=tpu-launch=1"):  # fmt: skip
        assert flag in command
    assert not any(flag.startswith("--reservation") for flag in command)
    assert "--force" in queued.delete_command(config)


@pytest.mark.parametrize(
    ("capacity", "flags"),
    [
        ("reserved, reservation: ours", ["--reservation=ours"]),
        ("calendar, reservation: ours", ["--provisioning-model=reservation-bound", "--reservation=ours"]),
        ("flex-start, max_run_hours: 2", ["--provisioning-model=flex-start", "--max-run-duration=7200s"]),
    ],
)
def test_kinds_of_capacity_that_only_alpha_has_are_asked_for_with_it(
    tmp_path: Path, capacity: str, flags: list[str]
) -> None:
    text = f"project: p\nzone: us-west1-c\nslice: {SLICE.replace('reserved', capacity)}\n"
    command = queued.create_command(load_text(tmp_path, text), {}, 60)
    assert command[:2] == ["gcloud", "alpha"]
    assert set(flags) <= set(command)


def test_a_request_is_read_with_its_name_and_its_time() -> None:
    place = '"name": "projects/p/locations/us-west1-c/queuedResources/s"'
    found = queued.parse(f'{{{place}, "createTime": "2026-11-20T08:00:00.000000000Z"}}')
    assert (found.name, found.created) == ("s", 1795161600.0)


def test_zones_are_tried_in_order_and_each_once(config: Config) -> None:
    assert config.zones == ["us-west1-c", "us-central1-a", "us-west4-a"]
    assert [here.zones for here in slice_hints.in_every_place(config)] == [[zone] for zone in config.zones]


def test_every_command_goes_to_the_zone_where_the_slice_is(config: Config) -> None:
    assert "--zone=us-west1-c" in commands.describe_command(config)
    slice_hints.save_place(config, config.candidates[2])
    describe, ssh = commands.describe_command(config), commands.ssh_command(config, "true")
    for command in (describe, ssh, queued.delete_command(config)):
        assert "--zone=us-west4-a" in command
    assert slice_hints.in_current_place(config).zone == "us-west4-a"
    slice_hints.forget(config)
    assert "--zone=us-west1-c" in commands.describe_command(config)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"zone": "mars-west1-a"}', '{"zone": 3}'])
def test_a_memory_that_is_broken_or_of_another_file_is_no_memory(config: Config, text: str) -> None:
    slice_hints.save_place(config, config.candidates[2])
    next((Path(config.folder) / "home" / "slices").iterdir()).write_text(text)
    assert slice_hints.current(config).zone == "us-west1-c"


def test_a_zone_that_can_not_be_one_is_named_with_its_line(tmp_path: Path) -> None:
    text = "project: p\nzone: us-west1-c\nslice:\n  name: s\n  accelerator_type: v4-8\n  zones:\n  - europe\n"
    with pytest.raises(BadInput, match=r"run\.yaml:7: .*'europe' is not the name of a zone"):
        load_text(tmp_path, text)
