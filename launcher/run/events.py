"""Events of a run: what its ledger records, one frozen class for each kind.

An event is one JSON object: `time`, `event` (the kind's name), then the fields of its class. Ledgers outlive versions
of this program: a kind that is not known is read as `UnknownEvent`, a field that is not known is passed over, and a
field that is missing has its default. Values never hold secrets: ledgers are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from launcher.run.verdict import Cause

NOT_STARTED = "not started"
"""Outcome of an attempt whose containers could not be started on every host."""

VANISHED = "vanished"
"""Outcome of an attempt whose containers were gone from every host when somebody looked again."""


@dataclass(frozen=True)
class Event:
    """Base of all kinds."""

    kind: ClassVar[str]

    attempt: int
    """Number of the attempt that it belongs to, from 0."""


@dataclass(frozen=True)
class AttemptBegan(Event):
    """An attempt is about to be prepared on all hosts."""

    kind: ClassVar[str] = "attempt"
    image: str = ""
    """What hosts run: REPOSITORY@sha256:... or an image id."""
    command: tuple[str, ...] = ()
    """Program and arguments."""
    overlay: str = ""
    """SHA-256 of the overlay's archive; empty without one."""
    overlay_target: str = ""
    """The folder of the container over which the overlay is laid."""
    preflight: str = ""
    """Hashes of the programs that preflight compiled, separated by commas; empty without."""


@dataclass(frozen=True)
class Prepared(Event):
    """Every host has the same image, and a container that has not started."""

    kind: ClassVar[str] = "prepared"
    image_id: str = ""
    """What all hosts say that they have."""


@dataclass(frozen=True)
class Started(Event):
    """The containers run on all hosts."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True)
class Ended(Event):
    """The attempt is over."""

    kind: ClassVar[str] = "ended"
    outcome: str = ""
    """finished, saved, failed, bad input, host lost, preempted, slice deleted, stalled, stopped, not started, or
    vanished."""
    cause: Cause | None = None
    """The first cause: worker (-1: no single host), what, exit_code, oom_killed, time of the host's clock."""
    symptoms: tuple[str, ...] = ()
    """What happened to other hosts because of it."""
    last_lines: tuple[str, ...] = ()
    """What the host that is the first cause wrote last."""


@dataclass(frozen=True)
class Requested(Event):
    """`tpu-launch run` was asked to start the run or to resume it: from this attempt on. A stop that was requested
    before does not count any more."""

    kind: ClassVar[str] = "requested"
    stops: int | None = None
    """How many stops had been requested then: one that came later counts, wherever its line is. None in a ledger of an
    older version, where those below this line do."""


@dataclass(frozen=True)
class StopRequested(Event):
    """The run's owner asked it to stop. No attempt follows until `tpu-launch run` is asked for one."""

    kind: ClassVar[str] = "stop"
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class HostStopped(Event):
    """A host was told to end its container, because the attempt had failed."""

    kind: ClassVar[str] = "stopped"
    host: int = -1
    """Worker index."""
    ok: bool = False
    """Whether its container has ended."""
    detail: str = ""
    """What went wrong."""


@dataclass(frozen=True)
class HostOutOfReach(Event):
    """A host stopped answering."""

    kind: ClassVar[str] = "host out of reach"
    host: int = -1
    """Worker index."""
    problem: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True)
class HostBack(Event):
    """A host that was out of reach answers again."""

    kind: ClassVar[str] = "host back"
    host: int = -1
    """Worker index."""


@dataclass(frozen=True)
class HostEnded(Event):
    """The container of a host ended, or is gone."""

    kind: ClassVar[str] = "host ended"
    host: int = -1
    """Worker index."""
    exit_code: int | None = None
    """Of the container; null when it is gone."""
    oom: bool = False
    """Whether the kernel killed it for lack of memory."""
    what: str = ""
    """How it ended, in words."""


