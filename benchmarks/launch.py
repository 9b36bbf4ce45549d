"""What it costs to start, watch and end a run on many hosts, beside one `gcloud ... ssh --worker=all` that runs `true` on the same hosts.

    make benchmark NAME=launch [ARGS="--json --hosts 2,8,32,64 --lines 1000000"]

Hosts are light: all of a slice are in one container, each with an address and an sshd of its own, and in place of a container engine a shell script
that runs a command as a plain process. gcloud, ssh and the launcher are the real ones, against the emulator's Cloud TPU API. The lines are delivered by the
real engine, from an emulated slice of two hosts (`--lines 0` leaves that out).

  start      from the start of `tpu-launch run` until all hosts have started; peer: that one gcloud call. Both the best of `--repeat`
  stop       a host dies at once, the others lose it and say so: until no process of the run is left on any of them
  watcher    processor time, memory, and bytes on the wire for each look at a host, while each host writes a line every ten seconds
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher import engine, images
from launcher.emulator import tpu_api
from launcher.emulator.catalogue import CODES, ApiError
from launcher.emulator.control import IMAGE, default_home
from launcher.emulator.state import State
from launcher.emulator.web import Acceptor, Request, Response, json_response, serve_http

HOUSE = Path(__file__).resolve().parent.parent
TYPES = {2: "v4-16", 4: "v4-32", 8: "v4-64", 16: "v4-128", 32: "v4-256", 64: "v4-512"}
PROJECT, ZONE = "benchmark-project", "us-central2-b"
WATCH_SECONDS, RECONNECTS = 40, 20
REFERENCE = "registry.invalid/image@sha256:" + "0" * 64

# Stands in for a host's container engine: a container is a folder and a process.
ENGINE = r"""#!/bin/sh
root=/rack/$WORKER
while :; do case "$1" in --*=*) shift ;; --*) shift 2 ;; *) break ;; esac; done
verb=$1; shift
last() { for last in "$@"; do :; done; }
now() { date -u +%Y-%m-%dT%H:%M:%S.%NZ; }
alive() { [ -e "$c/pid" ] && [ ! -e "$c/exit" ]; }
status() { if [ -e "$c/exit" ]; then echo exited; elif [ -e "$c/pid" ]; then echo running; else echo created; fi; }
case $verb in
version|info) echo 1 ;;
ps|cp|pull) ;;
image) echo sha256:1 ;;
create)
  while [ $# -gt 0 ]; do
    case $1 in --name) c=$root/$2; shift 2 ;; *@sha256:*) shift; break ;; *) shift ;; esac
  done
  mkdir -p "$c"; for word in "$@"; do printf '%s\0' "$word"; done > "$c/command" ;;
start)
  last "$@"; c=$root/$last
  [ -e "$c/pid" ] && exit 0
  now > "$c/started"
  setsid sh -c 'echo $$ > '"$c"'/pid; { xargs -0 sh -c '"'"'"$@" & echo $! > '"$c"'/child; wait $!; echo $? > '"$c"'/code'"'"' _ < '"$c"'/command; } 2>&1 |
    while IFS= read -r line; do echo "$(date -u +%Y-%m-%dT%H:%M:%S.%NZ) $line"; done >> '"$c"'/log
    date -u +%Y-%m-%dT%H:%M:%S.%NZ > '"$c"'/finished; mv '"$c"'/code '"$c"'/exit' < /dev/null > /dev/null 2>&1 &
  while [ ! -e "$c/pid" ]; do sleep 0.01; done ;;
inspect)
  last "$@"; c=$root/$last; [ -d "$c" ] || exit 1
  case "$*" in
  *json*) echo >> "$root/looks"
    printf '{"Status":"%s","ExitCode":%s,"OOMKilled":false,"Error":"","StartedAt":"%s","FinishedAt":"%s"}\n' "$(status)" \
      "$(cat "$c/exit" 2>/dev/null || echo 0)" "$(cat "$c/started" 2>/dev/null)" "$(cat "$c/finished" 2>/dev/null)" ;;
  *Status*) status ;; *Running*) alive && echo true || echo false ;; *Image*) echo sha256:1 ;; *Name*) echo "/$last" ;; *) echo "[]" ;;
  esac ;;
