"""A manifest is what was written or it is damaged; parts share the work; policies never give up the newest."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.checkpoint import format as form
from training.checkpoint.config import CheckpointSection, are_minutes_over, is_step_due
from training.checkpoint.format import Manifest, Part, StoredSlice, StoredTensor
from training.checkpoint.reader import require_identity
from training.checkpoint.tensors import Damaged, Slice, TensorSpec, decode, encode
from training.errors import BadInput

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
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= data.draw(st.integers(1, 255))
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
        ("tensors", [1]), ("tensors", {"w": None}), ("further", 1),
    ],
)  # fmt: skip
def test_a_manifest_with_a_right_checksum_and_wrong_values_is_damaged(key: str, value: object) -> None:
    body = {**form.to_json(MANIFEST), key: value}
    data = json.dumps({**body, "crc32c": form._checksum(body)}).encode()
    with pytest.raises(Damaged, match=r"is not of format 3|manifest.json: tensor w"):
        form.load_manifest(data)


def test_a_manifest_of_a_later_format_is_refused_by_its_number() -> None:
    body = json.loads(form.dump_manifest(MANIFEST))
    del body["crc32c"]
    body["format"] = 9
    with pytest.raises(Damaged, match="format 9"):
        form.load_manifest(json.dumps({**body, "crc32c": form._checksum(body)}).encode())


@given(tensors, st.integers(1, 9))
def test_every_tensor_is_written_by_one_host_and_hosts_share_bytes(sizes: dict[str, TensorSpec], hosts: int) -> None:
    stored = form.assign_slices(sizes, {}, hosts)
    shares = [form.slices_in_part(stored, part) for part in range(hosts)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(info.size for info in share.values()) for share in shares]
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


@pytest.mark.parametrize("data", [b"", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 40, b'\x0a\0\0\0\0\0\0\0{"a": 1}  '])
def test_what_is_no_safetensors_file_is_damaged(data: bytes) -> None:
    if data == b"":
        data = b"\x02\0\0\0\0\0\0\0"
    with pytest.raises(Damaged):
        decode(data)


def test_identities_differ_by_name_and_both_values() -> None:
    told = r"undo the change:\n  a: the checkpoint has 2, this run 3\n  b: the checkpoint has None, this run 4$"
    with pytest.raises(BadInput, match=told):
        require_identity("runs", replace(MANIFEST, identity={"seed": 1, "a": 2}), {"seed": 1, "a": 3, "b": 4})


@given(st.sets(st.integers(1, 100)), st.integers(1, 5), st.none() | st.integers(1, 20))
def test_keeping_never_gives_up_the_newest_nor_the_multiples(steps: set[int], last: int, every: int | None) -> None:
    gone = CheckpointSection(keep_last=last, keep_every=every).deletable(steps)
    kept = steps - set(gone)
    assert sorted(steps)[-last:] == sorted(kept)[-min(last, len(steps)) :] if steps else not gone
    assert all(not (every and step % every == 0) for step in gone)


def test_when_to_save() -> None:
    assert [step for step in range(1, 13) if is_step_due(step, every=4)] == [4, 8, 12]
    assert not is_step_due(4, every=None)
    assert [are_minutes_over(2, seconds) for seconds in (119.0, 120.0)] == [False, True]
    assert not are_minutes_over(None, seconds=1e9)
