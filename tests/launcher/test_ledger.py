"""A run's folder belongs to one launcher at a time, and a run id to one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import Exit, LaunchError
from launcher.providers import this_machine
from launcher.run.events import AttemptBegan, Ended
from launcher.run.ledger import Ledger, RunRecord, begin, new_run_id

HOUSE = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from launcher.run.events import AttemptBegan, Ended
from launcher.clock import SystemClock
from launcher.run.ledger import Ledger
with Ledger(Path(sys.argv[1]), SystemClock()).supervising():
    print("held", flush=True)
    sys.stdin.read()
"""


def new_run(home: Path) -> Ledger:
    run_id = new_run_id("r", this_machine())
    return begin(home, this_machine(), RunRecord(run_id, "r", "p", "z", "s", "f.yaml", ["true"], "hash", 0.0), "")


def test_a_second_launcher_on_a_run_is_told_who_the_first_is_and_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(HOUSE)}
    command = [sys.executable, "-c", HOLD, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(LaunchError, match=rf"supervised by another tpu-launch \(process {first.pid}\)") as raised,
            run.supervising(),
        ):
            pass
        assert raised.value.exit_code == Exit.CONFLICT
        first.kill()
    with run.supervising():
        assert (run.folder / "lock").read_text() == str(os.getpid())


def test_runs_begun_in_the_same_second_have_ids_of_their_own(tmp_path: Path) -> None:
    assert len({new_run(tmp_path).folder.name for _ in range(20)}) == 20


def test_a_run_is_under_way_from_the_beginning_of_an_attempt_to_its_end(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not run.under_way
    for number in range(2):
        run.append(AttemptBegan(number))
        assert run.under_way
        run.append(Ended(number, outcome="failed"))
        assert not run.under_way
