"""Measures how soon a command in the live containers of a run answers, beside one `gcloud ... ssh --worker=all` that
runs `true` on the same hosts.

    make benchmark NAME=exec [ARGS="--json --hosts 4,32 --repeat 5"]

Hosts are light, as in benchmarks/launch.py: gcloud, ssh and the launcher are the real ones, a host's container engine
is a script that runs a command as a plain process.

  exec       from the start of `tpu-launch exec` until it has ended, the answers of all hosts printed: the best and the
             worst of `--repeat`
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.launch import drain, until
from benchmarks.peers.light_hosts import TYPES, Rack, rack
from benchmarks.peers.rows import Row, finish, row

GOAL_SECONDS = 2.0


def main() -> None:
    """Measures every size and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", default="4", help="sizes of slices, of " + ", ".join(map(str, TYPES)))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for count in map(int, options.hosts.split(",")):
        rows += measure(count, options.repeat)
    finish("exec", rows, options.json)


def measure(hosts: int, repeat: int) -> list[Row]:
    """Measures both in turn, while a run is live on a slice of this size."""
    with rack(hosts) as slice_:
        process = slice_.launch("while :; do sleep 1; done")
        until(process, "started on all hosts")
        threading.Thread(target=drain, args=(process, []), daemon=True).start()
        peers, ours = [], []
        for _ in range(repeat):  # in turn, so that other load on the machine affects both
            peers.append(slice_.gcloud())
            ours.append(answer(slice_))
        call(slice_, "stop", "-f", "run.yaml", "--grace", "2")
        process.wait(120)
    name = f"{hosts} hosts: exec"
    return [
        row(name, "s", min(ours), "one gcloud call", min(peers), f"<= {GOAL_SECONDS:g} s on 4 hosts"),
        row(f"{name}, the slowest", "s", max(ours), "one gcloud call", max(peers), "-"),
    ]


def answer(slice_: Rack) -> float:
    """Returns the seconds of one `exec` that every host answers."""
    begun = time.perf_counter()
    output = call(slice_, "exec", "-f", "run.yaml", "--", "echo", "here")
    seconds = time.perf_counter() - begun
    assert sorted(output.splitlines()) == sorted(f"[{worker}] here" for worker in range(slice_.hosts)), output
    return seconds


def call(slice_: Rack, *words: str) -> str:
    """Runs `tpu-launch` and returns its standard output."""
    argv = [sys.executable, "-m", "launcher.cli", *words]
    ended = subprocess.run(
        argv, cwd=slice_.folder, env=slice_.environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


if __name__ == "__main__":
    main()
