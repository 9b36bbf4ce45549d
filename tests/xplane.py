"""Reads an xplane.pb, the profilers' file, without a framework: XSpace of tsl/profiler/protobuf/xplane.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.data.formats.example_codec import read_fields


@dataclass(frozen=True)
class Event:
    """A block of time."""

    name: str
    line: tuple[int, int]  # plane and line: a thread or a device's queue
    begin: int  # picoseconds, of this line
    end: int
    stats: dict[str, Any]


def events(data: bytes) -> list[Event]:
    """All events of all planes."""
    return [event for number, plane in enumerate(_messages(data, 1)) for event in _plane_events(plane, number)]


def _plane_events(plane: bytes, number: int) -> Iterator[Event]:
    names = {_integer(entry, 1): _text(entry, 2) for entry in _values(plane, 4)}
    stat_names = {_integer(entry, 1): _text(entry, 2) for entry in _values(plane, 5)}
    for position, line in enumerate(_messages(plane, 3)):
        for event in _messages(line, 4):
            begin = _integer(event, 2)
            stats = {}
            for stat in _messages(event, 4):
                values = [value for field, value in _fields(stat) if field in (3, 4)]
                if values:
                    stats[stat_names.get(_integer(stat, 1), "")] = values[0]
            yield Event(names.get(_integer(event, 1), ""), (number, position), begin, begin + _integer(event, 3), stats)


def _values(message: bytes, field: int) -> Iterator[bytes]:
    """Of a map's entries."""
    for entry in _messages(message, field):
        yield from _messages(entry, 2)


def _messages(message: bytes, field: int) -> Iterator[bytes]:
    return (value for number, value in _fields(message) if number == field and isinstance(value, bytes))


def _integer(message: bytes, field: int) -> int:
    return next((value for number, value in _fields(message) if number == field and isinstance(value, int)), 0)


def _text(message: bytes, field: int) -> str:
    return next(_messages(message, field), b"").decode()


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    return ((number, payload if wire else varint) for number, wire, payload, varint in read_fields(message))
