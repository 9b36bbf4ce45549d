"""Measures the start, supervision and end of a run on many hosts, beside one `gcloud ... ssh --worker=all` that runs
`true` on the same hosts.

    make benchmark NAME=launch [ARGS="--json --hosts 2,8,32,64 --lines 1000000"]

Hosts are light: all of a slice are in one container, each with an address and an sshd of its own, and in place of a
container engine a shell script that runs a command as a plain process. gcloud, ssh and the launcher are the real ones,
against the emulator's Cloud TPU API. The lines are delivered by the real engine, from an emulated slice of two hosts
(`--lines 0` leaves that out).

  start      from the start of `tpu-launch run` until all hosts have started; peer: that one gcloud call, as a user
             types it (ours skips a slow key exchange: launcher/tpu_vm/commands.py). Both the best of `--repeat`
  stop       a host dies at once, the others lose it and report it: until no process of the run is left on any of them
  watcher    processor time, memory, and bytes on the wire for each observation of a host, while each host writes a line
             every ten seconds
  lines      lost or doubled, while all ssh sessions are cut twenty times
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.light_hosts import PROJECT, ROOT, TYPES, ZONE, Rack, rack
from benchmarks.peers.rows import Row, finish, row
from launcher.images import engine

WATCH_SECONDS, RECONNECTS = 40, 20


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", default="2,8,32,64", help="sizes of slices, of " + ", ".join(map(str, TYPES)))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for count in map(int, options.hosts.split(",")):
        rows += measure_slice(count, options.repeat)
    if options.lines:
        rows += measure_lines(options.lines)
    finish("launch", rows, options.json)


def until(process: subprocess.Popen[str], pattern: str, seconds: float = 300) -> list[str]:
    """Reads a launcher's output until a line matches."""
    lines = []
    deadline = time.monotonic() + seconds
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
        if time.monotonic() > deadline:
            break
    process.kill()
    raise SystemExit(f"no line matched {pattern!r}:\n{''.join(lines)}")


def drain(process: subprocess.Popen[str], lines: list[str]) -> None:
    """Reads a launcher's output until its end."""
    assert process.stdout is not None
    lines.extend(process.stdout)


def measure_slice(hosts: int, repeat: int) -> list[Row]:
    """Measures start, watcher and stop for one size."""
    with rack(hosts) as slice_:
        peers, starts = [], []
        for _ in range(repeat):  # in turn, so that other load on the machine affects both
            peers.append(slice_.gcloud())
            begun = time.perf_counter()
            process = slice_.launch("exit 0")
            until(process, "started on all hosts")
            starts.append(time.perf_counter() - begun)
            drain(process, [])
            assert process.wait(120) == 0
        watched = measure_watcher(slice_)
        seconds = measure_stop(slice_)
    name = f"{hosts} hosts"
    return [
        row(f"{name}: start", "s", min(starts), "one gcloud call", min(peers), "ratio <= 1.5"),
        row(f"{name}: all stopped after a death", "s", seconds, "goal", 10, "<= 10"),
        row(f"{name}: watcher, of a core", "%", watched["percent"], "goal", 5, "< 5" if hosts == 64 else "-"),
        row(f"{name}: watcher, memory", "MB", watched["megabytes"], "goal", 150, "< 150"),
        row(f"{name}: watcher, bytes a look", "bytes", watched["bytes"], "none", None, "-"),
    ]


