"""Claims about the devices of a strategy: what leaves the program's process, and who asks for a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.container import small_runs
from tests.container.golden_losses import labelled_document, mlm_document
from tests.processes import run_python
from training.backends.tensorflow.input import Distributed, Upcoming, distributed, distributed_evaluation
from training.config import from_document
from training.run_setup import open_task
from training.tasks.task import open_data
from training.yaml_file import Document

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


def array_types(document: dict[str, Any]) -> set[type]:
    config = from_document(Document("test", document, {}))
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    batch = next(distributed(strategy, config, open_data(config), 0))
    return {type(array) for array in batch.arrays.values()}


def test_batches_are_upcoming_if_all_have_one_shape(tmp_path: Path) -> None:
    assert array_types(mlm_document(tmp_path / "mlm", "tensorflow")) == {Upcoming}
    assert array_types(labelled_document(tmp_path / "labelled", "tensorflow")) == {Distributed}


def test_hosts_of_a_strategy_read_the_evaluation_set_once(tmp_path: Path) -> None:
    """Batches of 37 rows in several lengths: the last of each length is filled up."""
    config = from_document(Document("test", labelled_document(tmp_path, "tensorflow"), {}))
    task = open_task(config, small_runs.this_host())
    batches = list(task.evaluation_batches())
    assert task.evaluation_batch_count == len(batches) > 1
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    for batch, of_hosts in zip(batches, distributed_evaluation(strategy, config, task), strict=True):
        for name, array in batch.arrays.items():
            assert np.array_equal(array, of_hosts.arrays[name].value.numpy()), name
