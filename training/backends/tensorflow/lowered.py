"""Lowers the TensorFlow backend's own step and evaluation for `tpu-train preflight`, without running them.

These are the programs that TPUStrategy runs on each device of a slice, with the device's own rows of the batch and with
the sums over all devices.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from training.accelerators import Accelerator
from training.backends.protocol import BuildBackend
from training.backends.tensorflow.backend import TensorFlow
from training.backends.tensorflow.replicas import Replicas
from training.batch import Arrays
from training.preflight.compiler import Program, hash_hlo


class SliceReplicas(Replicas):
    """One replica of a simulated slice of `devices` devices."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices

    def sum(self, values: Any) -> Any:
        """Sums over all devices of the slice by XLA's own operation."""
        devices = tf.constant([list(range(self.devices))])

        def all_reduce(value: Any) -> Any:
            return gen_xla_ops.xla_all_reduce(value, devices, "Add", "CrossReplica")

        return [all_reduce(value) for value in values] if isinstance(values, list) else all_reduce(values)


class LoweringBackend(TensorFlow):
    """The backend, with the programs that one of a slice's `devices` runs."""

    def __init__(self, devices: int, *arguments: Any) -> None:
        self._slice_devices = devices
        super().__init__(*arguments, replicas=SliceReplicas(devices))

    def lower(self, training: bool, batch: Arrays) -> tuple[str, str, Mapping[int, str]]:
        """Lowers the step (`training`) or the evaluation for a global batch. Returns StableHLO, HLO without source
        lines, and the names of the state's tensors among the arguments, by number."""
        rows = {
            name: tf.TensorSpec((array.shape[0] // self._slice_devices, *array.shape[1:]), array.dtype)
            for name, array in batch.items()
        }
        scalars = []
        if training:
            scalars = [tf.TensorSpec(scalar.shape, scalar.dtype) for scalar in self._step.scalars(0)]

        def program(*flat: Any) -> Any:
            by_name = dict(zip(rows, flat, strict=False))
            if training:
                return self._step.train_program(by_name, *flat[len(rows) :])
            return self._step.evaluation_program(by_name)

        function = tf.function(program, jit_compile=True, autograph=False)
        arguments = [*rows.values(), *scalars]
        text = function.experimental_get_compiler_ir(*arguments)
        captured = function.get_concrete_function(*arguments).captured_inputs
        names = {id(variable.handle): name for name, (_, variable) in self.state_variables().items()}
        state = {
            number: names[id(argument)]
            for number, argument in enumerate(captured, len(arguments))
            if id(argument) in names
        }
        return text(stage="stablehlo"), text(stage="hlo_no_metadata"), state


class TensorFlowTracer:
    """Traces one program, which each device of a slice runs on its own rows. See `ProgramTracer`."""

    def __init__(self, open_backend: BuildBackend, slice_: Accelerator) -> None:
        self._open_backend, self._devices = open_backend, slice_.devices
        self._backend: LoweringBackend | None = None

    def open(self) -> dict[str, int]:
        if self._backend is None:
            self._backend = self._open_backend(partial(LoweringBackend, self._devices))
        return {name: spec.size for name, spec in self._backend.tensor_specs().items()}

    def trace(self, kind: str, batch: Arrays) -> Program:
        assert self._backend is not None
        text, hlo, state = self._backend.lower(kind == "training", batch)
        donated = frozenset(state) if kind == "training" else frozenset()
        return Program(text, donated, state, hash_hlo(hlo), replicated=True)

    def close(self) -> None:
        """Releases the model and its memory."""
        self._backend = None
