"""Events of a run: what its ledger records, one frozen class for each kind.

An event is one JSON object: `time`, `event` (the kind's name), then the fields of its class. Values never hold secrets:
ledgers are kept.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, dataclass_transform

from launcher.run.verdict import Cause, Kind, Verdict

NOT_STARTED = "not started"  # outcome of an attempt whose containers could not be started on every host
INTERRUPTED = "it was interrupted while it was started"
"""Cause of an attempt with that outcome whose launcher was killed: another attempt follows."""

VANISHED = "vanished"  # outcome of an attempt whose containers were missing on every host when they were next observed
KINDS: dict[str, type[Any]] = {}  # the class of each kind, by its name


@dataclass_transform(frozen_default=True)
class _FrozenEvent:
    """Makes each subclass a frozen dataclass."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str | None = None) -> None:
        """Sets the class's `kind`, and registers the class in KINDS; a base of several kinds has none."""
        dataclass(frozen=True)(cls)
        if kind is not None:
            cls.kind = kind
            KINDS[kind] = cls


class RunEvent(_FrozenEvent):
    """Base of all kinds. The comment behind a field is its text in the reference."""

    attempt: int  # number of the attempt that the event belongs to, from 0


class HostEvent(RunEvent):
    """Base of the kinds that concern one host."""

    host: int  # worker index


class EndEvent(RunEvent):
    """Base of the kinds that say how an attempt ends."""

    outcome: str = ""
    """finished, saved, failed, bad input, host lost, connection lost, preempted, slice deleted, stalled, stopped,
    not started, or vanished"""
    cause: Cause | None = None
    """the first cause: worker (-1: no single host), what, exit_code, oom_killed, time (the host's clock)"""
    symptoms: tuple[str, ...] = ()  # failures of other hosts that followed from the first cause

    @property
    def verdict(self) -> Verdict | None:
        """Returns the verdict that this event records; None for an attempt that did not start or vanished."""
        kinds = [kind for kind in Kind if kind.value == self.outcome]
        return Verdict(kinds[0], self.cause, self.symptoms) if kinds else None


class AttemptBegan(RunEvent, kind="attempt"):
    """An attempt is about to be started on all hosts."""

    image: str = ""  # the image that hosts run: REPOSITORY@sha256:... or an image id
    command: tuple[str, ...] = ()  # program and arguments
    overlay: str = ""  # SHA-256 of the overlay's archive; empty without one
    overlay_target: str = ""  # the folder of the container over which the overlay is laid
    preflight: str = ""  # hashes of the programs that preflight compiled, separated by commas; empty without preflight
    slice: str = ""  # type, capacity and zone of the slice; empty where the platform chooses hosts
    dollars_an_hour: float | None = None  # its list price; null when it is not known


class Started(RunEvent, kind="started"):
    """The containers were started on all hosts."""

    image_id: str = ""  # the image id that all hosts reported
    slice_created: str = ""  # when the slice was created (RFC 3339), as the API said; empty where that is not known
    address: str = ""  # address of the slice's host 0


class Judged(EndEvent, kind="judged"):
    """How the attempt ends, before its containers are ended: the next supervisor goes on with it after a kill."""


class Ended(EndEvent, kind="ended"):
    """The attempt is over."""

    last_lines: tuple[str, ...] = ()  # the last log lines of the host that is the first cause
    step_seconds: float | None = None  # median seconds of its last steps; null where it told none


class Requested(RunEvent, kind="requested"):
    """`tpu-launch run` was asked to start or resume the run. Stops that were requested before no longer count."""

    stops: int  # how many stops had been requested by then; one beyond that number counts, wherever its line is


class Supervised(RunEvent, kind="supervised"):
    """A process took the lease of the run: events of the supervisor before it are refused from here on."""

    holder: str  # name of the supervisor's machine, and a number that no other supervisor has


class RunStopRequested(RunEvent, kind="stop"):
    """The run was stopped (`tpu-launch stop`, `down`, the end of its budget). No attempt follows until the next
    `tpu-launch run`."""

    grace: int = 30  # seconds between SIGTERM and SIGKILL
    by_budget: bool = False  # whether run.budget is spent: the slice is deleted too
    slice_created: str = ""  # when that slice was created (RFC 3339; empty: not known); another one is left alone


