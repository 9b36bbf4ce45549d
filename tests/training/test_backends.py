"""Where a state is split, the folder of compiled programs, steps in one call of TensorFlow, and slow processors."""

import ctypes
import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.container import small_runs
from tests.training.checkpoint_writers import host_writer
from tests.training.numpy_backend import Runs
from tests.training.test_checkpoint_writer import Meeting, on_all
from training.backends import compile_cache
from training.backends.compile_cache import MAGIC, ProgramStore, open_cache
from training.backends.placement import bytes_on_device, mesh_shape, place, slices
from training.backends.tensorflow.calls import CALL_SECONDS, MOST_STEPS, StepCalls
from training.backends.torch_xla.processor import describe_slow_products
from training.checkpoint.format import assign_slices, read_manifest
from training.checkpoint.reader import load_tensors
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import StateSlices, TensorSpec, key_in_part, partition_error
from training.errors import StopRequested

shapes = st.lists(st.integers(1, 32), min_size=1, max_size=3).map(tuple)
HOSTS, DEVICES = 4, 16
SHAPES = {"model/a": (16, 6), "model/b": (3, 32), "model/bias": (16,), "model/odd": (5, 7)}
SPECS = {name: TensorSpec("F32", shape, 4 * math.prod(shape)) for name, shape in SHAPES.items()}
RANDOM = np.random.default_rng(0)
VALUES = {name: RANDOM.random(shape, np.float32) for name, shape in SHAPES.items()}


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


KEYS = [digit * 64 for digit in "0123456789"]
OVERHEAD = len(MAGIC) + 32  # bytes of an entry beside its program


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


def store(folder: Path, said: list[str], largest_bytes: int = 1000) -> ProgramStore:
    return ProgramStore(folder, said.append, largest_bytes)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_read_once_until_it_is_proved(folder: Path, said: list[str]) -> None:
    """And neither read nor replaced by others meanwhile, which say so; proved, it is as before."""
    first, second = store(folder, said), store(folder, said)
    first.write(KEYS[0], b"program")
    assert first.read(KEYS[0]) == b"program"
    second.write(KEYS[0], b"compiled again")
    assert second.read(KEYS[0]) is None
    (line,) = said
    assert str(folder / f"{KEYS[0]}.unproven") in line
    first.prove(KEYS[0])
    assert second.read(KEYS[0]) == b"program"


