"""`tf.train.Example` without TensorFlow (tensorflow/core/example/{example,feature}.proto).

The encoder writes features in the order of their names, so equal records are equal bytes. The decoder accepts what any
protobuf writer may produce: any order, packed or not, unknown fields, a repeated key (the last one counts). No layout
here has floats: a FloatList counts as an empty Int64List. Pure functions.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from training.protobuf import message_classes

Feature = bytes | Sequence[int] | npt.NDArray[np.integer]
Decoded = list[bytes] | npt.NDArray[np.int64]

_Example = message_classes(
    {
        "Example": {"features": (1, "Features")},
        "Features": {"feature": (1, "Entry*")},  # a map is written as repeated entries; here in the order of names
        "Entry": {"key": (1, "bytes"), "value": (2, "Feature")},
        "Feature": {"bytes_list": (1, "BytesList"), "int64_list": (3, "Int64List")},
        "BytesList": {"value": (1, "bytes*")},
        "Int64List": {"value": (1, "int64*")},
    }
)["Example"]


class NotAnExample(ValueError):
    """The bytes are not a tf.train.Example."""


def encode(features: Mapping[str, Feature]) -> bytes:
    """Encodes an Example, sorted by name: bytes as a BytesList of one value, integers as an Int64List."""
    example = _Example()
    for name, value in sorted(features.items()):
        feature = example.features.feature.add(key=name.encode()).value
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        else:
            feature.int64_list.value.extend(np.asarray(value, np.int64).tolist())
    data: bytes = example.SerializeToString()
    return data


def decode(data: bytes) -> dict[str, Decoded]:
    """Decodes an Example: name -> list of bytes, or (n,) int64, empty for floats or no list. Raises NotAnExample."""
    try:
        entries = _Example.FromString(data).features.feature
        features = {entry.key.decode(): entry.value for entry in entries}
    except (DecodeError, UnicodeDecodeError) as error:
        raise NotAnExample(str(error)) from None
    return {
        name: list(feature.bytes_list.value)
        if feature.HasField("bytes_list")
        else np.array(feature.int64_list.value, np.int64)
        for name, feature in features.items()
    }
