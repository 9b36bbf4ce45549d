"""The processes of one host as one program, with real processes: small Python programs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import sys
from training.cli.processes import run_ranks
environments = [{"RANK": str(rank)} for rank in range(3)]
sys.exit(run_ranks([sys.executable, "-c", sys.argv[1]], environments))
"""
STUBBORN = "import os, signal, sys, time\nrank = os.environ['RANK']\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def begin(program: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", PARENT, program], {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_every_line_has_its_rank_and_all_end_well() -> None:
    process = begin("import os, sys\nprint('hello', os.environ['RANK'])\nprint('warned', file=sys.stderr)")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [f"rank {rank}: hello {rank}" for rank in range(3)]
    assert sorted(errors.splitlines()) == [f"rank {rank}: warned" for rank in range(3)]


def test_first_failure_ends_the_others_within_10_s_and_is_named() -> None:
    program = "print('pid', os.getpid())\nif rank == '1':\n    print('why')\n    sys.exit(7)\ntime.sleep(600)"
    began = time.monotonic()
    process = begin(STUBBORN + program)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "tpu-train: error: rank 1 ended with exit code 7; the other 2 processes of this host were stopped" in errors
    assert errors.rstrip().endswith("\n  why"), errors
    assert time.monotonic() - began < 10 + 5, "with the start of Python"
    for identifier in map(int, re.findall(r"pid (\d+)", out)):
        assert not Path(f"/proc/{identifier}").exists()


def test_a_killed_process_is_the_cause_and_a_lost_peer_is_not(tmp_path: Path) -> None:
    """The others end as soon as it is dead, as processes do that wait for each other."""
    program = (
        f"{STUBBORN}import fcntl\nheld = open({str(tmp_path / 'held')!r}, 'a')\n"
        "if rank == '2':\n    fcntl.flock(held, fcntl.LOCK_EX)\n    held.write('held')\n    held.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not os.fstat(held.fileno()).st_size:\n    time.sleep(0.01)\n"
        "fcntl.flock(held, fcntl.LOCK_SH)\nsys.exit(76)"
    )
    process = begin(program)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 137, errors
    assert "rank 2 was killed by SIGKILL (exit code 137)" in errors


def test_signals_are_forwarded_and_every_process_ends_in_its_own_time() -> None:
    program = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.2 * int(os.environ['RANK']))\n    print('saved')\n    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready')\ntime.sleep(600)"
    )
    process = begin(program)
    assert all("ready" in process.stdout.readline() for _ in range(3))
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "tpu-train: stopped: rank" in errors
    assert sorted(out.splitlines()) == [f"rank {rank}: saved" for rank in range(3)]