class HostStopped(HostEvent, kind="stopped"):
    """A host was told to end its container because the attempt had failed."""

    ok: bool  # whether its container has ended
    detail: str  # the problem, if there was one


class HostOutOfReach(HostEvent, kind="host out of reach"):
    """A host stopped answering."""

    problem: str  # why the host could not be reached


class HostBack(HostEvent, kind="host back"):
    """A host that was out of reach answers again."""


class StragglerFound(HostEvent, kind="straggler"):
    """A host takes longer than the others in a part of the step, over several windows of half a minute."""

    part: str  # data_wait, dispatch, save, or a part of the program's own
    factor: float  # its seconds, as a multiple of the others' median
    step: int  # step of the host when it was found


class StragglerGone(HostEvent, kind="no straggler"):
    """A host that was a straggler is as fast as the others again."""

    part: str  # as in `straggler`


class HostEnded(HostEvent, kind="host ended"):
    """The container of a host ended, or is gone."""

    exit_code: int | None  # exit code of the container; null when the container is gone, or the host rebooted under it
    oom: bool  # whether the kernel killed the container for lack of memory
    what: str  # how the container ended, in words
    finished_at: str = ""  # when it ended (RFC 3339, the host's clock); empty when that is not known


class Recovering(RunEvent, kind="recover"):
    """Another attempt will follow. It counts against a retry budget of the run."""

    after: str  # how the previous attempt ended: an outcome as in `ended`
    reason: str  # which retry of which budget follows
    delay: float  # seconds to wait first


class RoundFailed(RunEvent, kind="not recovered yet"):
    """A round of a recovery (make the slice READY, start the attempt on all hosts) failed; another round follows."""

    problem: str  # first line of the error
    reason: str  # the next step, and why
    delay: float  # seconds to wait first


class RecoveryGivenUp(RunEvent, kind="not recovered"):
    """A recovery was given up after a failed round, or the slice was deleted because run.budget is spent: no attempt
    follows until the next `tpu-launch run`."""

    problem: str  # first line of the error
    reason: str  # why no other round follows


class Recovered(RunEvent, kind="recovered"):
    """The attempt after a recovery has started."""

    seconds: Mapping[str, float]  # since the previous attempt ended, by phase: delay (with failed rounds), slice, start


class SliceReplaced(RunEvent, kind="replaced"):
    """The slice is deleted in order to be recreated: one host failed repeatedly, or hosts could not be contacted."""

    host: int  # worker index of the failing host; -1: no single host
    reason: str  # how often that host was the first cause, or why the hosts can't be used
    slice_created: str = ""  # as in `stop`


class PostMortemWritten(RunEvent, kind="post-mortem"):
    """A post-mortem archive of logs and state was written."""

    path: str  # path of the archive


class Orphaned(RunEvent, kind="orphaned"):
    """The attempt ended, and on some hosts its container may still exist: they could not be reached."""

    container: str  # name of the container, the same on every host
    hosts: tuple[int, ...]  # worker indices


class Reaped(RunEvent, kind="reaped"):
    """Orphaned containers of an attempt were removed."""

    hosts: tuple[int, ...]  # worker indices


@dataclass(frozen=True)
class Entry:
    """One line of a ledger."""

    time: str  # RFC 3339, UTC, clock of the machine that recorded it
    event: RunEvent

    def document(self) -> dict[str, Any]:
        """Builds the JSON object of this line: `time`, `event` (the kind's name) and the event's fields."""
        return {"time": self.time, "event": self.event.kind, **asdict(self.event)}


def from_document(document: Mapping[str, Any]) -> Entry:
    """Returns the event of a ledger's line, with its time. Raises Attribute-, Key- or TypeError for other JSON."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    time, kind = values.pop("time"), KINDS[values.pop("event")]
    values.pop("by", None)  # the process that recorded it in the run's bucket
    if values.get("cause") is not None:
        values["cause"] = Cause(**values["cause"])
    return Entry(time, kind(**values))
