"""Claims about TensorFlow's errors: what they mean to the trainer, wherever they surface."""

from pathlib import Path

import pytest
import tensorflow as tf

from tests.container import small_runs
from training.backends.tensorflow import input as tensorflow_input
from training.backends.tensorflow.replicas import describe_tpu_failure, translate_failures, translate_tpu_failures
from training.config import from_document
from training.data.tf.record_source import translate_errors
from training.errors import LostPeer, OutOfMemory, UnusableTpu
from training.tasks.task import open_data
from training.yaml_file import Document

LOST = [
    tf.errors.UnavailableError(None, None, "Socket closed"),
    tf.errors.AbortedError(None, None, "Session was aborted"),
    tf.errors.CancelledError(None, None, "RPC cancelled"),
    tf.errors.UnknownError(None, None, "Connection reset by peer"),
    tf.errors.InternalError(None, None, "failed to connect to all addresses"),
]


@pytest.mark.parametrize("error", LOST)
def test_lost_connections_are_lost_peers_of_workers(error: tf.errors.OpError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)), translate_failures():
        raise error
    monkeypatch.setenv("TPU_NAME", "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470")
    with pytest.raises(LostPeer, match=error.message), translate_failures():
        raise error
    with pytest.raises(LostPeer, match=error.message), translate_failures(), translate_tpu_failures():
        raise error


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), translate_failures():
        raise tf.errors.InvalidArgumentError(None, None, "shapes differ")


def test_out_of_memory_surfaces_while_waiting_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = small_runs.document(small_runs.prepare(tmp_path), backend="tensorflow")
    config = from_document(Document("test", document, {}))
    rows = tensorflow_input.host_rows

    def too_large(*arguments: object) -> object:
        def enlarge(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            count = tf.cast(batch["input_ids"][0, 0], tf.int64) * 0 + (1 << 45)  # more than a process can address
            return {**batch, "input_ids": batch["input_ids"] + tf.reduce_sum(tf.fill([count], 0))}

        return rows(*arguments).map(enlarge)

    monkeypatch.setattr(tensorflow_input, "host_rows", too_large)
    batches = tensorflow_input.distributed(tf.distribute.get_strategy(), config, open_data(config), 0)
    batch = next(batches).arrays
    # As the step of a backend does, which takes the rows itself.
    with (
        pytest.raises(OutOfMemory, match="out of memory: lower"),
        translate_failures(),
        translate_errors(tensorflow_input.dataset_of(batch)),
    ):
        tf.function(lambda: next(batch["input_ids"].iterator), autograph=False)()  # type: ignore[attr-defined]


def test_a_tpu_that_cannot_be_initialised_is_one_line() -> None:
    error = tf.errors.NotFoundError(None, None, "first line\nNo device found\n\t [[{{node tpu}}]] [Op:init]")
    with pytest.raises(UnusableTpu) as raised, translate_tpu_failures():
        raise error
    message = str(raised.value)
    assert message.startswith("the TPU of this host could not be initialised: No device found; check that")
    assert len(message.splitlines()) == 1


def test_the_first_error_of_a_slice_is_reported_with_its_host() -> None:
    message = """2 root error(s) found.
  (0) UNKNOWN: {{function_node __inference__tpu_init_fn_4}} TPU initialization failed: No device found.
\t [[{{node configure_tpu_host/_8}}]]
Additional GRPC error information from remote target /job:worker/replica:0/task:3 while calling RunComponentFunction:
  (1) UNKNOWN: another
0 successful operations.
2 derived errors ignored."""
    assert str(describe_tpu_failure(message)).startswith(
        "the TPU of host 3 could not be initialised: UNKNOWN: TPU initialization failed: No device found; check that"
    )
