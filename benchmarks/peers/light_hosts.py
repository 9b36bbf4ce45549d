"""Slices of light hosts, which have what gcloud, ssh and the launcher need, without a machine for each.

All hosts of a slice are in one container, each with an address and an sshd of its own. In place of a container engine a
shell script runs a command as a plain process. Before them is the emulator's Cloud TPU API. Everything is removed when
the block of `rack` ends.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.emulator.api import calls
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.catalogue import CODES, ApiError
from launcher.emulator.control import IMAGE
from launcher.emulator.http_server import HttpRequest, HttpResponse, accept_in_thread, json_response, serve_http
from launcher.emulator.state import EmulatorState
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import folder_spec
from launcher.tpu_vm import slices
from launcher.workstation import Owner

ROOT = Path(__file__).resolve().parent.parent.parent
TYPES = {2: "v4-16", 4: "v4-32", 8: "v4-64", 16: "v4-128", 32: "v4-256", 64: "v4-512"}
PROJECT, ZONE = "benchmark-project", "us-central2-b"
REFERENCE = "registry.invalid/image@sha256:" + "0" * 64

# Stands in for a host's container engine: a container is a folder and a process.
ENGINE = Path(__file__).with_name("light_engine.sh")
METADATA = '#!/bin/sh\nprintf %s "$WORKER"\n'  # the only question of the launcher's scripts
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


def finish_pending_operations(state: EmulatorState) -> None:
    """Ends every pending operation at once: these hosts have no containers to wait for."""
    for operation in [operation for operation in state.operations.values() if not operation.done]:
        tpu_api.finish_operation(state, operation, time.time())


@dataclass
class Rack:
    """The light hosts of one slice, and a workstation from which they are used."""

    docker: str
    container: str
    folder: Path
    environment: dict[str, str]
    hosts: int

    def inside(self, script: str, given: str | None = None) -> str:
        argv = [
            self.docker,
            "exec",
            *(["--interactive"] if given is not None else []),
            self.container,
            "sh",
            "-c",
            script,
        ]
        return subprocess.run(argv, input=given, capture_output=True, text=True, check=True, timeout=120).stdout

    def launch(self, script: str, *options: str) -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            "-m",
            "launcher.cli",
            "run",
            "--new",
            "-f",
            "run.yaml",
            *options,
            "--",
            "sh",
            "-c",
            script,
        ]
        return subprocess.Popen(
            argv, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def up(self) -> None:
        """Runs `tpu-launch up`."""
        argv = [sys.executable, "-m", "launcher.cli", "up", "-f", "run.yaml"]
        ended = subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert ended.returncode == 0, ended.stderr

    def gcloud(self) -> float:
        """Returns the seconds of one gcloud call that runs `true` on every host."""
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
        """Returns the hosts on which a process of a run still exists."""
        script = (
            "cd /rack; for p in */tpu-launch-*/child; do [ -e $p ] && kill -0 $(cat $p) 2>/dev/null && echo ${p%%/*}; "
            "done; true"
        )
        return [int(line) for line in self.inside(script).split()]

    def bytes_on_the_wire(self) -> int:
        """Returns the bytes that the hosts have received and sent."""
        fields = (
            next(line for line in self.inside("cat /proc/net/dev").splitlines() if "eth0" in line).split(":")[1].split()
        )
        return int(fields[0]) + int(fields[8])

    def looks(self) -> int:
        """Returns how often a container's state was read."""
        return int(self.inside("cat /rack/*/looks 2>/dev/null | wc -l"))