logs)
  since=0
  while [ $# -gt 1 ]; do case $1 in --since) since=$2; shift 2 ;; *) shift ;; esac; done
  awk -v since="$since" '$1 >= since' "$root/$1/log" 2>/dev/null ;;
wait) last "$@"; c=$root/$last; tail --pid="$(cat "$c/pid")" -s 0.2 -f /dev/null; cat "$c/exit" ;;
stop|kill)
  last "$@"; c=$root/$last; alive || exit 0
  [ $verb = stop ] && kill -TERM "$(cat "$c/child")" 2>/dev/null
  i=0; while alive && [ $verb = stop ] && [ $i -lt 15 ]; do sleep 0.2; i=$((i+1)); done
  alive && kill -9 "$(cat "$c/child")"
  while alive; do sleep 0.05; done ;;
rm) last "$@"; rm -rf "${root:?}/$last" ;;
esac
exit 0
"""
METADATA = '#!/bin/sh\nprintf %s "$WORKER"\n'  # the one question that the launcher's scripts have: who am I
SSHD = """\
ListenAddress {address}
HostKey /rack/key
PidFile /rack/{worker}/sshd.pid
AuthorizedKeysFile /rack/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 200
MaxSessions 200
SetEnv WORKER={worker} PATH=/rack/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
SETUP = """\
set -e
mkdir -p /rack/bin /run/sshd
: > /var/run/docker.sock
ssh-keygen -q -t ed25519 -N '' -f /rack/key
cat > /rack/bin/docker
chmod 755 /rack/bin/docker
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", default="2,8,32,64", help="sizes of slices, of " + ", ".join(map(str, TYPES)))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count in map(int, options.hosts.split(",")):
        rows += measure_slice(count, options.repeat)
    if options.lines:
        rows += measure_lines(options.lines)
    out = default_home().parent / "benchmarks"
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    (out / "launch.json").write_text(json.dumps({"rows": rows}, indent=1))
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        for row in rows:
            peer = "" if row["peer"] is None else f"   {row['peer_name']}: {row['peer']:.2f}, ratio {row['ratio']:.2f}"
            print(f"{row['name']:<34} {row['ours']:>12.2f} {row['unit']:<18} goal {row['goal']}{peer}")


def row(name: str, unit: str, ours: float, goal: str, peer_name: str | None = None, peer: float | None = None) -> dict[str, Any]:
    ratio = None if peer is None else ours / peer
    return {"name": name, "unit": unit, "ours": ours, "peer_name": peer_name, "peer": peer, "ratio": ratio, "goal": goal}


# -- a slice of light hosts -------------------------------------------------------------------------------------------------------------------


@dataclass
class Rack:
    """The light hosts of one slice, and a workstation from which they are used."""

    docker: str
    container: str
    folder: Path
    environment: dict[str, str]
    hosts: int

    def inside(self, script: str, given: str | None = None) -> str:
        argv = [self.docker, "exec", *(["--interactive"] if given is not None else []), self.container, "sh", "-c", script]
        return subprocess.run(argv, input=given, capture_output=True, text=True, check=True, timeout=120).stdout

    def launch(self, script: str, *options: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "launcher.cli", "run", "--new", "-f", "run.yaml", *options, "--", "sh", "-c", script]
        return subprocess.Popen(argv, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def gcloud(self) -> float:
        """Seconds of one gcloud call that runs `true` on every host."""
        argv = [
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            "ssh",
            "rack",
            f"--zone={ZONE}",
            f"--project={PROJECT}",
            "--worker=all",
            "--command=true",
        ]
        begun = time.perf_counter()
        ended = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=600)
        assert ended.returncode == 0, ended.stderr
        return time.perf_counter() - begun

    def running(self) -> list[int]:
        """The hosts on which a process of a run is left."""
        script = "cd /rack; for p in */tpu-launch-*/child; do [ -e $p ] && kill -0 $(cat $p) 2>/dev/null && echo ${p%%/*}; done; true"
        return [int(line) for line in self.inside(script).split()]

    def bytes_on_the_wire(self) -> int:
        fields = next(line for line in self.inside("cat /proc/net/dev").splitlines() if "eth0" in line).split(":")[1].split()
        return int(fields[0]) + int(fields[8])

    def looks(self) -> int:
        return int(self.inside("cat /rack/*/looks 2>/dev/null | wc -l"))


@contextmanager
def rack(hosts: int) -> Iterator[Rack]:
    """Everything is removed at the end."""
    docker = engine.require_engine()
    image = images.ensure(images.folder_spec(IMAGE, HOUSE / "images" / "host"), lambda line: print(line, file=sys.stderr)).reference
    name = f"tpu-launch-benchmark-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="tpu-launch-benchmark-"))

    def call(*argv: str) -> str:
        return subprocess.run([docker, *argv], check=True, capture_output=True, text=True, timeout=120).stdout.strip()

    acceptor: Closing | None = None
    try:
        call("network", "create", name)
        subnet = call("network", "inspect", "--format", "{{(index .IPAM.Config 0).Subnet}}", name)
        call(
            "run",
            "--detach",
            "--init",
            "--name",
            name,
            "--network",
            name,
            "--cap-add",
            "NET_ADMIN",
            "--entrypoint",
            "sleep",
            image,
            "infinity",
        )
        state = State("benchmark", 0, "", "", 0, 0, subnet=subnet)
        key = folder / "home" / ".ssh" / "google_compute_engine"
        key.parent.mkdir(parents=True, mode=0o700)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-C", os.environ.get("USER", "root"), "-f", key], check=True
        )
        port, acceptor = serve_api(state)
        environment = {
            **{key: value for key, value in os.environ.items() if key != "DOCKER_HOST"},
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"http://127.0.0.1:{port}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"http://127.0.0.1:{port}/compute/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "NO_GCE_CHECK": "true",
            "CLOUDSDK_CONFIG": str(folder / "home" / "gcloud"),
            "HOME": str(folder / "home"),
            "TPU_LAUNCH_HOME": str(folder / ".tpu-launch"),
            "PYTHONPATH": str(HOUSE),
            "PYTHONUNBUFFERED": "1",
        }
        found = Rack(docker, name, folder, environment, hosts)
        found.inside(SETUP, ENGINE)
        found.inside("cat > /rack/bin/curl; chmod 755 /rack/bin/curl", METADATA)
        found.inside(
            "cat > /rack/bin/sudo; chmod 755 /rack/bin/sudo", "#!/bin/sh\n"
        )  # it would look for the holders of a TPU among all hosts' processes
        found.inside("cat > /rack/authorized_keys", key.with_suffix(".pub").read_text())
        node = make_node(state, hosts, found.inside("cut -d' ' -f1-2 /rack/key.pub").split()[1])
        for host in node.hosts:
            configuration = SSHD.format(address=host.address, worker=host.index)
            found.inside(
                f"mkdir -p /rack/{host.index}; ip address add {host.address}/{subnet.split('/')[1]} dev eth0; cat > /rack/{host.index}/sshd_config",
                configuration,
            )
            found.inside(f"WORKER={host.index} /usr/sbin/sshd -f /rack/{host.index}/sshd_config")
        (folder / "run.yaml").write_text(
            f"project: {PROJECT}\nzone: {ZONE}\nslice: {{name: rack, accelerator_type: {TYPES[hosts]}}}\nimage: {{reference: '{REFERENCE}'}}\n"
        )
        found.gcloud()  # the first one spreads the key and learns the hosts' keys
        yield found
    finally:
        if acceptor is not None:
            acceptor.close()
        for argv in (("rm", "--force", name), ("network", "rm", name)):
            subprocess.run([docker, *argv], capture_output=True, check=False, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def serve_api(state: State) -> tuple[int, Closing]:
    """The emulator's Cloud TPU API over `state`; operations end at once."""
    import socket

    lock = threading.Lock()

    def answer(request: Request) -> Response:
        try:
            with lock:
                segments = request.segments
                if segments[0] == "compute":
                    return json_response(tpu_api.compute_project(segments[3]))
                value = tpu_api.answer(state, tpu_api.parse(request.method, segments[1:], request.query, request.json()), time.time())
                for operation in state.operations.values():
                    if not operation.done:
                        node = state.nodes[operation.target]
                        node.resource |= operation.change
                        operation.done = True
                        operation.response = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", **tpu_api.node_json(node)}
                return json_response(value)
        except ApiError as error:
            return json_response(error.as_json(), CODES[error.code][0])

    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    acceptor = Closing(listener)
    acceptor.inner.start()
    acceptor.inner.add(listener, lambda connection: serve_http(connection, answer))
    return int(listener.getsockname()[1]), acceptor


