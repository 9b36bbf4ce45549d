"""Claims about tf.train.Example bytes, against bytes worked out by hand."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from training.data.formats import example_codec

# {"a": bytes "xy"}: Example{1: Features{1: entry{1: "a", 2: Feature{1: BytesList{1: "xy"}}}}}, a tag is field << 3 | 2
BYTES_EXAMPLE = bytes.fromhex("0a0d 0a0b 0a0161 1206 0a04 0a02 7879")
# {"n": [1, 300, -1]}: Feature{3: Int64List{1: packed 01, ac 02, ff*9 01}}
INTS_EXAMPLE = bytes.fromhex("0a18 0a16 0a016e 1211 1a0f 0a0d 01 ac02 ffffffffffffffffff01")
integers = st.integers(-(2**63), 2**63 - 1)


def test_an_example_is_encoded_byte_for_byte() -> None:
    assert example_codec.encode({"a": b"xy"}) == BYTES_EXAMPLE
    assert example_codec.encode({"n": [1, 300, -1]}) == INTS_EXAMPLE
    assert example_codec.decode(BYTES_EXAMPLE) == {"a": [b"xy"]}
    assert example_codec.decode(INTS_EXAMPLE)["n"].tolist() == [1, 300, -1]


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=9) | st.lists(integers, max_size=9), max_size=4))
def test_decode_inverts_encode(features: dict[str, bytes | list[int]]) -> None:
    decoded = example_codec.decode(example_codec.encode(features))
    assert set(decoded) == set(features)
    for name, value in features.items():
        assert decoded[name] == [value] if isinstance(value, bytes) else decoded[name].tolist() == value


def test_unpacked_numbers_and_unknown_fields_are_read() -> None:
    one_by_one = bytes.fromhex("1a04 0801 0802".replace(" ", ""))  # Int64List with two unpacked varints
    entry = b"\x0a\x01n\x12" + bytes([len(one_by_one)]) + one_by_one + b"\x3d\0\0\0\0"  # and an unknown fixed32 field 7
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert example_codec.decode(b"\x0a" + bytes([len(features)]) + features)["n"].tolist() == [1, 2]


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_not_but_nothing_else(data: bytes) -> None:
    with contextlib.suppress(example_codec.NotAnExample):
        example_codec.decode(data)
