"""What a profile of a trainer at work must be, in any framework."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.container import small_runs
from training.profiler import Answer, folder_of, request
from training.protobuf import message_classes

# The profilers' file, XSpace of tsl/profiler/protobuf/xplane.proto, read without a framework.
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


def events(profile: bytes) -> Iterator[Event]:
    """Yields all events of all planes, whose ids mean something only in their plane."""
    for number, plane in enumerate(SPACE.FromString(profile).planes):
        names, stat_names = (
            {entry.value.id: entry.value.name.decode() for entry in entries} for entries in (plane.events, plane.stats)
        )
        for position, line in enumerate(plane.lines):
            for event in line.events:
                stats = {
                    stat_names.get(stat.id, ""): getattr(stat, kind)
                    for stat in event.stats
                    for kind in ("signed", "unsigned")
                    if stat.HasField(kind)
                }
                end = event.begin + event.picoseconds
                yield Event(names.get(event.id, ""), (number, position), event.begin, end, stats)


def require_a_profile(tmp_path: Path, **changes: Any) -> bytes:
    """Checks that a profile of five steps names them and their parts and changes no result. Returns the profile."""
    folder = small_runs.prepare(tmp_path)
    config = small_runs.document(folder, train__steps=60, evaluation__at_end=False, export__at_end=False, **changes)
    straight = small_runs.train_here(config, "straight")
    answers: list[Answer] = []

    def ask() -> None:
        while not answers:
            if (folder_of(0) / "trainer").exists():
                answers.append(request(folder_of(0), "five", 5, 60))

    asking = threading.Thread(target=ask)
    asking.start()
    profiled = small_runs.train_here(config, "profiled")
    asking.join(60)
    for key in ("first_loss", "last_loss", "final_weights_crc32c"):
        assert profiled[key] == straight[key], key
    # A run of TensorFlow knows no programs of earlier ones.
    new = straight["compilations"] if config.get("backend") == "tensorflow" else 0
    assert profiled["compilations"] == new, "the steps are the programs that they were before"

    (answer,) = answers
    assert answer.last - answer.first == 4
    assert answer.file == f"{folder}/runs/profiled/profiles/five/plugins/profile/five/host-0.xplane.pb"
    profile = Path(answer.file).read_bytes()
    found = [*events(profile)]
    steps = [event for event in found if event.name == "train"]
    assert {event.stats["step_num"] for event in steps} >= set(range(answer.first, answer.last + 1))
    for step in steps:
        inside = [event.name for event in found if is_inside(event, step)]
        assert inside.count("data wait") == inside.count("dispatch") == inside.count("result") == 1
    return profile


def is_inside(event: Event, other: Event) -> bool:
    return event.line == other.line and other.begin <= event.begin and event.end <= other.end
