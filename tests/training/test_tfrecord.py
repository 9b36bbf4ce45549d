"""Claims about TFRecord frames and tf.train.Example bytes, against bytes worked out by hand or taken from the formats'
own pages."""

import contextlib
import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.formats import example_codec, tfrecord


def unmask(masked: int) -> int:
    """The inverse of `tfrecord.mask`."""
    rotated = (masked - tfrecord.MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def bytes_prefix(name: str, length: int) -> bytes:
    """The bytes before the payload in `encode({name: payload})`, of payloads of `length` bytes."""
    return example_codec.encode({name: b"\0" * length})[: -length or None]


def test_crc32c_is_masked_as_tensorflow_does() -> None:
    # crc32c("123456789") = 0xe3069283 (RFC 3720's check value); rotated right by 15: 0x2507c60d; plus 0xa282ead8:
    # 0xc78ab0e5
    assert tfrecord.mask(0xE3069283) == 0xC78AB0E5
    assert unmask(0xC78AB0E5) == 0xE3069283


def test_a_frame_is_length_crc_data_crc() -> None:
    framed = tfrecord.frame(b"123456789")
    assert framed[:8] == b"\x09" + b"\0" * 7
    assert framed[12:-4] == b"123456789"
    assert framed[-4:] == bytes.fromhex("e5b08ac7")
    assert len(framed) == 9 + tfrecord.OVERHEAD


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_what_is_joined_is_walked(records: list[bytes]) -> None:
    shard = tfrecord.join(records)
    walked = list(tfrecord.walk(shard, "s"))
    assert [data for _, data in walked] == records
    assert tfrecord.index(shard, "s") == [offset for offset, _ in walked] + [len(shard)]


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_every_flipped_bit_is_found_where_it_is(records: list[bytes], data: st.DataObject) -> None:
    shard = bytearray(tfrecord.join(records))
    position = data.draw(st.integers(0, len(shard) - 1))
    shard[position] ^= 1 << data.draw(st.integers(0, 7))
    starts = tfrecord.index(tfrecord.join(records), "s")
    broken = max(number for number, start in enumerate(starts[:-1]) if start <= position)
    with pytest.raises(tfrecord.Corrupt) as caught:
        list(tfrecord.walk(bytes(shard), "gs://b/s-0"))
    assert (caught.value.record, caught.value.offset) == (broken, starts[broken])
    assert f"gs://b/s-0: record {broken} at byte {starts[broken]}" in str(caught.value)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_a_shard_cut_inside_a_record_is_found(records: list[bytes], data: st.DataObject) -> None:
    shard = tfrecord.join(records)
    cut = data.draw(st.integers(0, len(shard) - 1))
    if cut in tfrecord.index(shard, "s"):  # between records only the manifest can tell
        assert len(list(tfrecord.walk(shard[:cut], "s"))) < len(records)
    else:
        with pytest.raises(tfrecord.Corrupt, match="the shard ends inside"):
            list(tfrecord.walk(shard[:cut], "s"))


# {"a": bytes "xy"}: Example{1: Features{1: entry{1: "a", 2: Feature{1: BytesList{1: "xy"}}}}}, each tag = field << 3 |
# 2
BYTES_EXAMPLE = bytes.fromhex("0a0d 0a0b 0a0161 1206 0a04 0a02 7879")
# {"n": [1, 300, -1]}: Feature{3: Int64List{1: packed 01, ac 02, ff*9 01}}
INTS_EXAMPLE = bytes.fromhex("0a18 0a16 0a016e 1211 1a0f 0a0d 01 ac02 ffffffffffffffffff01")


def test_an_example_is_encoded_byte_for_byte() -> None:
    assert example_codec.encode({"a": b"xy"}) == BYTES_EXAMPLE
    assert example_codec.encode({"n": [1, 300, -1]}) == INTS_EXAMPLE
    assert example_codec.decode(BYTES_EXAMPLE) == {"a": [b"xy"]}
    assert example_codec.decode(INTS_EXAMPLE)["n"].tolist() == [1, 300, -1]


def test_a_record_of_fixed_payload_is_a_constant_and_the_payload() -> None:
    for length in (0, 2, 256, 1024, 40_000):
        payload = bytes(range(256)) * (length // 256 + 1)
        assert bytes_prefix("input_ids", length) + payload[:length] == example_codec.encode(
            {"input_ids": payload[:length]}
        )


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(st.binary(max_size=9), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)),
        max_size=4,
    )
)
def test_decode_inverts_encode(features: dict[str, bytes | list[int]]) -> None:
    decoded = example_codec.decode(example_codec.encode(features))
    assert set(decoded) == set(features)
    for name, value in features.items():
        assert decoded[name] == [value] if isinstance(value, bytes) else decoded[name].tolist() == value


def test_floats_unpacked_numbers_and_unknown_fields_are_read() -> None:
    assert example_codec.decode(example_codec.encode({"f": np.array([0.5, -2], np.float32)}))["f"].tolist() == [0.5, -2]
    one_by_one = bytes.fromhex("1a04 0801 0802".replace(" ", ""))  # Int64List with two unpacked varints
    entry = b"\x0a\x01n\x12" + bytes([len(one_by_one)]) + one_by_one + b"\x3d\0\0\0\0"  # and an unknown fixed32 field 7
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert example_codec.decode(b"\x0a" + bytes([len(features)]) + features)["n"].tolist() == [1, 2]


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_not_but_nothing_else(data: bytes) -> None:
    with contextlib.suppress(example_codec.NotAnExample):
        example_codec.decode(data)


@given(st.data())
def test_a_mutated_example_does_not_break_the_decoder(data: st.DataObject) -> None:
    mutated = bytearray(INTS_EXAMPLE)
    mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(example_codec.NotAnExample):
        example_codec.decode(bytes(mutated))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_varints_are_protobufs(values: list[int]) -> None:
    packed = example_codec.pack_varints(np.array(values, np.int64))
    expected = bytearray()
    for value in values:
        value &= 2**64 - 1
        while value > 127:
            expected.append(value & 127 | 128)
            value >>= 7
        expected.append(value)
    assert packed == bytes(expected)
    assert example_codec.unpack_varints(packed).tolist() == values


def test_a_huge_length_is_refused_before_anything_is_allocated() -> None:
    size = struct.pack("<Q", 2**63)
    shard = size + struct.pack("<I", tfrecord.mask(google_crc32c.value(size))) + b"x" * 50
    with pytest.raises(tfrecord.Corrupt, match="ends inside this record"):
        list(tfrecord.walk(shard, "s"))