@contextmanager
def rack(hosts: int) -> Iterator[Rack]:
    """Creates a slice of light hosts; removes everything at the end."""
    docker = engine.require_engine()
    image = ensure_image(
        folder_spec(IMAGE, ROOT / "images" / "host"), lambda line: print(line, file=sys.stderr)
    ).reference
    name = f"tpu-launch-benchmark-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="tpu-launch-benchmark-"))

    def call(*argv: str) -> str:
        return subprocess.run([docker, *argv], check=True, capture_output=True, text=True, timeout=120).stdout.strip()

    acceptor: socket.socket | None = None
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
        state = EmulatorState("benchmark", 0, "", "", 0, 0, subnet=subnet)
        key = folder / "home" / ".ssh" / "google_compute_engine"
        key.parent.mkdir(parents=True, mode=0o700)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-C", os.environ.get("USER", "root"), "-f", key],
            check=True,
        )
        port, acceptor = serve_api(state)
        # Both sides keep their compiled bytecode, as an installed package and an installed gcloud do.
        left_out = ("DOCKER_HOST", "PYTHONDONTWRITEBYTECODE")
        environment = {
            **{key: value for key, value in os.environ.items() if key not in left_out},
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
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        slice_ = Rack(docker, name, folder, environment, hosts)
        slice_.inside(SETUP, ENGINE.read_text())
        slice_.inside("cat > /rack/bin/curl; chmod 755 /rack/bin/curl", METADATA)
        # sudo does nothing: it would look for the holders of a TPU among the processes of all hosts.
        slice_.inside("cat > /rack/bin/sudo; chmod 755 /rack/bin/sudo", "#!/bin/sh\n")
        slice_.inside("cat > /rack/authorized_keys", key.with_suffix(".pub").read_text())
        host_key = slice_.inside("cut -d' ' -f2 /rack/key.pub").strip()
        node = make_node(state, hosts, Owner(getpass.getuser()), host_key)
        for host in node.hosts:
            configuration = SSHD.format(address=host.address, worker=host.index)
            slice_.inside(
                f"mkdir -p /rack/{host.index}; ip address add {host.address}/{subnet.split('/')[1]} dev eth0; "
                f"cat > /rack/{host.index}/sshd_config",
                configuration,
            )
            slice_.inside(f"WORKER={host.index} /usr/sbin/sshd -f /rack/{host.index}/sshd_config")
        (folder / "run.yaml").write_text(
            f"project: {PROJECT}\nzone: {ZONE}\nslice: {{name: rack, accelerator_type: {TYPES[hosts]}}}\n"
            f"image: {{reference: '{REFERENCE}'}}\n"
        )
        slice_.up()  # gcloud's first call spreads the key and learns the hosts' keys
        yield slice_
    finally:
        if acceptor is not None:
            acceptor.close()
        for argv in (("rm", "--force", name), ("network", "rm", name)):
            subprocess.run([docker, *argv], capture_output=True, check=False, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def serve_api(state: EmulatorState) -> tuple[int, socket.socket]:
    """Serves the emulator's Cloud TPU API over `state`, where operations end at once. Returns its port, and a socket
    whose closing ends it."""
    lock = threading.Lock()

    def answer(request: HttpRequest) -> HttpResponse:
        try:
            with lock:
                segments = request.segments
                path = segments[2:] if segments[0] == "compute" else segments[1:]
                call = calls.parse(request.method, path, request.query, request.json())
                value = calls.answer(state, call, time.time())
                finish_pending_operations(state)
                return json_response(value)
        except ApiError as error:
            return json_response(error.as_json(), CODES[error.code][0])

    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    return int(listener.getsockname()[1]), accept_in_thread(listener, lambda connection: serve_http(connection, answer))


def make_node(state: EmulatorState, hosts: int, owner: Owner, host_key: str) -> Any:
    """Adds the node as `tpu-launch up` of `owner` would have created it. `host_key`: the ssh key that its hosts
    show."""
    labels = {slices.LABEL: "1", slices.OWNER: owner.user}
    if owner.account:
        labels[slices.ACCOUNT] = owner.account
    body = {
        "labels": labels,
        "acceleratorType": TYPES[hosts],
        "runtimeVersion": "tpu-ubuntu2204-base",
        "networkConfig": {"enableExternalIps": True},
    }
    tpu_api.create(state, f"projects/{PROJECT}/locations/{ZONE}", "rack", body, time.time())
    (node,) = state.nodes.values()
    node.resource |= {"state": "READY", "health": "HEALTHY"}
    finish_pending_operations(state)
    for host in node.hosts:
        host.guest_attributes["hostkeys/ssh-ed25519"] = host_key
    return node
