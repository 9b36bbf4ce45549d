"""Claims about what the output of scripts on hosts and in containers means."""

import json
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.container_output import DUMP_STACKS, READ_PROGRESS, LogWindow, split_progress
from launcher.provider import ContainerState
from launcher.providers import this_machine
from launcher.run.stack_traces import parse_stacks
from launcher.tpu_vm.connections import HostResult
from launcher.tpu_vm.host_scripts import LOG_BYTES, covers, has_reports, parse_observation, parse_reports
from launcher.tpu_vm.provider import TpuVm
from tests.launcher.run_files import SLICE, load_text
from training.telemetry.progress_line import ProgressLine


def test_reports_of_hosts_are_told_apart_although_gcloud_mixes_them() -> None:
    output = (
        "Using ssh batch size of 1.\ntpu-launch 1 ready sha256:ab\nnoise\n"
        "tpu-launch 0 failed the image can not be pulled: gone\n"
    )
    reports = parse_reports(output, "ready", range(3))
    assert [(report.worker, report.ok) for report in reports] == [(0, False), (1, True), (2, False)]
    assert reports[0].detail == "the image can not be pulled: gone"
    assert reports[1].detail == "sha256:ab"
    assert "did not answer" in reports[2].detail
    assert has_reports(output)
    assert not has_reports("Using ssh batch size of 1.\n")


def summary(state: dict[str, object]) -> str:
    return json.dumps({"state": state, "created_on": "boot-1", "boot": "boot-1", "booted": 1767225600}) + "\n"


def test_an_observation_has_state_and_lines() -> None:
    state = {"Status": "exited", "ExitCode": 137, "OOMKilled": True, "FinishedAt": "2026-01-01T00:00:00Z"}
    log = "2026-01-01T00:00:00.5Z hello world\n2026-01-01T00:00:00.6Z 10%\r20%\u2028x\n"
    look, _ = parse_observation(3, summary(state) + log)
    assert (look.worker, look.container) == (3, ContainerState("exited", 137, True, "", "2026-01-01T00:00:00Z"))
    assert [line.text for line in look.lines] == ["hello world", "10%\r20%\u2028x"]
    running = summary({"Status": "running", "ExitCode": 0, "FinishedAt": "0001-01-01T00:00:00Z"})
    assert parse_observation(0, running)[0].container.exit_code is None
    assert parse_observation(0, "absent\n")[0].container == ContainerState("absent")


@pytest.mark.parametrize("status", ["running", "exited"])
def test_a_look_that_was_cut_short_keeps_only_whole_lines(status: str) -> None:
    line = "2026-01-01T00:00:00.5Z " + "x" * 70 + "\n"
    log = line * (LOG_BYTES // len(line) + 1)
    look, _ = parse_observation(0, summary({"Status": status}) + log[:LOG_BYTES])
    assert look.more
    assert len(look.lines) == LOG_BYTES // len(line)


@pytest.mark.parametrize(
    ("records", "first", "whole"),
    [(0, "12", False), (1, "12", True), (9, "11", True), (10, "11", False), (9, "13", False)],
)
def test_the_last_records_are_all_new_ones_if_they_begin_at_a_known_line(records: int, first: str, whole: bool) -> None:
    """Lines from second 11 on are asked for: those from 12 on are new."""
    window = LogWindow(first=f"2026-01-01T00:00:{first}.000000000Z", records=records)
    assert covers(window, "2026-01-01T00:00:11.000000000Z", tail=10) == whole


@pytest.mark.parametrize(
    ("seconds", "more", "looks"),
    [("1112", False, 1), ("1314", False, 2), ("1112", True, 2), ("0910", False, 1), ("0809", True, 1)],
)
def test_a_log_is_read_again_where_its_last_lines_do_not_reach_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str, more: bool, looks: int
) -> None:
    """Unless the host's clock went back, so that no line is new."""
    first, last = (f"2026-01-01T00:00:{second}.5Z x" for second in (seconds[:2], seconds[2:]))
    output = f"{summary({'Status': 'running'})}{first}\n{last}" + ("x" * LOG_BYTES if more else "\n")
    provider, asked = TpuVm(load_text(tmp_path, SLICE), print, this_machine()), list[str]()
    run = Mock(side_effect=lambda worker, script, **_: asked.append(script) or HostResult(worker, 0, output))
    monkeypatch.setattr(provider._connections, "run", run)
    provider.observe(0, "demo-0", "2026-01-01T00:00:11.000000000Z")
    assert len(asked) == looks
    output = "absent\n"  # nothing to read
    for since in "2026-01-01T00:00:11.000000000Z", None:
        provider.observe(0, "demo-0", since)
    assert ["--tail 5000" in script for script in asked[looks:]] == [True, False], "at first, all is read"


@pytest.mark.parametrize(("status", "kept"), [("running", True), ("exited", False)])
def test_an_unread_log_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, kept: bool) -> None:
    """But the end of its container waits for its lines."""
    seen = HostResult(0, 0, f"{summary({'Status': status})}2026-01-01T00:00:13.5Z x\n")
    provider = TpuVm(load_text(tmp_path, SLICE), print, this_machine())
    answers = iter([seen, HostResult(0, None, problem="Connection timed out")])
    monkeypatch.setattr(provider._connections, "run", lambda *_, **__: next(answers))
    look = provider.observe(0, "demo-0", "2026-01-01T00:00:11.000000000Z")
    assert look.problem == "Connection timed out"
    assert not look.lines
    assert (look.container is not None) == kept


def sh(script: str, *arguments: object) -> str:
    command = ["sh", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout


@pytest.mark.parametrize("end", ["", "\n", "\nmore\n"])
def test_the_newest_line_of_each_process_is_read_whatever_ends_it(tmp_path: Path, end: str) -> None:
    for name, text in ("", '{"step": 3}' + end), (".1", '{"step": 2}' + end), (".new", '{"step": 9}'):
        (tmp_path / f"progress{name}").write_text(text)
    log = "2026-01-01T00:00:00Z a line\n"
    assert split_progress(sh(READ_PROGRESS, tmp_path / "progress") + log) == ((ProgressLine(3), ProgressLine(2)), log)


def test_a_program_without_a_file_tells_nothing_and_a_huge_one_is_cut(tmp_path: Path) -> None:
    assert sh(READ_PROGRESS, tmp_path / "progress") == ""
    (tmp_path / "progress").write_text('{"step": 3, "phase": "' + "x" * 100_000)
    output = sh(READ_PROGRESS, tmp_path / "progress")
    assert len(output) < 4100
    assert split_progress(output) == ((), "")


def test_every_python_process_is_listed_with_its_state_also_without_py_spy() -> None:
    output = sh(DUMP_STACKS)
    stacks = parse_stacks(output)
    assert any("pytest" in process.command for process in stacks.processes)
    assert {process.state for process in stacks.processes} <= set("RSDTZtI")
    assert re.match(r"memory MemTotal: \d+ kB MemAvailable: \d+ kB .*\n", output)
