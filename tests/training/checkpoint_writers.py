"""A state of a few tensors, and the checkpoint writer of a run with one host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from training.checkpoint.config import CheckpointSection
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import TensorSpec
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous, SingleHost

IDENTITY = {"seed": 1, "model.layers": 2}


class State:
    """Tensors whose values tell the step."""

    def __init__(self, step: int = 0) -> None:
        self.values = {f"model/{index}": np.full((index + 1, 3), step + index, np.float32) for index in range(6)}

    def layout(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec("F32", value.shape, value.nbytes) for name, value in self.values.items()}

    def copy(self, places: Mapping[str, memoryview]) -> Snapshot:
        values = ((place, self.values[name].reshape(-1)) for name, place in places.items())
        return Snapshot((np.frombuffer(place, np.float32), value) for place, value in values)

    def accept(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        for name, (info, data) in tensors.items():
            self.values[name] = np.frombuffer(bytes(data), np.float32).reshape(info.shape)

    def is_of(self, step: int) -> bool:
        pairs = zip(self.values.values(), State(step).values.values(), strict=True)
        return all(np.array_equal(value, other) for value, other in pairs)


def host_writer(
    folder: Path | str,
    worker: int = 0,
    hosts: int = 1,
    rendezvous: Rendezvous | None = None,
    *,
    keep_last: int = 2,
    token: str = "t",
    identity: Mapping[str, Any] = IDENTITY,
    **options: Any,
) -> CheckpointWriter:
    """Returns the writer of a run's host, by default the only one. `options`: further arguments of CheckpointWriter"""
    cluster, settings = Cluster(worker, ("h",) * hosts, run_id="r"), CheckpointSection(keep_last=keep_last)
    description = RunDescription(identity, {}, "c", token)
    return CheckpointWriter(str(folder), cluster, rendezvous or SingleHost(), description, settings, **options)


def save_step(
    writer: CheckpointWriter, step: int, state: State | None = None, run_state: Mapping[str, Any] | None = None
) -> None:
    """Saves a state, by default `State(step)`, and waits for the commit."""
    state = state or State(step)
    writer.save(step, state.layout(), state.copy, run_state or {})
    writer.wait()
