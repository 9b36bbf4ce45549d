"""Claims about TensorFlow's single program for several hosts, on CPUs: real workers, a real meeting of two hosts, and
the trainer's loop on host 0 with its model on host 1's worker.

TPUStrategy itself needs TPUs. Each test starts two hosts and their two workers.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.container import small_runs
from tests.processes import is_alive, wait_until

# `tpu-train` on one host. Its workers have no chips: TensorFlow is the wheel for CPUs here.
HOST = """
import os, sys
from training.backends.tensorflow import pod
from training.cli.main import main
from training.run_setup import prepare_framework

def on_worker_of_host_1():
    import tensorflow as tf
    workers = [address.removeprefix("grpc://") for address in os.environ["TPU_NAME"].split(",")]
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"tpu_worker": workers}))
    return tf.distribute.OneDeviceStrategy("/job:tpu_worker/replica:0/task:1/device:CPU:0")

pod.tensorflow_plugin = dict
if os.environ["TPU_WORKER_ID"] == "0":
    prepare_framework("tensorflow")
    from training.backends.tensorflow import replicas
    replicas._tpu_strategy = on_worker_of_host_1
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = small_runs.prepare(tmp_path_factory.mktemp("single"))
    (place / "config.yaml").write_text(yaml.safe_dump(small_runs.document(place, backend="tensorflow")))
    return place


def start(folder: Path, *command: str) -> list[small_runs.Host]:
    """Both hosts; they write to 0.log and 1.log."""
    ports, hosts = small_runs.free_ports(), []
    for worker, port in enumerate(small_runs.free_ports()):
        cluster = small_runs.cluster_environment("run", 0, worker, 2, ports)
        own = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_TASK_PORT": str(port)}
        told, out = {**os.environ, **cluster, **own}, folder / f"{worker}.log"
        with out.open("w") as log:
            arguments = [sys.executable, "-c", HOST, *command]
            process = subprocess.Popen(arguments, cwd=folder, env=told, stdout=log, stderr=log, text=True)
        hosts.append(small_runs.Host(process, out))
    return hosts


def train(folder: Path, run_id: str, steps: int) -> list[small_runs.Host]:
    settings = ("data.evaluation=null", f"train.steps={steps}", f"checkpoint.every_steps={steps}")
    changes = [part for setting in settings for part in ("--set", setting)]
    return start(folder, "train", "config.yaml", *changes, "--run-id", run_id)


def train_for_ever(folder: Path, run_id: str) -> list[small_runs.Host]:
    hosts = train(folder, run_id, 1_000_000)
    hosts[0].wait_for("step       3/")
    return hosts


def require_ends(hosts: list[small_runs.Host], *codes: int) -> tuple[str, str]:
    """Returns what both hosts wrote."""
    first, second = hosts
    found, texts = tuple(host.finish() for host in hosts), (first.text(), second.text())
    assert found == codes, "\n".join(texts)
    return texts


def worker_of(host: small_runs.Host) -> int:
    """The process of a host's worker, its child."""
    [worker] = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
    return int(worker)


def test_a_stop_request_on_one_host_ends_all_hosts_saved(folder: Path) -> None:
    hosts = train_for_ever(folder, "stopped")
    hosts[1].process.send_signal(signal.SIGTERM)
    require_ends(hosts, 75, 75)


@pytest.mark.nightly
def test_a_lost_worker_ends_the_run_and_is_named_as_the_cause(folder: Path) -> None:
    """Host 0 notices it as an operation that fails, often before host 1 notices it."""
    hosts = train_for_ever(folder, "worker-lost")
    os.kill(worker_of(hosts[1]), signal.SIGKILL)
    first, second = require_ends(hosts, 76, 1)
    assert "the TPU worker of this host ended with code -9" in second
    assert re.search("(LostPeer|lost peer): host 1 .*the TPU worker of this host ended with code -9", first), first


def test_training_and_evaluation_know_all_hosts_of_the_slice(folder: Path) -> None:
    first, _ = require_ends(train(folder, "trained", 2), 0, 0)
    assert small_runs.summary(folder, "trained")["hosts"] == 2
    assert "2 host(s), 1 device(s)" in first
    [record] = (folder / "runs" / "trained" / "attempts").glob("attempt-0000.????????.json")
    assert len(json.loads(record.read_text())["hosts"]) == 2

    model = str(folder / "runs" / "trained" / "model")
    first, second = require_ends(start(folder, "evaluate", model, "-c", "config.yaml"), 0, 0)
    assert "19 examples" in first
    assert "examples" not in second


def test_a_killed_host_is_a_lost_peer_and_no_worker_is_left(folder: Path) -> None:
    hosts = train_for_ever(folder, "host-lost")
    workers = list(map(worker_of, hosts))
    hosts[0].process.kill()
    require_ends(hosts, -9, 76)
    wait_until(lambda: not any(map(is_alive, workers)), 600)
