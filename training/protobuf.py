"""Reads and writes protobuf messages that a table describes, without generated modules."""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"int64": _Field.TYPE_INT64, "bytes": _Field.TYPE_BYTES}


def message_classes(messages: Mapping[str, Mapping[str, tuple[int, str]]]) -> dict[str, Any]:
    """Returns message -> its class in protobuf's library. `messages`: message -> field -> (number, type). A type is
    int64 (also for other varints), bytes (also for strings) or another message, with a * behind it if the field is
    repeated; repeated integers are written packed. Fields that the table lacks are skipped when a message is read."""
    file = descriptor_pb2.FileDescriptorProto(name="table.proto")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            is_repeated, kind = kind.endswith("*"), kind.removesuffix("*")
            label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
                added.options.packed = is_repeated and kind == "int64"
            else:
                added.type, added.type_name = _Field.TYPE_MESSAGE, kind
    pool = descriptor_pool.DescriptorPool()  # not the process's: TensorFlow has messages of these names there
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in messages}
