"""Lowers the TensorFlow backend's own step and evaluation for `tpu-train preflight`, without running them.

These are the programs that TPUStrategy runs on each device of a slice, with the device's own rows of the batch and with
the sums over all devices.
"""

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


class TensorFlowTracer:
    """Traces one program, which each device of a slice runs on its own rows. See `ProgramTracer`."""

    def __init__(self, open_backend: BuildBackend, slice_: Accelerator) -> None:
        self._open_backend, self._devices = open_backend, slice_.devices
        self._backend: TensorFlow | None = None

    def open(self) -> dict[str, int]:
        """Builds the backend unless it is built. Returns the bytes of each tensor of the state by name."""

        def build(*arguments: Any) -> TensorFlow:
            return TensorFlow(*arguments, replicas=SliceReplicas(self._devices))

        backend = self._backend = self._backend or self._open_backend(build)
        return {name: spec.size for name, spec in backend.tensor_specs().items()}

    def trace(self, kind: str, batch: Arrays) -> Program:
        """Lowers the step (`kind` is "training") or the evaluation of one device, which has its part of the global
        `batch`. Call `open` before."""
        backend, trains = self._backend, kind == "training"
        assert backend is not None
        rows = {
            name: tf.TensorSpec((array.shape[0] // self._devices, *array.shape[1:]), array.dtype)
            for name, array in batch.items()
        }
        scalars = backend.step_programs.scalars(0) if trains else ()

        def program(*flat: Any) -> Any:
            by_name = dict(zip(rows, flat, strict=False))
            if trains:
                return backend.step_programs.train_program(by_name, *flat[len(rows) :])
            return backend.step_programs.evaluation_program(by_name)

        function = tf.function(program, jit_compile=True, autograph=False)
        arguments = [*rows.values(), *(tf.TensorSpec(scalar.shape, scalar.dtype) for scalar in scalars)]
        text = function.experimental_get_compiler_ir(*arguments)
        captured = function.get_concrete_function(*arguments).captured_inputs
        names = {id(variable.handle): name for name, (_, variable) in backend.state_variables().items()}
        state = {
            number: names[id(argument)]
            for number, argument in enumerate(captured, len(arguments))
            if id(argument) in names
        }
        donated = frozenset(state if trains else ())
        return Program(
            text(stage="stablehlo"), donated, state, hash_hlo(text(stage="hlo_no_metadata")), replicated=True
        )

    def close(self) -> None:
        """Releases the model and its memory."""
        self._backend = None
