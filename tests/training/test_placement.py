"""A split state: slices hold every element once, hosts write what their devices hold, and any mesh restores whole."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.checkpoint_writers import host_writer
from tests.training.test_checkpoint_writer import Meeting, on_all
from training.backends.placement import bytes_on_device, mesh_shape, place, slices
from training.checkpoint.format import assign_slices, read_manifest
from training.checkpoint.reader import load_tensors
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import StateSlices, TensorSpec, key_in_part, partition_error

shapes = st.lists(st.integers(1, 32), min_size=1, max_size=3).map(tuple)
HOSTS, DEVICES = 4, 16
SHAPES = {"model/a": (16, 6), "model/b": (3, 32), "model/bias": (16,), "model/odd": (5, 7)}
SPECS = {name: TensorSpec("F32", shape, 4 * math.prod(shape)) for name, shape in SHAPES.items()}
VALUES = {
    name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + number
    for number, (name, shape) in enumerate(SHAPES.items())
}


def split_over(fsdp: int) -> StateSlices:
    mesh = mesh_shape(DEVICES, fsdp)
    return {name: held for name, shape in SHAPES.items() if (held := slices(name, shape, mesh, HOSTS))}


def test_a_matrix_is_split_along_its_longest_axis_that_divides_and_nothing_else_is() -> None:
    mesh = mesh_shape(16, 8)
    assert place("model/w", (16, 24), mesh) == (None, "fsdp")
    assert place("model/w", (30, 16), mesh) == (None, "fsdp"), "8 does not divide 30"
    assert place("model/w", (16, 16), mesh) == ("fsdp", None)
    assert place("model/bias", (64,), mesh) == (None,)
    assert place("model/vectors of 64", (8, 64), mesh) == (None, None), "a packed buffer"
    assert place("model/w", (16, 24), mesh_shape(16, 1)) == (None, None)
    assert bytes_on_device("model/w", (16, 24), mesh) == 4 * 16 * 24 // 8


@given(shapes, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_slices_hold_every_element_once_and_a_host_one_a_device(shape: tuple[int, ...], fsdp: int, hosts: int) -> None:
    held = slices("model/w", shape, mesh_shape(16, fsdp), hosts)
    if not held:
        return
    assert partition_error(shape, [each.box for each in held]) is None
    for host in range(hosts):
        assert sum(host in each.hosts for each in held) == min(fsdp, 16 // hosts)


@pytest.mark.parametrize("fsdp", [1, 2, 8, 16])
def test_each_host_writes_slices_that_it_holds_and_any_reader_gets_whole_tensors(tmp_path: Path, fsdp: int) -> None:
    split, meeting = split_over(fsdp), Meeting(HOSTS)

    def work(worker: int) -> None:
        held = {
            key_in_part(name, each.box, SHAPES[name]): VALUES[name][tuple(map(slice, each.box.offsets, each.box.ends))]
            for name, boxes in split.items()
            for each in boxes
            if worker in each.hosts
        } | {name: value for name, value in VALUES.items() if name not in split}

        def copy(buffers: Mapping[str, memoryview]) -> Snapshot:
            views = {key: np.frombuffer(view, np.float32).reshape(held[key].shape) for key, view in buffers.items()}
            return Snapshot((view, held[key]) for key, view in views.items())

        writer = host_writer(tmp_path, worker, HOSTS, meeting.of(worker))
        writer.prepare(SPECS, split)
        writer.save(10, SPECS, copy, {}, split)
        writer.wait()

    assert on_all(HOSTS, work) == [None] * HOSTS
    loaded: dict[str, Any] = {}
    manifest = read_manifest(str(tmp_path), 10)
    load_tensors(str(tmp_path), manifest, lambda tensors: loaded.update({n: bytes(d) for n, (_, d) in tensors.items()}))
    assert loaded == {name: value.tobytes() for name, value in VALUES.items()}


def test_hosts_share_the_bytes_of_slices_that_several_hold() -> None:
    matrices = {name: SPECS[name] for name in ("model/a", "model/b")}
    tensors = assign_slices(matrices, split_over(4), HOSTS)  # each host holds all four slices of a matrix
    assert [sorted(stored.part for stored in tensors[name].slices) for name in matrices] == [[0, 1, 2, 3]] * 2
