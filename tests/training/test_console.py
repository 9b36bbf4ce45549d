"""The lines that people and the launcher read; the progress line changes in place on a terminal, and nowhere else."""

import io
import os
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from training.telemetry import console as text
from training.telemetry.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, *, is_first: bool = True) -> str:
    """Returns what is written for two steps, a line and a step."""
    with closing(Console(is_first, out)) as screen:
        screen.progress("step 1")
        screen.progress("step 2" + "x" * 30)
        screen.print("evaluation")
        screen.progress("step 3")
    return out.getvalue()


def test_on_a_terminal_progress_stays_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert shown(Terminal()) == "step 1\r\x1b[2Kstep 2xxxxxxxxxxxxx\r\x1b[2Kevaluation\nstep 3\n"


def test_elsewhere_each_progress_is_a_line_and_other_hosts_print_nothing() -> None:
    assert shown(io.StringIO()) == f"step 1\nstep 2{'x' * 30}\nevaluation\nstep 3\n"
    assert shown(io.StringIO(), is_first=False) == ""


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
OVERDUE = "import training.cli.train as cli, training.distributed.rendezvous as r; cli.exit_overdue(r.SingleHost(), 25)"
RANKS = """
import sys
from training.cli import main, processes
printing = [sys.executable, "-c", "print('x' * 200_000); exit(75)"]  # more than a pipe holds
processes.run_chip_processes = lambda module: processes.run_ranks(printing, [{"RANK": "0"}])
sys.argv[1:] = ["check-devices", "--backend", "torch-tpu"]
main.main()
"""
MAIN = "import sys; from training.cli.main import main; sys.argv[1:] = ['train', {!r}]; main()"


@pytest.mark.parametrize(
    ("program", "code"),
    [(TRAINING, 75), (OVERDUE, 75), (RANKS, 75), (MAIN.format("/nope.yaml"), 2), (MAIN.format("--nope"), 2)],
)
@pytest.mark.parametrize("place", ["/dev/full", "a pipe without a reader"])
def test_closed_or_full_output_changes_no_exit_code(place: str, program: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken, open("/dev/full", "w") as full:
        out = full if place == "/dev/full" else broken
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        ended = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=out, timeout=60, env=environment)
    assert ended.returncode == code


def test_a_progress_line_shows_step_loss_rate_data_wait_and_time_left() -> None:
    line = text.format_progress(7, 100, 5.0476, 1812.34, 0.07, 67)
    assert line == "step   7/100  loss 5.04760  1,812.3 examples/s  7% data wait  1:07 left"


def test_remaining_time() -> None:
    assert list(map(text.format_remaining, (0.4, 67, 7503, -3))) == ["0:00", "1:07", "2:05:03", "0:00"]


def test_the_summary_has_the_main_figures() -> None:
    values: dict[str, Any] = {
        "hosts": 2, "devices": 8, "steps": 60, "first_loss": 7.6, "last_loss": 5.1, "eval_loss": 5.2,
        "eval_perplexity": 181.3, "examples_per_second": 1234.5, "compilations": 2, "checkpoint": "gs://b/c",
        "seconds": {"step": 10.0, "other": 0.01, "total": 12.0},
    }  # fmt: skip
    summary = text.format_summary(values)
    assert "7.6000 -> 5.1000" in summary
    assert "perplexity 181.30" in summary
    assert "1,234.5 examples/s" in summary
    assert "other" not in summary
