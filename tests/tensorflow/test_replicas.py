"""Claims about the devices of a strategy: what leaves the program's process, and who asks for a batch."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.container import small_runs
from tests.processes import run_python

# Four logical devices of one CPU, which are one host. An array is read as often as it leaves this process.
ASSIGN = """
import numpy as np, tensorflow as tf
from training.backends.tensorflow.replicas import Replicas

class Counted:
    reads = 0
    def __array__(self, dtype=None, copy=None):
        Counted.reads += 1
        return np.array([1.5, -0.0, 1e-42, np.nan], np.float32)

replicas = Replicas()
with replicas.strategy.scope():
    variable = tf.Variable(tf.zeros(4))
replicas.assign([(variable, Counted())])
for own in replicas.strategy.experimental_local_results(variable):
    assert own.numpy().tobytes() == np.asarray(Counted()).tobytes(), own
print(Counted.reads - replicas.count, replicas.count)
"""


def test_assign_sends_an_array_once_to_a_host_and_all_devices_get_it() -> None:
    assert run_python("-c", ASSIGN, CPU_NUM_DEVICES="4").split() == ["1", "4"]


# Two workers, each a process: either takes two rows of a batch from its queue.
WORKER = """
import os, sys, tensorflow as tf
kept = tf.distribute.Server({"w": sys.argv[2].split(",")}, job_name="w", task_index=int(sys.argv[1]), protocol="grpc")
print("serving", flush=True)
sys.stdin.read()
os._exit(0)
"""
QUEUES = """
import os, sys
import numpy as np, tensorflow as tf
from training.backends.tensorflow.input import RowQueues
from training.batch import HostBatch

class Pair:
    num_replicas_in_sync = 2

    def distribute_datasets_from_function(self, host_dataset):
        context = tf.distribute.InputContext(num_input_pipelines=2)
        self.datasets = []
        for device in devices:
            with tf.device(device):
                self.datasets.append(host_dataset(context))
        return []

tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"w": sys.argv[1].split(",")}))
devices = [f"/job:w/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]
pair = Pair()
batches = [HostBatch({"ids": np.arange(8).reshape(4, 2) + number}, np.arange(4)) for number in range(3)]
queues = RowQueues(pair, batches[0].arrays)
for batch in batches:
    assert queues.send(batch).arrays["ids"].shape == (4, 2)
for device, dataset in zip(devices, pair.datasets):
    with tf.device(device):
        rows = iter(dataset)
        for _ in batches:
            found = next(rows)["ids"]
            assert found.device == device, found.device
            print(found.numpy().tolist())
queues.close()
sys.stdout.flush()
os._exit(0)
"""


def test_a_queue_on_each_worker_has_its_rows_in_order() -> None:
    addresses = ",".join(f"localhost:{port}" for port in small_runs.free_ports())
    commands = [[sys.executable, "-c", WORKER, str(task), addresses] for task in (0, 1)]
    with contextlib.ExitStack() as stack:
        for command in commands:
            worker = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(worker.kill)
            assert worker.stdout.readline() == b"serving\n"
        printed = run_python("-c", QUEUES, addresses).splitlines()
    of_hosts = [[[[low + n, low + 1 + n], [low + 2 + n, low + 3 + n]] for n in range(3)] for low in (0, 4)]
    assert [json.loads(line) for line in printed] == [*of_hosts[0], *of_hosts[1]]


# Two devices: the types of a training batch's arrays, and the numbers of its records and of replaced ones.
BATCHES = """
import json, sys
from pathlib import Path
from tests.container import golden_losses, small_runs
from training.config import from_document
from training.distributed.rendezvous import SingleHost
from training.run_setup import open_backend, open_task
from training.yaml_file import Document

document = golden_losses.prepare(sys.argv[1], Path(sys.argv[2]), "tensorflow")
config = from_document(Document("test", document, {}))
task = open_task(config, small_runs.this_host())
batches = open_backend(config, small_runs.this_host(), SingleHost(), task).batches(task, 3)
found = [next(batches) for _ in range(4)]
batches.close()
task = open_task(config, small_runs.this_host())
plain = task.batches(3)
for batch in found:
    assert batch.records.tolist() == next(plain).records.tolist()
print(json.dumps(sorted({type(array).__name__ for array in found[0].arrays.values()})))
"""


@pytest.mark.parametrize(("task", "types"), [("mlm", "Upcoming"), ("classification", "ndarray")])
def test_batches_are_upcoming_if_all_have_one_shape(tmp_path: Path, task: str, types: str) -> None:
    printed = run_python("-c", BATCHES, task, str(tmp_path), CPU_NUM_DEVICES="2").splitlines()
    assert json.loads(printed[-1]) == [types]
