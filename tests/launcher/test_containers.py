"""Claims about the scripts that hosts run. They are run here by a real shell; what they do to an engine is shown in
tests/rehearsal."""

import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.provider import Attempt, ContainerState, Overlay
from launcher.tpu_vm import host_scripts as containers

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)


def attempt(**changes: object) -> Attempt:
    fields: dict[str, object] = {
        "run_id": "demo-1",
        "number": 0,
        "image": "sha256:ab",
        "command": ("true",),
        "environment": {},
        "files": {},
    }
    return Attempt(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "script",
    [
        containers.prepare_script(attempt(files={"config.yaml": b"x"}), ["10.0.0.1"], "v4-8"),
        containers.start_script(attempt()),
        containers.start_script(attempt(), gated=True),
        containers.go_script(attempt()),
        containers.observe_script("demo", "2026-01-01T00:00:00Z"),
        containers.observe_script("demo", "2026-01-01T00:00:00Z", patience=2.0, tail=10),
        containers.stop_script("demo", 5, remove=True),
        containers.evidence_script("demo"),
        containers.overlay_script(attempt(overlay=Overlay("/opt/it's here", b"x"))),
        containers.prepare_script(attempt(image=f"eu-docker.pkg.dev/p/r/i@sha256:{'0' * 64}"), ["10.0.0.1"], "v4-8"),
    ],
)
def test_scripts_are_valid_posix_shell_and_never_end_with_255(script: str) -> None:
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert "255" not in script


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TEXT, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["A", "B_1"]), TEXT.filter(lambda text: "\n" not in text)),
)
def test_any_command_and_value_reaches_the_engine_as_it_was_written(command: list[str], values: dict[str, str]) -> None:
    script = containers.prepare_script(
        attempt(command=tuple(command), environment=values), ["10.0.0.1", "10.0.0.2"], "v4-16"
    )
    create = script[
        script.index("$docker create") + len("$docker ") : script.index(
            ' >/dev/null 2>"$errors" || fail "the container can not be created"'
        )
    ]
    shown = subprocess.run(
        ["sh"], input=f"worker=1\nprintf '%s\\0' {create}".encode(), stdout=subprocess.PIPE, check=True
    ).stdout
    words = shown.decode().split("\0")[:-1]
    assert words[-len(command) :] == command
    assert "TPU_WORKER_ID=1" in words
    for key, value in values.items():
        assert f"{key}={value}" in words


def test_the_container_is_told_who_it_is() -> None:
    told = containers.environment(attempt(environment={"MINE": "1"}), ["10.0.0.1", "10.0.0.2"], "v4-16")
    assert told["TPU_WORKER_HOSTNAMES"] == "10.0.0.1,10.0.0.2"
    assert told["TPU_LAUNCH_RUN_ID"] == "demo-1"
    assert told["TPU_ACCELERATOR_TYPE"] == "v4-16"
    assert told["PJRT_DEVICE"] == "TPU"
    assert told["MINE"] == "1"


def test_reports_of_hosts_are_told_apart_although_gcloud_mixes_them() -> None:
    output = "Using ssh batch size of 1.\ntpu-launch 1 ready sha256:ab\nnoise\ntpu-launch 0 failed the image can not be pulled: gone\n"
    reports = containers.parse_reports(output, "ready", range(3))
    assert [(report.worker, report.ok) for report in reports] == [(0, False), (1, True), (2, False)]
    assert reports[0].detail == "the image can not be pulled: gone"
    assert reports[1].detail == "sha256:ab"
    assert "did not answer" in reports[2].detail


def test_an_observation_has_state_and_lines() -> None:
    state = {"Status": "exited", "ExitCode": 137, "OOMKilled": True, "FinishedAt": "2026-01-01T00:00:00Z"}
    look = containers.parse_observation(
        3, json.dumps(state) + "\n2026-01-01T00:00:00.5Z hello world\n2026-01-01T00:00:00.6Z 10%\r20%\u2028x\n"
    )
    assert look.worker == 3
    assert look.container == ContainerState("exited", 137, True, "", "2026-01-01T00:00:00Z")
    assert [line.text for line in look.lines] == ["hello world", "10%\r20%\u2028x"]


def test_a_running_container_has_no_exit_code_and_an_absent_one_is_absent() -> None:
    running = containers.parse_observation(0, '{"Status":"running","ExitCode":0,"FinishedAt":"0001-01-01T00:00:00Z"}\n')
    assert running.container is not None
    assert running.container.exit_code is None
    assert containers.parse_observation(0, "absent\n").container == ContainerState("absent")


def test_a_host_whose_engine_is_down_is_a_problem_not_an_absent_container() -> None:
    look = containers.parse_observation(0, "no engine\n")
    assert look.container is None
    assert "engine" in look.problem


def test_a_look_that_was_cut_short_keeps_only_whole_lines() -> None:
    line = "2026-01-01T00:00:00.5Z " + "x" * 70 + "\n"
    log = line * (containers.LOG_BYTES // len(line) + 1)
    look = containers.parse_observation(0, '{"Status":"running"}\n' + log[: containers.LOG_BYTES])
    assert look.more
    assert len(look.lines) == containers.LOG_BYTES // len(line)
