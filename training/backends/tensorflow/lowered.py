"""The TensorFlow backend's step and evaluation as text for the TPU compiler: what TPUStrategy runs on each device of a
slice, with its own rows of the batch and with the sums over all devices. Lowered, never run, so the slice need not
exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from training.backends.protocol import Arrays
from training.backends.tensorflow.backend import TensorFlow


class Lowered(TensorFlow):
    """One of so many replicas."""

    slice_devices = 1

    def lower(self, training: bool, batch: Arrays) -> tuple[str, str, Mapping[int, str]]:
        """StableHLO, HLO without places in source code, and for each argument that is a tensor of the state its name.
        `batch` is the global one."""
        rows = {
            name: tf.TensorSpec((array.shape[0] // self.slice_devices, *array.shape[1:]), array.dtype)
            for name, array in batch.items()
        }
        further = [tf.TensorSpec((), tf.int32), tf.TensorSpec((3,), tf.float32)] if training else []

        def program(*flat: Any) -> Any:
            of_names = dict(zip(rows, flat, strict=False))
            return self._train_program(of_names, *flat[len(rows) :]) if training else self._evaluate_program(of_names)

        function = tf.function(program, jit_compile=True, autograph=False)
        arguments = [*rows.values(), *further]
        text = function.experimental_get_compiler_ir(*arguments)
        captured = function.get_concrete_function(*arguments).captured_inputs
        names = {id(variable.handle): name for name, (_, variable) in self._state().items()}
        state = {number: names[id(each)] for number, each in enumerate(captured, len(arguments)) if id(each) in names}
        return text(stage="stablehlo"), text(stage="hlo_no_metadata"), state

    def _over_replicas(self, values: Any) -> Any:
        devices = tf.constant([list(range(self.slice_devices))])

        def one(value: Any) -> Any:
            return gen_xla_ops.xla_all_reduce(value, devices, "Add", "CrossReplica")

        return [one(value) for value in values] if isinstance(values, list) else one(values)
