"""Manifests and tensors come back as written, however they were cut into slices, or are named as damaged."""

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.mutations import flip
from training import storage
from training.checkpoint import format as form
from training.checkpoint.config import CheckpointSection, are_minutes_over, is_step_due
from training.checkpoint.format import Manifest, Part, StoredSlice, StoredTensor, dump_manifest, load_manifest
from training.checkpoint.reader import Choose, load_tensors
from training.checkpoint.tensors import Damaged, Slice, TensorSpec, decode, encode, partition_error, whole

HALVES = (StoredSlice(0, Slice((0, 0), (3, 2))), StoredSlice(0, Slice((3, 0), (1, 2))))
WEIGHTS = StoredTensor(TensorSpec("F32", (4, 2), 32), HALVES)
PARTS = (Part("part-0-of-1.ab.safetensors", 100, 7),)
MANIFEST = Manifest(40, PARTS, {"seed": 1}, {"first_loss": 5.5}, config={}, code="c", tensors={"w": WEIGHTS})

tensors = st.dictionaries(
    st.text("abcdefgh/.", min_size=1),
    st.lists(st.integers(0, 50), max_size=3).map(lambda s: TensorSpec("F32", tuple(s), 4 * int(np.prod(s)))),
    max_size=20,
)


@given(st.data())
def test_any_changed_byte_of_a_manifest_is_noticed(data: st.DataObject) -> None:
    text = bytearray(form.dump_manifest(MANIFEST))
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        loaded = form.load_manifest(bytes(text))
    except Damaged:
        return
    assert loaded == MANIFEST  # white space between values means nothing


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"crc32c": 1, "format": 3}'])
def test_what_is_no_manifest_is_damaged(text: bytes) -> None:
    with pytest.raises(Damaged):
        form.load_manifest(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "40"), ("step", -1), ("step", True), ("hosts", None), ("identity", []), ("config", "x"),
        ("state", None), ("run_id", 5), ("code", {}), ("parts", [{"name": "../x", "size": 1, "crc32c": 1}]),
        ("parts", [{"name": "x", "size": "1", "crc32c": 1}]), ("parts", [{"size": 1}]), ("parts", 5),
        ("tensors", {"w": {"dtype": "F32", "shape": [2], "size": 8, "slices": [
            {"part": 0, "offsets": [0, 0], "sizes": [2]}]}}),
        ("tensors", {"w": {"dtype": "F32", "shape": [2], "size": "8", "slices": [
            {"part": 0, "offsets": [0], "sizes": [2]}]}}),
        ("tensors", [1]), ("tensors", {"w": None}), ("further", 1), ("format", 9),
    ],
)  # fmt: skip
def test_a_manifest_with_a_right_checksum_and_wrong_values_is_damaged(key: str, value: object) -> None:
    body = {**form.to_json(MANIFEST), key: value}
    data = json.dumps({**body, "crc32c": form._checksum(body)}).encode()
    with pytest.raises(
        Damaged, match="has format 9" if key == "format" else r"is not of format 3|manifest.json: tensor w"
    ):
        form.load_manifest(data)


@given(tensors, st.integers(1, 9))
def test_every_tensor_is_written_by_one_host_and_hosts_share_bytes(sizes: dict[str, TensorSpec], hosts: int) -> None:
    shares = form.slices_by_part(form.assign_slices(sizes, {}, hosts), hosts)
    assert sorted(entry.key for share in shares for entry in share) == sorted(sizes)
    loads = [sum(entry.spec.size for entry in share) for share in shares]
    assert max(loads) - min(loads) <= max((info.size for info in sizes.values()), default=0)


@given(tensors, st.randoms())
def test_a_snapshot_written_in_place_is_a_safetensors_file(sizes: dict[str, TensorSpec], random: object) -> None:
    data, places = encode(list(sizes.items()))
    for index, place in enumerate(places.values()):
        place[:] = bytes([index % 256]) * len(place)
    decoded = decode(bytes(data))
    assert list(decoded) == list(sizes)
    for index, (name, (info, content)) in enumerate(decoded.items()):
        assert info == sizes[name]
        assert bytes(content) == bytes([index % 256]) * info.size


@pytest.mark.parametrize(
    "data", [b"\x02\0\0\0\0\0\0\0", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 40, b'\x0a\0\0\0\0\0\0\0{"a": 1}  ']
)
def test_what_is_no_safetensors_file_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data)


@given(st.sets(st.integers(1, 100)), st.integers(1, 5), st.none() | st.integers(1, 20))
def test_keeping_never_gives_up_the_newest_nor_the_multiples(steps: set[int], last: int, every: int | None) -> None:
    gone = CheckpointSection(keep_last=last, keep_every=every).deletable(steps)
    assert sorted(steps)[-last:] == sorted(steps - set(gone))[-min(last, len(steps)) :] if steps else not gone
    assert all(not (every and step % every == 0) for step in gone)


