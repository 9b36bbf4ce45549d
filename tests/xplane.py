"""Reads an xplane.pb, the profilers' file, without a framework: XSpace of tsl/profiler/protobuf/xplane.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.protobuf import message_classes

SPACE = message_classes(
    {
        "Space": {"planes": (1, "Plane*")},
        "Plane": {"lines": (3, "Line*"), "events": (4, "Entry*"), "stats": (5, "Entry*")},
        "Entry": {"value": (2, "Metadata")},
        "Metadata": {"id": (1, "int64"), "name": (2, "bytes")},
        "Line": {"events": (4, "Event*")},
        "Event": {"id": (1, "int64"), "begin": (2, "int64"), "picoseconds": (3, "int64"), "stats": (4, "Stat*")},
        "Stat": {"id": (1, "int64"), "unsigned": (3, "int64"), "signed": (4, "int64")},
    }
)["Space"]


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
    return [
        event for number, plane in enumerate(SPACE.FromString(data).planes) for event in _plane_events(plane, number)
    ]


def _plane_events(plane: Any, number: int) -> Iterator[Event]:
    names, stat_names = (
        {entry.value.id: entry.value.name.decode() for entry in entries} for entries in (plane.events, plane.stats)
    )
    for position, line in enumerate(plane.lines):
        for event in line.events:
            stats = {
                stat_names.get(stat.id, ""): stat.unsigned if stat.HasField("unsigned") else stat.signed
                for stat in event.stats
                if stat.HasField("unsigned") or stat.HasField("signed")
            }
            place, end = (number, position), event.begin + event.picoseconds
            yield Event(names.get(event.id, ""), place, event.begin, end, stats)
