"""Claims about the scripts that run inside containers, run by this machine's shell."""

import re
import subprocess
from pathlib import Path

import pytest

from launcher.container_scripts import DUMP_STACKS, READ_PROGRESS, split_progress
from launcher.run.stack_traces import parse_stacks
from training.telemetry.progress_line import ProgressLine


@pytest.mark.parametrize("end", ["", "\n", "\nmore\n"])
def test_the_newest_line_of_each_process_is_read_whatever_ends_it(tmp_path: Path, end: str) -> None:
    file = tmp_path / "progress"
    file.write_text('{"step": 3}' + end)
    (tmp_path / "progress.1").write_text('{"step": 2}' + end)
    (tmp_path / "progress.new").write_text('{"step": 9}')
    command = ["sh", "-c", READ_PROGRESS, str(file)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    log = "2026-01-01T00:00:00Z a line\n"
    assert split_progress(output + log) == ((ProgressLine(3), ProgressLine(2)), log)


def test_a_program_without_a_file_tells_nothing_and_a_huge_one_is_cut(tmp_path: Path) -> None:
    command = ["sh", "-c", READ_PROGRESS, str(tmp_path / "progress")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
    (tmp_path / "progress").write_text('{"step": 3, "phase": "' + "x" * 100_000)
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert len(output) < 4100
    assert split_progress(output) == ((), "")


def test_every_python_process_is_listed_with_its_state_also_without_py_spy() -> None:
    output = subprocess.run(["sh", "-c", DUMP_STACKS], capture_output=True, text=True, check=False, timeout=120).stdout
    stacks = parse_stacks(output)
    assert any("pytest" in process.command for process in stacks.processes)
    assert {process.state for process in stacks.processes} <= set("RSDTZtI")
    assert re.match(r"memory MemTotal: \d+ kB MemAvailable: \d+ kB .*\n", output)
