"""The state of a run in TensorFlow: names, loads and copies parameters and the optimizer's variables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training.backends.tensorflow.model import Assign, Parameter
from training.checkpoint.safetensors_file import Damaged, TensorSpec
from training.checkpoint.snapshot import Snapshot


class TensorFlowState:
    """Variables under PyTorch's names and in PyTorch's shapes. `optimizer` is one of training.registry.OPTIMIZERS, over
    the same parameters."""

    def __init__(self, parameters: Sequence[Parameter], optimizer: Any, assign: Assign) -> None:
        self.parameters, self.optimizer, self._assign = parameters, optimizer, assign

    def variables(self) -> dict[str, tuple[Parameter, Any]]:
        """Returns each variable by its name in a checkpoint, with the parameter that it is or belongs to."""
        groups = {"model": [parameter.variable for parameter in self.parameters], **self.optimizer.state()}
        return {
            f"{group}/{parameter.name}": (parameter, variable)
            for group, variables in groups.items()
            for parameter, variable in zip(self.parameters, variables, strict=True)
        }

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec("F32", parameter.shape, 4 * int(np.prod(parameter.shape)))
            for name, (parameter, _) in self.variables().items()
        }

    def snapshot(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Copies variables, given by their names, to host memory. The returned copy is complete."""
        variables = self.variables()
        for name, buffer in buffers.items():
            parameter, variable = variables[name]
            np.frombuffer(buffer, dtype=np.float32)[:] = parameter.read(variable).reshape(-1)
        return Snapshot()

    def load(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Sets the named variables, no others, to copies. Raises Damaged for an unknown name, another type or shape."""
        variables, specs = self.variables(), self.tensor_specs()
        for name, (spec, _) in tensors.items():
            if specs.get(name) != spec:
                raise Damaged(f"tensor {name} is {spec.dtype} {list(spec.shape)}, which has no place in this model")

        def value_of(name: str) -> tuple[Any, np.ndarray]:
            parameter, variable = variables[name]
            spec, data = tensors[name]
            # Copy, because a variable may keep the memory of the array.
            return variable, parameter.array_of(np.frombuffer(data, np.float32).reshape(spec.shape).copy())

        self._assign(map(value_of, tensors))
