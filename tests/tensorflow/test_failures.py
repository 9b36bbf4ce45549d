"""Claims about TensorFlow's errors: what they mean to the trainer, wherever they surface."""

import pytest
import tensorflow as tf

from training.backends.tensorflow.replicas import describe_tpu_failure, translate_failures, translate_tpu_failures
from training.errors import LostPeer, UnusableTpu

LOST = [
    tf.errors.UnavailableError(None, None, "Socket closed"),
    tf.errors.AbortedError(None, None, "Session was aborted"),
    tf.errors.CancelledError(None, None, "RPC cancelled"),
    tf.errors.CancelledError(None, None, ""),
    tf.errors.UnknownError(None, None, "Connection reset by peer"),
    tf.errors.InternalError(None, None, "failed to connect to all addresses"),
]


@pytest.mark.parametrize("error", LOST)
def test_lost_connections_are_lost_peers_of_workers(error: tf.errors.OpError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)), translate_failures():
        raise error
    monkeypatch.setenv("TPU_NAME", "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470")
    with pytest.raises(LostPeer, match=error.message or "is gone"), translate_failures():
        raise error
    with pytest.raises(LostPeer, match=error.message or "is gone"), translate_failures(), translate_tpu_failures():
        raise error


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), translate_failures():
        raise tf.errors.InvalidArgumentError(None, None, "shapes differ")


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