def measure_watcher(slice_: Rack) -> dict[str, float]:
    """Measures the supervision of a run that writes a line every ten seconds on each host."""
    process = slice_.launch("i=0; while :; do echo line $i; i=$((i+1)); sleep 10; done")
    until(process, "started on all hosts")
    reader = threading.Thread(target=drain, args=(process, []), daemon=True)
    reader.start()
    time.sleep(8)
    looks, wire = slice_.looks(), slice_.bytes_on_the_wire()
    percent = share_of_core(process.pid, WATCH_SECONDS)
    wire, looks = slice_.bytes_on_the_wire() - wire, slice_.looks() - looks
    peak = next(
        int(line.split()[1])
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    stop = [sys.executable, "-m", "launcher.cli", "stop", "-f", "run.yaml", "--grace", "2"]
    ended = subprocess.run(
        stop, cwd=slice_.folder, env=slice_.environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    process.wait(120)
    return {"percent": percent, "megabytes": peak / 1000, "bytes": wire / max(1, looks)}


def share_of_core(pid: int, seconds: float) -> float:
    """Returns the processor time of a process, in percent of a core, over so many seconds."""

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    spent, begun = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - spent) / (time.monotonic() - begun) * 100


def measure_stop(slice_: Rack) -> float:
    """Returns the seconds from a host's death until nothing of the run is left on the others."""
    slice_.inside("rm -f /rack/dead")
    process = slice_.launch(
        "while [ ! -e /rack/dead ] || [ $((WORKER % 2)) = 1 ]; do sleep 0.5; done; sleep 0.2; exit 76"
    )
    until(process, "started on all hosts")
    time.sleep(5)
    address = slice_.inside("sed -n 's/ListenAddress //p' /rack/1/sshd_config").strip()
    lines: list[str] = []
    reader = threading.Thread(target=drain, args=(process, lines), daemon=True)
    reader.start()
    # First its address, so that no connection closes properly, then all its processes at once; half of the others
    # notice, the rest hang.
    of_host = "tr '\\0' '\\n' < $p/environ 2>/dev/null | grep -qx WORKER=1"
    kill = f"for p in /proc/[0-9]*; do {of_host} && kill -9 ${{p#/proc/}}; done; true"
    cut = f"ip address del {address}/16 dev eth0 2>/dev/null || ip address flush to {address} dev eth0"
    begun = time.monotonic()
    slice_.inside(f"{cut}; {kill}; : > /rack/dead")
    while slice_.running():
        if time.monotonic() - begun > 60:
            raise SystemExit(f"still running on {slice_.running()}:\n{''.join(lines)}")
        time.sleep(0.1)
    seconds = time.monotonic() - begun
    code = process.wait(60)
    reader.join(5)
    assert code == 11, f"the verdict must be a lost host:\n{''.join(lines)}"
    return seconds


def measure_lines(lines: int) -> list[Row]:
    """Counts lost and doubled lines of two emulated hosts, half of the lines each, while their ssh sessions are cut."""
    folder = Path(tempfile.mkdtemp(prefix="tpu-launch-benchmark-"))
    environment = {key: value for key, value in os.environ.items() if key != "DOCKER_HOST"}
    environment |= {"TPU_LAUNCH_HOME": str(folder / ".tpu-launch"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    (folder / "small").mkdir()
    (folder / "small" / "Dockerfile").write_text("FROM debian:bookworm-slim\nLABEL tpu-launch.benchmark=launch\n")
    (folder / "run.yaml").write_text(
        f"project: {PROJECT}\nzone: {ZONE}\nslice: {{name: lines, accelerator_type: v4-16}}\n"
        "image: {dockerfile: small/Dockerfile}\n"
    )
    launch = [sys.executable, "-m", "launcher.cli", "--emulated"]

    def call(*argv: str) -> str:
        return subprocess.run(
            argv, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=600
        ).stdout

    share = lines // 2
    try:
        call(*launch, "up", "-f", "run.yaml")
        part = share // (RECONNECTS * 2)
        loop = f"seq -f 'line %.0f' $((i*{part}+1)) $(((i+1)*{part})); i=$((i+1)); sleep 1"
        script = f"i=0; while [ $i -lt {RECONNECTS * 2} ]; do {loop}; done"
        share = part * RECONNECTS * 2
        with open(folder / "out", "w") as sink:
            begun = time.monotonic()
            process = subprocess.Popen(
                [*launch, "run", "--new", "-f", "run.yaml", "--", "sh", "-c", script],
                cwd=folder,
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            status = json.loads(call(*launch[:-1], "emulator", "status", "--json"))
            names = [host["hostname"] for node in status["nodes"] for host in node["hosts"]]
            cuts = 0
            while process.poll() is None and cuts < RECONNECTS:
                time.sleep(1.5)
                if (folder / "out").stat().st_size < 5000:  # not before it writes
                    continue
                for name in names:
                    subprocess.run(
                        [engine.client(), "exec", name, "pkill", "-9", "-f", "sshd: .*@"],
                        capture_output=True,
                        check=False,
                    )
                cuts += 1
            code = process.wait(1800)
            seconds = time.monotonic() - begun
        assert code == 0, (folder / "out").read_text()[-2000:]
        assert cuts == RECONNECTS, f"only {cuts} cuts while it ran"
        wrong = 0
        for worker in range(2):
            (log,) = (folder / ".tpu-launch").glob(f"runs/*/logs/attempt-0/host-{worker}.log")
            with open(log) as file:
                counts = Counter(int(line.rsplit(" ", 1)[1]) for line in file)
            wrong += sum(abs(counts[number] - 1) for number in range(1, share + 1))
            wrong += sum(count for number, count in counts.items() if not 1 <= number <= share)
        return [
            row(f"{lines} lines, {RECONNECTS} reconnects: lost or doubled", "lines", float(wrong), "goal", 0, "0"),
            row(f"{lines} lines: delivered", "lines/s", lines / seconds, "none", None, "-"),
        ]
    finally:
        subprocess.run(
            [*launch[:-1], "emulator", "stop"],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
            timeout=300,
        )
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