@dataclass(frozen=True)
class Recovering(Event):
    """Another attempt will follow. Counts against a retry budget of the run."""

    kind: ClassVar[str] = "recover"
    after: str = ""
    """How the attempt ended: an outcome as in `ended`."""
    reason: str = ""
    """Which attempt of which budget follows."""
    delay: float = 0.0
    """Seconds to wait first."""


@dataclass(frozen=True)
class RoundFailed(Event):
    """A round of a recovery (make the slice READY, start the attempt on all hosts) failed, and another follows."""

    kind: ClassVar[str] = "not recovered yet"
    problem: str = ""
    """What failed, in its first line."""
    reason: str = ""
    """What follows, and the problem."""
    delay: float = 0.0
    """Seconds to wait first."""


@dataclass(frozen=True)
class Recovered(Event):
    """The attempt after a recovery has started."""

    kind: ClassVar[str] = "recovered"
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time since the end of the attempt before went: delay (with rounds that failed), slice, start."""


@dataclass(frozen=True)
class SliceReplaced(Event):
    """The slice was deleted, to be created again: one host failed again and again, or hosts can't be contacted."""

    kind: ClassVar[str] = "replaced"
    host: int = -1
    """Worker index of the host; -1: no single host."""
    reason: str = ""
    """How often it was the first cause, or why the hosts can't be used."""


@dataclass(frozen=True)
class PostMortemWritten(Event):
    """An archive of logs and state was written."""

    kind: ClassVar[str] = "post-mortem"
    path: str = ""
    """Of the archive."""


@dataclass(frozen=True)
class LeftBehind(Event):
    """The attempt ended while hosts were out of reach: their containers may still be there."""

    kind: ClassVar[str] = "left behind"
    container: str = ""
    """Its name, the same on every host."""
    hosts: tuple[int, ...] = ()
    """Worker indices."""


@dataclass(frozen=True)
class Swept(Event):
    """Containers that an attempt had left behind are gone."""

    kind: ClassVar[str] = "swept"
    hosts: tuple[int, ...] = ()
    """Worker indices."""


@dataclass(frozen=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know."""

    kind: ClassVar[str] = ""
    name: str = ""
    """The kind's name, as it was recorded."""


KINDS: Mapping[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        AttemptBegan,
        Prepared,
        Started,
        Ended,
        Requested,
        StopRequested,
        HostStopped,
        HostOutOfReach,
        HostBack,
        HostEnded,
        Recovering,
        RoundFailed,
        Recovered,
        SliceReplaced,
        PostMortemWritten,
        LeftBehind,
        Swept,
    )
}


@dataclass(frozen=True)
class Entry:
    """One line of a ledger."""

    time: str
    """RFC 3339, UTC, clock of the machine that recorded it."""
    event: Event
    document: Mapping[str, Any]
    """The line as it was read, with everything that this version does not know."""


# Fields that are left out of a line when they are empty.
_OPTIONAL = frozenset({"overlay", "overlay_target", "preflight"})


def to_document(time: str, event: Event) -> dict[str, Any]:
    """The JSON object of an event."""
    document: dict[str, Any] = {"time": time, "event": event.kind}
    for item in fields(event):
        value = getattr(event, item.name)
        if item.name in _OPTIONAL and not value:
            continue
        if isinstance(value, Cause):
            value = vars(value)
        document[item.name] = list(value) if isinstance(value, tuple) else value
    return document


def from_document(document: Mapping[str, Any]) -> Entry:
    """The event of a JSON object, of this version or another."""
    name = str(document.get("event", ""))
    attempt = document.get("attempt", -1)
    kind = KINDS.get(name)
    if kind is None:
        return Entry(str(document.get("time", "")), UnknownEvent(attempt, name), document)
    values = {item.name: document[item.name] for item in fields(kind) if item.name in document}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if isinstance(values.get("cause"), Mapping):
        values["cause"] = _cause(values["cause"])
    return Entry(str(document.get("time", "")), kind(**{"attempt": attempt, **values}), document)


def _cause(document: Mapping[str, Any]) -> Cause:
    known = {item.name for item in fields(Cause)}
    return Cause(**{"worker": -1, "what": "", **{key: value for key, value in document.items() if key in known}})