def test_an_entry_that_another_process_removes_meanwhile_leaves_no_mark(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = store(folder, said)
    programs.write(KEYS[0], b"program")
    monkeypatch.setattr(os, "utime", Mock(side_effect=FileNotFoundError))
    assert programs.read(KEYS[0]) is None
    assert not any(name.endswith(".unproven") for name in names(folder))


def test_the_entries_that_were_not_used_for_longest_are_removed_and_no_file_of_others(
    folder: Path, said: list[str]
) -> None:
    programs = store(folder, said, 3 * (100 + OVERHEAD))
    for number in range(3):
        programs.write(KEYS[number], bytes(100))
        age(folder / KEYS[number], 300 - 100 * number)
    (folder / "README").write_bytes(bytes(5000))
    assert programs.read(KEYS[0]) is not None, "a use, after which it is the youngest"
    programs.prove(KEYS[0])
    programs.write(KEYS[3], bytes(100))
    assert names(folder) == [KEYS[0], KEYS[2], KEYS[3], "README"]
    programs.write(KEYS[4], bytes(301 + 2 * OVERHEAD))
    assert names(folder) == [KEYS[0], KEYS[2], KEYS[3], "README"], "it is larger than the bound: nothing goes for it"


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign"])
def test_a_damaged_entry_is_as_good_as_none_and_is_removed(folder: Path, said: list[str], damage: str) -> None:
    programs = store(folder, said)
    programs.write(KEYS[0], b"program" * 20)
    *begin, last = content = (folder / KEYS[0]).read_bytes()
    damaged = {"cut": begin, "bit": [*begin, last ^ 1], "empty": b"", "foreign": b"another program's cache"}
    (folder / KEYS[0]).write_bytes(bytes(damaged[damage]))
    assert len(content) == 140 + OVERHEAD
    assert programs.read(KEYS[0]) is None
    assert (names(folder), said) == ([], [])


def test_what_a_killed_writer_left_is_removed_after_an_hour(folder: Path, said: list[str]) -> None:
    folder.mkdir()
    for name in (f".{KEYS[1]}.old", f".{KEYS[2]}.new"):
        (folder / name).write_bytes(b"half")
    age(folder / f".{KEYS[1]}.old", 4000)
    store(folder, said).write(KEYS[0], b"program")
    assert names(folder) == [f".{KEYS[2]}.new", KEYS[0]]


def test_a_folder_that_cannot_be_written_is_said_once(folder: Path, said: list[str]) -> None:
    folder.write_text("a file")
    programs = store(folder, said)
    for key in KEYS:
        programs.write(key, b"program")
        assert programs.read(key) is None
    (line,) = said
    assert str(folder) in line


def test_a_plugin_that_fails_the_cache_is_said_once_and_compiles(folder: Path, said: list[str]) -> None:
    compiled: list[int] = []
    fail = Mock(side_effect=compile_cache.PluginError("UNIMPLEMENTED:\nnot on this chip"))
    table: Any = SimpleNamespace(call=fail, function=lambda _place: compiled.append)
    cache = compile_cache.ProgramCache(table, store(folder, said), "test")
    arguments = (ctypes.c_uint64 * compile_cache.COMPILE_WORDS)()
    for _ in range(2):
        assert cache.compile(ctypes.addressof(arguments)) is None
    assert compiled == [ctypes.addressof(arguments)] * 2
    (line,) = said
    assert line.endswith("UNIMPLEMENTED: not on this chip")


def test_a_module_has_one_key_in_whatever_order_its_hints_are_written() -> None:
    x, y, other = (b"\n\x0f\n\x06grad_%s\x12\x05false" % name for name in (b"x", b"y", b"z"))
    assert compile_cache.sort_hints(b"a" + y + x + b"b" + other + x + y) == b"a" + x + y + b"b" + other + x + y
    assert compile_cache.sort_hints(y + other + x) == y + other + x


TPU = {"PJRT_DEVICE": "TPU", "TPU_LAUNCH_COMPILE_CACHE": "/nowhere/programs"}


@pytest.mark.parametrize(
    ("changes", "library", "reasons"),
    [
        ({"TPU_LAUNCH_COMPILE_CACHE": ""}, "/nowhere/libtpu.so", []),
        ({"PJRT_DEVICE": "CPU"}, "/nowhere/libtpu.so", []),
        ({}, None, ["does not say where"]),
        ({}, "/nowhere/libtpu.so", ["/nowhere/libtpu.so"]),
        ({}, "libc.so.6", ["GetPjrtApi"]),
        ({"TPU_LAUNCH_COMPILE_CACHE_GB": "inf"}, "libc.so.6", ["infinity"]),
    ],
)
def test_without_tpus_folder_or_table_there_is_no_cache(
    said: list[str], changes: Any, library: Any, reasons: Any
) -> None:
    assert open_cache({**TPU, **changes}, library, "test", said.append) is None
    assert [reason in line for reason, line in zip(reasons, said, strict=True)] == [True] * len(reasons)


def test_a_table_of_unknown_version_is_kept(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head = struct.pack("<4q", 520, 0, 24, 0) + struct.pack("<2i", 1, 0)  # version 1.0
    table = ctypes.create_string_buffer(head + bytes(60 * 8), 40 + 60 * 8)
    plugin = SimpleNamespace(GetPjrtApi=ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(table)))
    monkeypatch.setattr(compile_cache.ctypes, "CDLL", lambda _path: plugin)
    assert open_cache(TPU, "plugin.so", "test", said.append) is None
    assert said == ["compiled programs are not kept for the next start: plugin.so is of another version"]
    assert ctypes.string_at(ctypes.addressof(table) + 40, 60 * 8) == bytes(60 * 8)


CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_1 {}\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\n"
NARROW = "this processor has AVX2 and no AVX-512: "


def test_a_known_processor_without_wide_instructions_is_slow(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert describe_slow_products(path) is None, "not there"
    for cpuinfo, told in {
        CPUINFO.format("avx avx2 fma avx512f avx512bw avx512vl avx512dq"): "None",
        CPUINFO.format("avx avx2 fma avx512f"): NARROW,
        CPUINFO.format("avx avx2 fma"): NARROW,
        CPUINFO.format("avx"): "this processor has no AVX2: ",
        "processor\t: 0\nFeatures\t: fp asimd sve\n": "None",
    }.items():
        path.write_text(cpuinfo)
        assert str(describe_slow_products(path)).startswith(told), cpuinfo


class Program:
    """Steps of which each takes `seconds`; the result of a step is its seed and its scalar."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.time, self.calls = seconds, 0.0, list[int]()

    def run(self, iterator: Any, seeds: np.ndarray, scalars: np.ndarray, due: int) -> np.ndarray:
        assert iterator == "iterator"
        self.calls.append(due)
        self.time += due * self.seconds
        return np.stack([seeds[:due].astype(np.float32), scalars[:due, 0]], axis=1)


def train(calls: StepCalls, steps: int) -> None:
    """As the loop on a CPU does: results are read as soon as fewer steps need to be in flight."""
    in_flight: list[tuple[int, Any]] = []
    for number in range(steps):
        in_flight.append((number, calls.add("iterator", number, (number / 2,))))
        while len(in_flight) > calls.length - 1:
            expected, result = in_flight.pop(0)
            assert np.asarray(result).tolist() == [expected, expected / 2]


@pytest.mark.parametrize(("seconds", "longest"), [(1e-6, MOST_STEPS), (CALL_SECONDS / 10, 10), (2 * CALL_SECONDS, 1)])
def test_a_call_grows_until_it_takes_half_a_second(seconds: float, longest: int) -> None:
    program = Program(seconds)
    train(StepCalls(program.run, None, lambda: program.time), 300)
    assert program.calls[0] == 1
    assert max(program.calls) == longest
    assert all(later <= 2 * earlier for earlier, later in zip(program.calls, program.calls[1:], strict=False))


def test_the_first_call_is_of_one_step_and_later_ones_are_as_configured() -> None:
    program = Program(1.0)
    train(StepCalls(program.run, 4, lambda: program.time), 9)
    assert program.calls == [1, 4, 4]


def test_reading_a_result_starts_the_queued_steps() -> None:
    program = Program(1.0)
    calls = StepCalls(program.run, 8, lambda: program.time)
    first, *others = [calls.add("iterator", number, (0.0,)) for number in range(4)]
    assert program.calls == [1]
    assert [np.asarray(step)[0] for step in (first, *others)] == [0, 1, 2, 3]
    assert program.calls == [1, 3]


def test_a_host_without_others_stops_after_the_step_in_which_it_is_asked(tmp_path: Path) -> None:
    """Two steps are in flight: their results are not waited for by starting more."""
    with pytest.raises(StopRequested, match="stopped after step 5, "):
        Runs(tmp_path).train("stopped", 0, shutdown=small_runs.StopAfter(5))
