"""Measures the explanation of a hang and the lines of progress of many hosts.

    pip install py-spy; make benchmark NAME=hangs [ARGS="--json --hosts 64"]

Hosts are light, as in benchmarks/launch.py; each runs a Python program that writes a line of progress every second, and
py-spy from the PATH reads its stacks.

  watcher    processor time of `tpu-launch run` while it reads the lines of progress of all hosts
  explain    `tpu-launch explain`: two samples of the stacks of all hosts, 5 s apart, and the line of progress of each
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.launch import drain, share_of_core, until
from benchmarks.peers.light_hosts import Rack, rack
from benchmarks.peers.rows import finish, row

WATCH_SECONDS = 60
PROGRAM = """import json, os, time
path = "/run/tpu-launch/tpu-launch-progress"
for step in range(10**9):
    with open(path + ".new", "w") as file:
        line = {"step": step, "phase": "training", "step_seconds": 1.0, "seconds": {"data_wait": 0.1 * step}}
        json.dump(line, file)
    os.replace(path + ".new", path)
    time.sleep(1)
"""


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    spy = shutil.which("py-spy")
    if spy is None:
        raise SystemExit("py-spy is not on the PATH: pip install py-spy")
    with rack(options.hosts) as slice_:
        subprocess.run([slice_.docker, "cp", "--follow-link", spy, f"{slice_.container}:/rack/bin/py-spy"], check=True)
        process = slice_.launch(f"exec python3 -c '{PROGRAM}'")
        until(process, "started on all hosts")
        threading.Thread(target=drain, args=(process, []), daemon=True).start()
        time.sleep(20)
        percent = share_of_core(process.pid, WATCH_SECONDS)
        seconds, explained, told = measure_explain(slice_)
        slice_.inside("pkill -9 python3; true")
        process.wait(120)
    name = f"{options.hosts} hosts"
    rows = [
        row(f"{name}: watcher with lines of progress, of a core", "%", percent, "goal", 5, "< 5"),
        row(f"{name}: explain, without the 5 s between samples", "s", seconds, "goal", 20, "< 20"),
        row(f"{name}: hosts whose stacks were read", "hosts", explained, "goal", options.hosts, "all"),
        row(f"{name}: hosts whose line of progress was read", "hosts", told, "goal", options.hosts, "all"),
    ]
    finish("hangs", rows, options.json)


def measure_explain(slice_: Rack) -> tuple[float, int, int]:
    """Returns the seconds of `explain`, the hosts whose line it names, and those whose step it tells."""
    begun = time.monotonic()
    argv = [sys.executable, "-m", "launcher.cli", "explain", "-f", "run.yaml"]
    ended = subprocess.run(
        argv, cwd=slice_.folder, env=slice_.environment, capture_output=True, text=True, check=False, timeout=300
    )
    seconds = time.monotonic() - begun - 5
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"^  host \d+: (step [\d,]+, training: )?(.*)", ended.stdout, re.MULTILINE)
    return seconds, sum("<string>:8" in place for _, place in lines), sum(bool(step) for step, _ in lines)


if __name__ == "__main__":
    main()
