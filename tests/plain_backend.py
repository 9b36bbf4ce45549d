"""The parts of a `training.backends.protocol.Backend` that need no device: its state is a few arrays of numpy."""

from collections.abc import Mapping

import numpy as np

from training.backends.protocol import Backend
from training.checkpoint.tensors import TensorSpec


class PlainBackend(Backend):
    devices = 1
    opening_seconds: Mapping[str, float] = {}
    state: dict[str, np.ndarray]

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        for name, (_, data) in tensors.items():
            self.state[name] = np.frombuffer(bytes(data), self.state[name].dtype).copy()

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def close(self) -> None:
        """Nothing is open."""
