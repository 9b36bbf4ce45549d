"""Claims about TFRecord frames, against bytes worked out by hand or taken from the format's own pages."""

import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.formats import tfrecord


def test_a_frame_is_length_crc_data_crc() -> None:
    # crc32c("123456789") = 0xe3069283 (RFC 3720's check value), rotated by 15: 0x2507c60d, plus 0xa282ead8: 0xc78ab0e5
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


def test_a_huge_length_is_refused_before_anything_is_allocated() -> None:
    size = struct.pack("<Q", 2**63)
    shard = size + struct.pack("<I", tfrecord.mask(google_crc32c.value(size))) + b"x" * 50
    with pytest.raises(tfrecord.Corrupt, match="ends inside this record"):
        list(tfrecord.walk(shard, "s"))