def test_when_to_save() -> None:
    assert [step for step in range(1, 13) if is_step_due(step, every=4)] == [4, 8, 12]
    assert not is_step_due(4, every=None)
    assert [are_minutes_over(2, seconds) for seconds in (119.0, 120.0)] == [False, True]
    assert not are_minutes_over(None, seconds=1e9)


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def _put(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Slice]:
    """Boxes that hold every element once: the whole, cut in two again and again at drawn places, in a drawn order."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        number = draw(st.integers(0, len(boxes) - 1))
        axes = [axis for axis, size in enumerate(boxes[number].sizes) if size > 1]
        if not axes:
            continue
        box, axis = boxes.pop(number), draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.sizes[axis] - 1))
        high = Slice(_put(box.offsets, axis, box.offsets[axis] + at), _put(box.sizes, axis, box.sizes[axis] - at))
        boxes += [replace(box, sizes=_put(box.sizes, axis, at)), high]
    return draw(st.permutations(boxes))


def write_checkpoint(folder: str, arrays: dict[str, np.ndarray], boxes: dict[str, list[StoredSlice]]) -> Manifest:
    count = 1 + max((stored.part for slices in boxes.values() for stored in slices), default=0)
    specs = {name: TensorSpec("F32", array.shape, array.nbytes) for name, array in arrays.items()}
    tensors = {name: StoredTensor(specs[name], tuple(slices)) for name, slices in boxes.items()}
    step, parts, checksums = storage.join(folder, form.step_folder(10)), [], list[list[int]]()
    for number, entries in enumerate(form.slices_by_part(tensors, count)):
        data, views = encode([(entry.key, entry.spec) for entry in entries])
        for entry, view in zip(entries, views.values(), strict=True):
            view[:] = cut_out(arrays[entry.name], entry.stored.box)
        name = form.part_name(number, count, "t")
        parts.append(Part(name, len(data), storage.write(storage.join(step, name), data).crc32c))
        checksums.append([storage.crc32c(view) for view in views.values()])
    manifest = Manifest(10, tuple(parts), {}, {}, {}, "c", form.add_checksums(tensors, checksums))
    storage.write(storage.join(step, form.MANIFEST), dump_manifest(manifest))
    return manifest


def cut_out(array: np.ndarray, box: Slice) -> bytes:
    return array[tuple(map(slice, box.offsets, box.ends))].tobytes()


def load(folder: str, manifest: Manifest, choose: Choose) -> dict[str, tuple[TensorSpec, bytes]]:
    loaded: dict[str, tuple[TensorSpec, bytes]] = {}

    def keep(tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        loaded.update({name: (spec, bytes(data)) for name, (spec, data) in tensors.items()})

    load_tensors(folder, manifest, keep, choose=choose)
    return loaded


@st.composite
def parts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    """Any box of a tensor, the whole and an empty one among them."""
    offsets = tuple(draw(st.integers(0, length)) for length in shape)
    pairs = zip(offsets, shape, strict=True)
    return Slice(offsets, tuple(draw(st.integers(0, length - offset)) for offset, length in pairs))


@given(st.data())
def test_any_boxes_of_tensors_are_restored_alike(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = str(tmp_path_factory.mktemp("sliced"))
    arrays, boxes = {}, {}
    for name in ("a", "b", "c"):
        shape = data.draw(shapes)
        arrays[name] = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        boxes[name] = [StoredSlice(data.draw(st.integers(0, 2)), box) for box in data.draw(partitions(shape))]
    manifest = write_checkpoint(folder, arrays, boxes)
    assert form.read_manifest(folder, 10) == manifest
    boxes_of = {name: st.none() | st.just(whole(value.shape)) | parts_of(value.shape) for name, value in arrays.items()}
    wanted = {name: data.draw(box) for name, box in boxes_of.items()}
    loaded = load(folder, manifest, lambda name, _spec: wanted[name])
    boxes_read = {name: box for name, box in wanted.items() if box}
    assert {name: spec.shape for name, (spec, _) in loaded.items()} == {
        name: box.sizes for name, box in boxes_read.items()
    }
    assert all(content == cut_out(arrays[name], boxes_read[name]) for name, (_, content) in loaded.items())


@given(st.data(), shapes)
def test_boxes_hold_every_element_once_or_the_mistake_is_named(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = st.integers(0, 4)
    slices = st.builds(Slice, st.tuples(*[size] * len(shape)), st.tuples(*[size] * len(shape)))
    boxes = data.draw(st.lists(slices, max_size=3)) + data.draw(st.just([]) | partitions(shape))
    counts = np.zeros(shape, int)
    outside = any(end > length for box in boxes for end, length in zip(box.ends, shape, strict=True))
    for box in boxes:
        counts[tuple(map(slice, box.offsets, box.ends))] += 1
    error = partition_error(shape, boxes)
    if outside:
        assert "out of the range" in error
    elif (counts > 1).any():
        assert "overlap" in error
    elif (counts < 1).any():
        assert "gap" in error
    else:
        assert error is None


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([((0, 0), (2, 3))], r"tensor w: its slices leave a gap: they hold 6 of 12 elements"),
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], r"tensor w: slices \[0:3,0:3\] and \[2:4,0:3\] overlap"),
        ([((0, 0), (4, 3)), ((4, 0), (1, 3))], r"tensor w: slice \[4:5,0:3\] is out of the range of shape \[4, 3\]"),
        ([((-1, 0), (5, 3))], r"tensor w: slice \[-1:4,0:3\] is out of the range"),
        ([((0,), (12,))], r"tensor w: slice \[0:12\] has 1 axes, the tensor 2"),
        ([((0, 0), (4, 3))], "there is no part number 1 among 1"),
    ],
)
def test_a_wrong_partition_is_damage(slices: list[tuple[tuple[int, ...], tuple[int, ...]]], message: str) -> None:
    part = 1 if "no part" in message else 0
    tensor = StoredTensor(TensorSpec("F32", (4, 3), 48), tuple(StoredSlice(part, Slice(*box)) for box in slices))
    text = dump_manifest(Manifest(10, (Part("p", 1, 1),), {}, {}, {}, "c", {"w": tensor}))
    with pytest.raises(Damaged, match=message):
        load_manifest(text)


def test_a_part_that_does_not_hold_what_the_manifest_says_is_damaged(tmp_path: Path) -> None:
    arrays = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    halves = [StoredSlice(0, Slice((0, 0), (2, 2))), StoredSlice(0, Slice((2, 0), (2, 2)))]
    manifest = write_checkpoint(str(tmp_path), arrays, {"w": halves})
    for tensors in (
        {},
        {"w": replace(manifest.tensors["w"], slices=(StoredSlice(0, whole((4, 2))),))},
        {"w": replace(manifest.tensors["w"], spec=TensorSpec("F64", (4, 2), 64))},
    ):
        with pytest.raises(Damaged, match=r"has \d+ bytes, but the tensors that the manifest lists in it \d+"):
            load_tensors(str(tmp_path), replace(manifest, tensors=tensors), lambda tensors: None)


@pytest.mark.parametrize("hosts", [4, 2])
def test_a_host_reads_and_holds_its_slices_alone(tmp_path: Path, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 32 MB in four parts, read by one of four hosts, or of two."""
    rows, size, read = 4096, 2 * 4096 * 1024 * 4, storage.read
    quarters = [StoredSlice(part, Slice((part * rows // 4, 0), (rows // 4, 1024))) for part in range(4)]
    arrays = {name: np.full((rows, 1024), number, np.float32) for number, name in enumerate("ab")}
    manifest = write_checkpoint(str(tmp_path), arrays, dict.fromkeys(arrays, quarters))
    own, sent, seen = Slice((rows - rows // hosts, 0), (rows // hosts, 1024)), list[int](), set[str]()
    monkeypatch.setattr(storage, "read", lambda url, start, end: sent.append(end - start) or read(url, start, end))
    tracemalloc.start()
    load_tensors(str(tmp_path), manifest, seen.update, choose=lambda _name, _spec: own)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == {"a", "b"}
    assert sum(sent) < size // hosts + 4096
    part = size // 4 if hosts == 2 else 0  # that was read, beside the slices that are assembled from two
    assert held < size // hosts + part + (2 << 20)


def test_a_slice_that_is_read_alone_is_checked(tmp_path: Path) -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    halves = [StoredSlice(0, Slice((first, 0), (4, 8))) for first in (0, 4)]
    manifest = write_checkpoint(str(tmp_path), {"w": array}, {"w": halves})
    (part,) = (tmp_path / form.step_folder(10)).glob("part-*")
    flip(part, part.read_bytes().rindex(array[7].tobytes()) + 3)
    first, second = (lambda _name, _spec, half=half: half.box for half in halves)
    load(str(tmp_path), manifest, first)
    with pytest.raises(Damaged, match=r"the slice \[4:8,0:8\] of w has a wrong crc32c"):
        load(str(tmp_path), manifest, second)
