"""Claims about TensorFlow's single program for several hosts, on CPUs: real workers, a real meeting of two hosts, and
the trainer's loop on host 0 with its model on host 1's worker, or a program in its place.

TPUStrategy itself needs TPUs. Each test starts two hosts and their two workers.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.container import small_runs
from tests.processes import is_alive, wait_until

# One host. What is tested: "idle" (a program in the place of the loop), or "train" and "evaluate" of tpu-train.
HOST = """
import json, os, sys, time
from pathlib import Path
import yaml
from training.backends.tensorflow import pod as single_client
from training.distributed import shutdown as stopping
from training.distributed.cluster import discover
from training.distributed.config import RendezvousSection
from training.config import from_document
from training.errors import Exit, StopRequested, TrainError
from training.run_setup import prepare_framework
from training.distributed.rendezvous import join
from training.yaml_file import Document

def program(config, cluster, rendezvous, stopping):
    print("program", cluster.hosts, flush=True)
    while not stopping.requested:
        rendezvous.check()
        time.sleep(0.05)
    raise StopRequested("committed")

def on_worker_of_host_1():
    import tensorflow as tf
    workers = [address.removeprefix("grpc://") for address in os.environ["TPU_NAME"].split(",")]
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"tpu_worker": workers}))
    return tf.distribute.OneDeviceStrategy("/job:tpu_worker/replica:0/task:1/device:CPU:0")

WHAT = sys.argv[1]
single_client.tensorflow_plugin = dict  # its workers have no chips: TensorFlow is the wheel for CPUs here
if WHAT in ("train", "evaluate"):
    from training.cli.main import tpu_train
    if os.environ["TPU_WORKER_ID"] == "0":
        prepare_framework("tensorflow")
        from training.backends.tensorflow import replicas
        replicas._tpu_strategy = on_worker_of_host_1
    tpu_train([WHAT, *sys.argv[2:]], standalone_mode=False, obj=None)
asked = stopping.install_signal_handlers()
config = from_document(Document("test", yaml.safe_load(Path("config.yaml").read_text()), {}))
cluster = discover()
rendezvous = join(cluster, asked, RendezvousSection(start_seconds=120, seconds=60, lost_seconds=10))
code, message = Exit.FINISHED, ""
try:
    with single_client.open_host(config, cluster, rendezvous, asked) as host:
        if host:
            program(config, *host, asked)
except TrainError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    code, message = error.exit_code, str(error)
rendezvous.close(code, message)
os._exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = small_runs.prepare(tmp_path_factory.mktemp("single"))
    (place / "config.yaml").write_text(yaml.safe_dump(small_runs.document(place, backend="tensorflow")))
    return place


def start(folder: Path, what: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Both hosts; they write to 0.log and 1.log."""
    ports, (first, second) = small_runs.free_ports(), small_runs.free_ports()
    hosts = []
    for worker, port in enumerate((first, second)):
        cluster = small_runs.cluster_environment(what, 0, worker, 2, ports)
        own = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_TASK_PORT": str(port)}
        told = {**os.environ, **cluster, **own}
        with (folder / f"{worker}.log").open("w") as log:
            command = [sys.executable, "-c", HOST, what, *arguments]
            hosts.append(
                subprocess.Popen(command, cwd=folder, env=told, stdout=log, stderr=subprocess.STDOUT, text=True)
            )
    return hosts


def ended(folder: Path, hosts: list[subprocess.Popen[str]], seconds: float = 600) -> list[int]:
    deadline = time.monotonic() + seconds
    for host in hosts:
        try:
            host.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for each in hosts:
                each.kill()
            texts = "\n".join((folder / f"{worker}.log").read_text() for worker in (0, 1))
            pytest.fail(f"not within {seconds} s:\n{texts}")
    return [host.returncode for host in hosts]


def wait_for_program(folder: Path, line: str = "program 1") -> None:
    log = folder / "0.log"
    wait_until(lambda: line in log.read_text(), 600, log.read_text)


def children(host: subprocess.Popen[str]) -> list[int]:
    return [int(each) for each in Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()]


def test_a_stop_request_on_one_host_ends_all_hosts_saved(folder: Path) -> None:
    hosts = start(folder, "idle")
    wait_for_program(folder)
    hosts[1].send_signal(signal.SIGTERM)
    assert ended(folder, hosts) == [75, 75]


TRAIN = ["config.yaml", "--set", "data.evaluation=null"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(["idle"], "program 1", marks=pytest.mark.nightly),
        pytest.param(
            ["train", *TRAIN, "--set", "train.steps=1000000", "--set", "checkpoint.every_steps=1000000"],
            "step       3/",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["idle", "train"],
)
def test_a_lost_worker_ends_the_run_and_is_named_as_the_cause(folder: Path, arguments: list[str], line: str) -> None:
    """Host 0 notices it as an operation that fails, often before host 1 notices it."""
    hosts = start(folder, *arguments)
    wait_for_program(folder, line)
    [worker] = children(hosts[1])
    os.kill(worker, signal.SIGKILL)
    logs = [folder / "0.log", folder / "1.log"]
    assert ended(folder, hosts) == [76, 1], [log.read_text() for log in logs]
    assert "the TPU worker of this host ended with code -9" in logs[1].read_text()
    cause = "(LostPeer|lost peer): host 1 .*the TPU worker of this host ended with code -9"
    assert re.search(cause, logs[0].read_text()), logs[0].read_text()


def test_training_and_evaluation_know_all_hosts_of_the_slice(folder: Path) -> None:
    hosts = start(folder, "train", *TRAIN, "--run-id", "trained", "--set", "train.steps=2")
    assert ended(folder, hosts) == [0, 0], (folder / "0.log").read_text()
    assert small_runs.summary(folder, "trained")["hosts"] == 2
    assert "2 host(s), 1 device(s)" in (folder / "0.log").read_text()
    [record] = (folder / "runs" / "trained" / "attempts").glob("attempt-0000.????????.json")
    assert len(json.loads(record.read_text())["hosts"]) == 2

    hosts = start(folder, "evaluate", str(folder / "runs" / "trained" / "model"), "-c", "config.yaml")
    assert ended(folder, hosts) == [0, 0], (folder / "0.log").read_text() + (folder / "1.log").read_text()
    assert "19 examples" in (folder / "0.log").read_text()
    assert "examples" not in (folder / "1.log").read_text()


def test_a_killed_host_is_a_lost_peer_and_no_worker_is_left(folder: Path) -> None:
    hosts = start(folder, "idle")
    wait_for_program(folder)
    workers = [children(host)[0] for host in hosts]
    hosts[0].kill()
    assert ended(folder, hosts) == [-9, 76]
    wait_until(lambda: not any(map(is_alive, workers)), 600)
