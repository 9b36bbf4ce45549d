"""The progress line changes in place on a terminal, and nowhere else."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from training.telemetry.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def on(out: io.StringIO) -> Iterator[Console]:
    screen = Console(True, out)
    yield screen
    screen.close()


def test_on_a_terminal_progress_stays_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with on(Terminal()) as screen:
        screen.progress("step 1")
        screen.progress("step 2" + "x" * 30)
        screen.print("evaluation")
        screen.progress("step 3")
    assert screen._out.getvalue() == "step 1\r\x1b[2Kstep 2xxxxxxxxxxxxx\r\x1b[2Kevaluation\nstep 3\n"  # type: ignore[attr-defined]


def test_elsewhere_each_progress_is_a_line_and_other_hosts_print_nothing() -> None:
    with on(io.StringIO()) as screen:
        screen.progress("step 1")
        screen.print("evaluation")
    assert screen._out.getvalue() == "step 1\nevaluation\n"  # type: ignore[attr-defined]
    silent = io.StringIO()
    Console(False, silent).print("step 1")
    assert silent.getvalue() == ""


TRAINING = """
import os, sys
from training.cli.train import ending_process
from training.distributed.rendezvous import SingleHost
from training.errors import StopRequested
from training.telemetry.console import Console, warn

with ending_process(SingleHost()):
    console = Console(True)
    for step in range(2000):
        console.progress(f"step {step}")
    warn("a warning")
    console.close()
    raise StopRequested("stopped")
"""


OVERDUE = """
from training.cli.train import exit_overdue
from training.distributed.rendezvous import SingleHost
exit_overdue(SingleHost(), 25)
"""
MAIN = "import sys; from training.cli.main import main; sys.argv[1:] = ['train', {!r}]; main()"


@pytest.mark.parametrize(
    ("program", "code"), [(TRAINING, 75), (OVERDUE, 75), (MAIN.format("/nope.yaml"), 2), (MAIN.format("--nope"), 2)]
)
@pytest.mark.parametrize("place", ["/dev/full", "a pipe without a reader"])
def test_closed_or_full_output_changes_no_exit_code(place: str, program: str, code: int) -> None:
    if place == "/dev/full":
        descriptor = os.open(place, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=descriptor, stderr=descriptor, timeout=60)
    finally:
        os.close(descriptor)
    assert ended.returncode == code
