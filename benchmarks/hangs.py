"""Measures the explanation of a hang and the lines of progress of many hosts.

    pip install py-spy; make benchmark NAME=hangs [ARGS="--json --hosts 64"]

Hosts are light, as in benchmarks/launch.py; each runs a Python program that writes a line of progress every second, and
py-spy from the PATH reads its stacks.

  watcher    processor time of `tpu-launch run` while it reads the lines of progress of all hosts
  explain    `tpu-launch explain`: two samples of the stacks of all hosts, 5 s apart, and the line of progress of each;
             all hosts share this machine's processors, so processor time is measured too: of the launcher with its ssh
             clients, and of one dump of a host's stacks
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
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
from launcher.container_output import DUMP_STACKS

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
        percent, a_host = share_of_core(process.pid, WATCH_SECONDS), used_by_host(slice_)
        own = used_by_children()
        seconds, explained, told = measure_explain(slice_)
        own = used_by_children() - own
        slice_.inside("pkill -9 python3; true")
        process.wait(120)
    name = f"{options.hosts} hosts"
    rows = [
        row(f"{name}: watcher with lines of progress, of a core", "%", percent, "goal", 5, "< 5"),
        row(f"{name}: explain, without the 5 s between samples", "s", seconds, "goal", 20, "< 20"),
        row(f"{name}: explain, processor time of the launcher and its ssh", "s", own, "goal", 20, "< 20"),
        row(f"{name}: explain, processor time of a dump on a host", "s", a_host, "goal", 2, "< 2"),
        row(f"{name}: hosts whose stacks were read", "hosts", explained, "goal", options.hosts, "all"),
        row(f"{name}: hosts whose line of progress was read", "hosts", told, "goal", options.hosts, "all"),
    ]
    finish("hangs", rows, options.json)


def used_by_host(slice_: Rack) -> float:
    """Returns the processor seconds of one dump of the stacks on host 0: the script and py-spy, without its sshd."""
    script = (
        "export WORKER=0 PATH=/rack/bin:$PATH; set -- /rack/0/tpu-launch-*; "
        f"docker exec --user 0 $(basename $1) sh -c {shlex.quote(DUMP_STACKS)} '' >/dev/null; cat /proc/$$/stat"
    )
    fields = slice_.inside(script).rsplit(")", 1)[1].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")  # cutime, cstime


def used_by_children() -> float:
    """Returns the processor seconds of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    return seconds, sum("<string>:" in place for _, place in lines), sum(bool(step) for step, _ in lines)


if __name__ == "__main__":
    main()
