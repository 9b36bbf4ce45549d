"""The parts of a `training.backends.protocol.Backend` that need no device: its state is a few arrays of numpy."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from training.batch import HostBatch
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.slices import NOT_SPLIT, StateSlices, load_whole


class PlainBackend:
    devices = 1
    opening_seconds: Mapping[str, float] = {}
    state: dict[str, np.ndarray]
    slice_to_load = staticmethod(load_whole)

    def evaluation_batches(self, task: Any) -> Iterator[HostBatch]:
        batches: Iterator[HostBatch] = task.evaluation_batches()
        return batches

    def state_slices(self) -> StateSlices:
        return NOT_SPLIT

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        for name, (_, data) in tensors.items():
            self.state[name] = np.frombuffer(bytes(data), self.state[name].dtype).copy()

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def counters(self) -> dict[str, int]:
        return {}

    def device_memory(self) -> tuple[int, int]:
        return 0, 0

    def fallbacks(self) -> list[str]:
        return []

    def preflight(self) -> str | None:
        return None

    def close(self) -> None:
        """Nothing is open."""
