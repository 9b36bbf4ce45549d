"""What a run does after its last step."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.training.numpy_backend import Runs
from tests.training.test_start import Pair
from training import run_end
from training.checkpoint import writer
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import NOT_SPLIT, HeldSlice, Slice, StateSlices, TensorSpec, key_in_part
from training.distributed.cluster import Cluster
from training.errors import TrainError
from training.run_end import compare_weights, weights_crc32c

MIB = 1 << 20


class CountingState:
    """A backend's state that lists the calls which copied it."""

    def __init__(self, sizes: Mapping[str, int], split: StateSlices = NOT_SPLIT) -> None:
        self.split = split
        values = np.random.default_rng(0).bytes(max(sizes.values()))
        self.tensors = {name: np.frombuffer(values[:size], np.uint8) for name, size in sizes.items()}
        self.calls: list[list[str]] = []

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec("U8", value.shape, value.size) for name, value in self.tensors.items()}

    def state_slices(self) -> StateSlices:
        return self.split

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        self.calls.append(list(buffers))
        held = dict(self.tensors)
        for name, slices in self.split.items():
            for box in (each.box for each in slices):
                tensor = self.tensors[name]
                held[key_in_part(name, box, tensor.shape)] = tensor[box.offsets[0] : box.ends[0]]
        return Snapshot((np.frombuffer(buffer, np.uint8), held[key]) for key, buffer in buffers.items())


def test_weights_are_copied_in_few_calls_for_their_checksum() -> None:
    small = {f"model/{number:02}": 7 + number for number in range(90)}
    state: Any = CountingState({"model/b": 70 * MIB, "model/a": 40 * MIB, **small, "adam_m/a": 40 * MIB})
    weights = b"".join(state.tensors[name].tobytes() for name in (*sorted(small), "model/a", "model/b"))
    assert weights_crc32c(state, 0) == {"": f"{google_crc32c.value(weights):08x}"}, "in the order of their names"
    assert state.calls == [[*sorted(small), "model/a"], ["model/b"]], "64 MiB, or one tensor"


def test_hosts_that_end_with_different_weights_fail() -> None:
    state: Any = CountingState({"model/w": 8})
    same = weights_crc32c(state, 0)[""]
    run: Any = SimpleNamespace(rendezvous=Pair([{"": same}, 3]), cluster=Cluster(0, ("a", "b")))
    assert compare_weights(run, state, 2, 1.0) == (same, 5)
    run.rendezvous = Pair([{"": "00000000"}, 3])
    with pytest.raises(TrainError, match=f"different weights .crc32c by host: {same}, 00000000"):
        compare_weights(run, state, 2, 1.0)


def test_hosts_that_hold_other_slices_compare_what_both_hold() -> None:
    halves = [HeldSlice(Slice((4 * host,), (4,)), (host,)) for host in (0, 1)]
    state: Any = CountingState({"model/both": 8, "model/w": 8}, {"model/w": halves})
    first, second = (weights_crc32c(state, worker) for worker in (0, 1))
    assert (sorted(first), sorted(second)) == (["model/both", "model/w[0:4]"], ["model/both", "model/w[4:8]"])
    run: Any = SimpleNamespace(rendezvous=Pair([second, 3]), cluster=Cluster(0, ("a", "b")))
    checksum, _ = compare_weights(run, state, 2, 1.0)
    run.rendezvous = Pair([{**second, "model/w[4:8]": "00000000"}, 3])
    assert compare_weights(run, state, 2, 1.0)[0] != checksum, "the checksum depends on every slice"
    run.rendezvous = Pair([{**second, "model/both": "00000000"}, 3])
    with pytest.raises(TrainError, match="different weights"):
        compare_weights(run, state, 2, 1.0)


def test_a_run_frees_its_snapshots_before_it_copies_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[Any]] = []

    class Buffer(writer._PartBuffer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            buffers.append(weakref.ref(self))

    def compare(*arguments: Any) -> tuple[str, int]:
        assert [buffer() for buffer in buffers] == [None]
        return compare_weights(*arguments)

    monkeypatch.setattr(writer, "_PartBuffer", Buffer)
    monkeypatch.setattr(run_end, "compare_weights", compare)
    assert Runs(tmp_path).train("r", 0)["committed_step"] == 40