@dataclass
class Closing:
    """A listener, and who accepts on it."""

    listener: Any

    def __post_init__(self) -> None:
        self.inner = Acceptor()

    def close(self) -> None:
        self.inner.remove(self.listener, close=True)


def make_node(state: State, hosts: int, key: str) -> Any:
    body = {"acceleratorType": TYPES[hosts], "runtimeVersion": "tpu-ubuntu2204-base", "networkConfig": {"enableExternalIps": True}}
    parent = ("projects", PROJECT, "locations", ZONE, "nodes")
    tpu_api.answer(state, tpu_api.Call("POST", parent, "", {"nodeId": "rack"}, body), time.time())
    (node,) = state.nodes.values()
    node.resource |= {"state": "READY", "health": "HEALTHY"}
    for operation in state.operations.values():
        operation.done = True
    for host in node.hosts:
        host.guest_attributes["hostkeys/ssh-ed25519"] = key
    return node


def until(process: subprocess.Popen[str], pattern: str, seconds: float = 300) -> list[str]:
    """Reads what a launcher prints until a line matches."""
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
    assert process.stdout is not None
    lines.extend(process.stdout)


def measure_slice(hosts: int, repeat: int) -> list[dict[str, Any]]:
    with rack(hosts) as found:
        peer = min(found.gcloud() for _ in range(repeat))
        starts = []
        for _ in range(repeat):
            begun = time.perf_counter()
            process = found.launch("exit 0")
            until(process, "started on all hosts")
            starts.append(time.perf_counter() - begun)
            drain(process, [])
            assert process.wait(120) == 0
        watched = measure_watcher(found)
        seconds = measure_stop(found)
    name = f"{hosts} hosts"
    return [
        row(f"{name}: start", "s", min(starts), "ratio <= 1.5", "one gcloud call", peer),
        row(f"{name}: all stopped after a death", "s", seconds, "<= 10"),
        row(f"{name}: watcher, of a core", "%", watched["percent"], "< 5" if hosts == 64 else "-"),
        row(f"{name}: watcher, memory", "MB", watched["megabytes"], "< 150"),
        row(f"{name}: watcher, bytes a look", "bytes", watched["bytes"], "-"),
    ]


