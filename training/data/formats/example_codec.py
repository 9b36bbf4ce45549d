"""`tf.train.Example` in its wire format, without TensorFlow and without generated protobuf classes.

    message Example   { Features features = 1; }
    message Features  { map<string, Feature> feature = 1; }     // a map entry is a message { key = 1; value = 2; }
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }
    message FloatList { repeated float value = 1 [packed = true]; }
    message Int64List { repeated int64 value = 1 [packed = true]; }

(tensorflow/core/example/{example,feature}.proto.) The encoder writes features in the order of their names, so equal
records are equal bytes. The decoder accepts what any protobuf writer may produce: any order, packed or not, unknown
fields, a repeated key (the last one counts). No layout here has floats: a FloatList is an empty list. Pure functions.

Not protobuf's own library: generated classes would need TensorFlow or a build step, and the encoder's byte order would
not be guaranteed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Feature = bytes | Sequence[int] | npt.NDArray[np.integer]
Decoded = list[bytes] | npt.NDArray[np.int64]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BYTES, _INT64 = 1, 3


class NotAnExample(ValueError):
    """The bytes are not a tf.train.Example; the message says at which byte."""


def encode(features: Mapping[str, Feature]) -> bytes:
    """Encodes an Example, sorted by name: bytes as a BytesList of one value, integers as an Int64List."""
    entries = []
    for name in sorted(features):
        value = features[name]
        if isinstance(value, bytes):
            kind, values = _BYTES, _field(1, value)
        else:
            kind, values = _INT64, _field(1, pack_varints(np.asarray(value, np.int64)))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, _field(kind, values))))
    return _field(1, b"".join(entries))


def decode(data: bytes) -> dict[str, Decoded]:
    """Decodes an Example: name -> list of bytes, or (n,) int64; [] for floats or no list. Raises NotAnExample."""
    entries = [
        entry
        for number, wire, features, _ in read_fields(data)
        if (number, wire) == (1, _LENGTH)
        for inner, kind, entry, _ in read_fields(features)
        if (inner, kind) == (1, _LENGTH)
    ]
    return dict(map(_entry, entries))


def pack_varints(values: npt.NDArray[np.int64]) -> bytes:
    """Encodes numbers (n,) as protobuf's base-128 varints; a negative one takes ten bytes."""
    unsigned = values.astype(np.int64).view(np.uint64)  # (n,)
    columns = [(unsigned >> np.uint64(7 * place)) & np.uint64(127) for place in range(10)]
    lengths = np.ones(len(unsigned), np.int64)  # (n,) bytes
    for place in range(1, 10):
        lengths[(unsigned >> np.uint64(7 * place)) != 0] = place + 1
    places = np.arange(10)  # (10,)
    table = np.stack(columns, axis=1).astype(np.uint8)  # (n, 10)
    table[places[None, :] < (lengths - 1)[:, None]] |= 128
    return table[places[None, :] < lengths[:, None]].tobytes()


def unpack_varints(data: bytes) -> npt.NDArray[np.int64]:
    """Decodes the output of `pack_varints`. Raises NotAnExample."""
    raw = np.frombuffer(data, np.uint8)  # (bytes,)
    if not len(raw):
        return np.zeros(0, np.int64)
    last = raw < 128  # (bytes,) the last byte of a number has its highest bit clear
    if not last[-1]:
        raise NotAnExample("a packed list ends inside a number")
    ends = np.flatnonzero(last)  # (n,)
    starts = np.concatenate([[0], ends[:-1] + 1])
    longest = int((ends - starts).max()) + 1
    if longest > 10:
        raise NotAnExample("a number of a packed list is longer than 10 bytes")
    values = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        inside = starts + place <= ends
        values[inside] |= (raw[starts[inside] + place] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def _entry(data: bytes) -> tuple[str, Decoded]:
    """Returns the name and values of one map entry, [] for floats or no list. Raises NotAnExample."""
    name, value = "", None
    for number, wire, payload, _ in read_fields(data):
        if (number, wire) == (1, _LENGTH):
            try:
                name = payload.decode()
            except UnicodeDecodeError:
                raise NotAnExample("a feature's name is not UTF-8") from None
        elif (number, wire) == (2, _LENGTH):
            value = _feature(payload)
    return name, [] if value is None else value


def _feature(data: bytes) -> Decoded | None:
    """Decodes a Feature message's values; None if it has no list of bytes or integers. Raises NotAnExample."""
    value: Decoded | None = None
    for kind, wire, content, _ in read_fields(data):
        if wire != _LENGTH:
            continue
        values = [(wire, payload, varint) for number, wire, payload, varint in read_fields(content) if number == 1]
        if kind == _BYTES:
            value = [payload for wire, payload, _ in values if wire == _LENGTH]
        elif kind == _INT64:
            lists = [unpack_varints(payload) for wire, payload, _ in values if wire == _LENGTH]
            lists += [np.array([varint], np.uint64).view(np.int64) for wire, _, varint in values if wire == _VARINT]
            value = np.concatenate(lists) if lists else np.zeros(0, np.int64)
    return value


def read_fields(data: bytes) -> list[tuple[int, int, bytes, int]]:
    """Returns a message's fields: number, wire type, payload, value of a varint (else 0). Raises NotAnExample."""
    fields = []
    start, end = 0, len(data)
    while start < end:
        tag, begin = _varint(data, start)
        number, wire, value = tag >> 3, tag & 7, 0
        if wire == _VARINT:
            value, stop = _varint(data, begin)
        elif wire == _LENGTH:
            length, begin = _varint(data, begin)
            stop = begin + length
        elif wire == _FIXED64:
            stop = begin + 8
        elif wire == _FIXED32:
            stop = begin + 4
        else:
            raise NotAnExample(f"byte {start}: unknown wire type {wire}")
        if stop > end or not number:
            raise NotAnExample(f"byte {start}: a field reaches beyond its message")
        fields.append((number, wire, data[begin:stop], value))
        start = stop
    return fields


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Decodes the varint at `start`. Returns it and the position after it. Raises NotAnExample if it does not end."""
    value = 0
    for place, byte in enumerate(data[start : start + 10]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value & (2**64 - 1), start + place + 1
    raise NotAnExample(f"byte {start}: a number does not end")


def _field(number: int, payload: bytes) -> bytes:
    """Encodes a field of wire type 2: tag, length and payload."""
    return bytes([number << 3 | _LENGTH]) + _length(len(payload)) + payload


def _length(value: int) -> bytes:
    """Encodes a length as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
