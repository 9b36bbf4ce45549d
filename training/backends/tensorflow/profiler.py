"""TensorFlow's profiler, behind the protocol of `training.profiler.Tracer`."""

import contextlib
from typing import Any

import tensorflow as tf


class TensorFlowProfiler:
    def start(self, folder: str) -> None:
        tf.profiler.experimental.start(folder)

    def stop(self) -> None:
        tf.profiler.experimental.stop()

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.profiler.experimental.Trace(name, **facts)
        return scope
