"""Translates TensorFlow's errors to the trainer's.

Operations run asynchronously, so an error surfaces in the next call that waits: for a step, a batch, a copy of the
state.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from training.errors import LostPeer, OutOfMemory, UnusableTpu

# gRPC's messages for a lost worker; TensorFlow passes them on under various codes.
_NO_CONNECTION = re.compile(r"socket closed|connection (reset|refused)|failed to connect|broken pipe", re.IGNORECASE)
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


@contextmanager
def translate_failures() -> Iterator[None]:
    """Translates errors of a block that waits for operations: to OutOfMemory if a device or a host is out of memory, to
    LostPeer if the worker of a host of this slice is gone. Other errors pass unchanged."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemory(error.message) from None
    except tf.errors.OpError as error:
        if not _is_lost_worker(error):
            raise
        raise LostPeer(f"a worker of this slice is gone: {error.message.splitlines()[0][:300]}") from None


@contextmanager
def translate_tpu_failures() -> Iterator[None]:
    """Translates errors of a block that initialises the TPU to UnusableTpu, except that of a lost worker."""
    try:
        yield
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        if isinstance(error, tf.errors.OpError) and _is_lost_worker(error):
            raise
        raise describe_tpu_failure(str(error)) from None


def describe_tpu_failure(message: str) -> UnusableTpu:
    """Returns the error for TensorFlow's message about a TPU that it could not initialise: its reason is the first of
    several errors, and it names the host if the message names a worker."""
    worker = re.search(r"remote target /job:\w+/replica:\d+/task:(\d+)", message)
    first = re.search(r"^ *\(0\) (.*)$", message, re.MULTILINE)
    lines = [line.strip() for line in message.splitlines()]
    reason = first[1] if first else "\n".join(line for line in lines if line and not line.startswith("[["))
    host = f"host {worker[1]}" if worker else "a host of this slice" if _has_workers() else "this host"
    return UnusableTpu(re.sub(r"\{\{.*?\}\} *", "", reason), os.environ.get("TPU_ACCELERATOR_TYPE"), host)


def _is_lost_worker(error: tf.errors.OpError) -> bool:
    """Returns whether this process drives workers and, by its type or message, the error is that of a lost one."""
    return _has_workers() and (isinstance(error, _LOST) or _NO_CONNECTION.search(error.message or "") is not None)


def _has_workers() -> bool:
    """Returns whether TPU_NAME lists gRPC workers, rather than this host's own chips."""
    return os.environ.get("TPU_NAME", "local") != "local"