def measure_watcher(found: Rack) -> dict[str, float]:
    """A run that writes a line every ten seconds on each host, watched for a while."""
    process = found.launch("i=0; while :; do echo line $i; i=$((i+1)); sleep 10; done")
    until(process, "started on all hosts")
    reader = threading.Thread(target=drain, args=(process, []), daemon=True)
    reader.start()
    time.sleep(8)

    def used() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    looks, wire, spent, begun = found.looks(), found.bytes_on_the_wire(), used(), time.monotonic()
    time.sleep(WATCH_SECONDS)
    seconds = time.monotonic() - begun
    percent = (used() - spent) / seconds * 100
    wire, looks = found.bytes_on_the_wire() - wire, found.looks() - looks
    peak = next(int(line.split()[1]) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    stop = [sys.executable, "-m", "launcher.cli", "stop", "-f", "run.yaml", "--grace", "2"]
    ended = subprocess.run(stop, cwd=found.folder, env=found.environment, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    process.wait(120)
    return {"percent": percent, "megabytes": peak / 1000, "bytes": wire / max(1, looks)}


def measure_stop(found: Rack) -> float:
    """Seconds from a host's death until nothing of the run is left on the others."""
    found.inside("rm -f /rack/dead")
    process = found.launch("while [ ! -e /rack/dead ] || [ $((WORKER % 2)) = 1 ]; do sleep 0.5; done; sleep 0.2; exit 76")
    until(process, "started on all hosts")
    time.sleep(5)
    address = found.inside("sed -n 's/ListenAddress //p' /rack/1/sshd_config").strip()
    lines: list[str] = []
    reader = threading.Thread(target=drain, args=(process, lines), daemon=True)
    reader.start()
    # First its address, so that no connection is closed in order, then everything of it at once; half of the others notice, the rest hang.
    kill = "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ 2>/dev/null | grep -qx WORKER=1 && kill -9 ${p#/proc/}; done; true"
    begun = time.monotonic()
    found.inside(f"ip address del {address}/16 dev eth0 2>/dev/null || ip address flush to {address} dev eth0; {kill}; : > /rack/dead")
    while found.running():
        if time.monotonic() - begun > 60:
            raise SystemExit(f"still running on {found.running()}:\n{''.join(lines)}")
        time.sleep(0.1)
    seconds = time.monotonic() - begun
    code = process.wait(60)
    reader.join(5)
    assert code == 11, f"the verdict must be a lost host:\n{''.join(lines)}"
    return seconds


# -- lines ------------------------------------------------------------------------------------------------------------------------------------


def measure_lines(lines: int) -> list[dict[str, Any]]:
    """Half of the lines on each of two emulated hosts, while their ssh sessions are cut."""
    folder = Path(tempfile.mkdtemp(prefix="tpu-launch-benchmark-"))
    environment = {key: value for key, value in os.environ.items() if key != "DOCKER_HOST"}
    environment |= {"TPU_LAUNCH_HOME": str(folder / ".tpu-launch"), "PYTHONPATH": str(HOUSE), "PYTHONUNBUFFERED": "1"}
    (folder / "small").mkdir()
    (folder / "small" / "Dockerfile").write_text("FROM debian:bookworm-slim\nLABEL tpu-launch.benchmark=launch\n")
    (folder / "run.yaml").write_text(
        f"project: {PROJECT}\nzone: {ZONE}\nslice: {{name: lines, accelerator_type: v4-16}}\nimage: {{dockerfile: small/Dockerfile}}\n"
    )
    launch = [sys.executable, "-m", "launcher.cli", "--emulated"]

    def call(*argv: str) -> str:
        return subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=600).stdout

    each = lines // 2
    try:
        call(*launch, "up", "-f", "run.yaml")
        part = each // (RECONNECTS * 2)
        loop = f"seq -f 'line %.0f' $((i*{part}+1)) $(((i+1)*{part})); i=$((i+1)); sleep 1"
        script = f"i=0; while [ $i -lt {RECONNECTS * 2} ]; do {loop}; done"
        each = part * RECONNECTS * 2
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
                    subprocess.run([engine.client(), "exec", name, "pkill", "-9", "-f", "sshd: .*@"], capture_output=True, check=False)
                cuts += 1
            code = process.wait(1800)
            seconds = time.monotonic() - begun
        assert code == 0, (folder / "out").read_text()[-2000:]
        assert cuts == RECONNECTS, f"only {cuts} cuts while it ran"
        wrong = 0
        for worker in range(2):
            (log,) = (folder / ".tpu-launch").glob(f"runs/*/logs/attempt-0/host-{worker}.log")
            with open(log) as file:
                found = Counter(int(line.rsplit(" ", 1)[1]) for line in file)
            wrong += sum(abs(found[number] - 1) for number in range(1, each + 1)) + sum(
                count for number, count in found.items() if not 1 <= number <= each
            )
        return [
            row(f"{lines} lines, {RECONNECTS} reconnects: lost or doubled", "lines", float(wrong), "0"),
            row(f"{lines} lines: delivered", "lines/s", lines / seconds, "-"),
        ]
    finally:
        subprocess.run([*launch[:-1], "emulator", "stop"], cwd=folder, env=environment, capture_output=True, check=False, timeout=300)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
