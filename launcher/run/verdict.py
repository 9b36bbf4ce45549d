"""The verdict on an attempt: what the observations of all hosts mean together. Pure: no clock, no network.

The first host that fails ends an attempt, and it, not the hosts that failed because of it, is the *first cause*. In
data-parallel training the death of one host breaks the others within milliseconds, so order of arrival proves little.
The rules, most certain first:

1. A host that rebooted under its container is lost, whatever exit code its engine made up when it came back. A host
   that can't be reached, while others answer, is the cause of failures seen at the same time; so is one that was away
   and whose container was killed meanwhile.
2. An exit that says "I lost a peer" (76) is a symptom as long as anything else explains it.
3. Of other failures, the one that its engine recorded first.

Before a failure is judged, every other host must have been looked at once more since (or be unreachable), for a few
seconds at most: SETTLING.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.errors import Exit
from launcher.provider import ContainerState
from training.errors import Exit as TrainerExit


class Kind(enum.Enum):
    """The state of an attempt. All but the first two are ends of it."""

    RUNNING = "running"
    SETTLING = "settling"  # something failed; the other hosts are being asked before it is judged
    FINISHED = "finished"
    SAVED = "saved"  # asked to stop, committed a checkpoint
    FAILED = "failed"  # the command failed on a host
    BAD_INPUT = "bad input"  # the trainer refused its configuration or data
    HOST_LOST = "host lost"
    PREEMPTED = "preempted"
    DELETED = "slice deleted"  # by a person: what Google takes away stays, PREEMPTED, until somebody deletes it
    STALLED = "stalled"  # no host has shown a sign of life for too long
    STOPPED = "stopped"  # somebody stopped it; nothing was saved

    @property
    def ended(self) -> bool:
        """Whether the attempt is over."""
        return self not in (Kind.RUNNING, Kind.SETTLING)

    @property
    def exit_code(self) -> Exit:
        """Exit code of `tpu-launch run` when the run ends so."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Kind.FINISHED: Exit.OK,
    Kind.SAVED: Exit.SAVED,
    Kind.FAILED: Exit.APPLICATION_FAILED,
    Kind.BAD_INPUT: Exit.BAD_INPUT,
    Kind.HOST_LOST: Exit.HOST_LOST,
    Kind.PREEMPTED: Exit.PREEMPTED,
    Kind.DELETED: Exit.PREEMPTED,
    Kind.STALLED: Exit.STALLED,
    Kind.STOPPED: Exit.STOPPED,
}


@dataclass(frozen=True)
class HostView:
    """All that is known of one host. Times are seconds of the launcher's monotonic clock."""

    worker: int
    container: ContainerState | None  # as last seen
    seen: float  # when the host last answered
    problem: str = ""  # why it does not answer now; empty when it does
    ended_seen: float | None = None  # when its container was first seen to have ended
    ended_away: bool = False  # its container ended while the host was out of reach
    answering_since: float = float("-inf")  # since when it has answered without a gap

    @property
    def reachable(self) -> bool:
        """Whether it answered when it was last asked."""
        return not self.problem

    @property
    def ended(self) -> bool:
        """Whether its container was seen to have ended."""
        return self.container is not None and self.container.ended

    @property
    def removed(self) -> bool:
        """Whether it answers that it has no such container."""
        return self.reachable and self.container is not None and self.container.status == "absent"

    @property
    def rebooted(self) -> bool:
        """Whether its host rebooted under the container: the exit code says nothing then. A code that only the trainer
        gives counts as it is when it was there before the reboot; 0 may be made up, of a reboot before the last. That a
        container was killed for its memory is known only to an engine that saw it."""
        state = self.container
        if state is None or not (state.ended and state.rebooted) or state.oom_killed:
            return False
        return not (state.ended_before_reboot and state.exit_code in (TrainerExit.SAVED, TrainerExit.BAD_INPUT))

    @property
    def lost_peer_first(self) -> bool:
        """Whether its program had lost a peer before its host rebooted."""
        state = self.container
        return state is not None and state.ended_before_reboot and state.exit_code == TrainerExit.LOST_PEER

    @property
    def oom_killed(self) -> bool:
        """Whether its container was killed for its memory: the program's failure, wherever the host was meanwhile."""
        return self.container is not None and self.container.oom_killed

    @property
    def exit_code(self) -> int | None:
        """Of its container; None while that runs."""
        return self.container.exit_code if self.container else None

    @property
    def finished_at(self) -> str:
        """When its container ended, by the host's clock (RFC 3339); empty while it runs."""
        return self.container.finished_at if self.container else ""


@dataclass(frozen=True)
class Limits:
    """How long things are waited for, in seconds."""

    settle: float = 4.0  # for asking all hosts once more after a failure
    reconnect: float = 12.0  # for the others to answer, after a failure that was found when hosts came back into reach
    blip: float = 2.5  # a host out of reach for less may just have had a hiccup
    lost: float = 120.0  # a host out of reach for so long is lost even if nobody complains
    unreachable: float = 1800.0  # no host answers for so long, while the API does: they are lost
    stall: float | None = None  # no line of any host for so long, while all answer: the run hangs


@dataclass(frozen=True)
class Cause:
    """The first cause, as a person should read it."""

    worker: int
    what: str
    exit_code: int | None = None
    oom_killed: bool = False
    time: str = ""  # of the host's clock


SLICE_DELETED = Cause(
    -1,
    "the slice does not exist any more, somebody deleted it: `tpu-launch up` creates it again, then `tpu-launch run` "
    "resumes the run",
)


@dataclass(frozen=True)
class Verdict:
    """The state of an attempt, and the first cause of its end."""

    kind: Kind
    cause: Cause | None = None
    symptoms: tuple[str, ...] = ()


def judge(
    views: Sequence[HostView],
    now: float,
    limits: Limits,
    *,
    slice_state: str | None = "READY",
    stop_requested: bool = False,
    quiet: float = 0.0,
    api_alone: float = 0.0,
) -> Verdict:
    """The state of an attempt.

    `slice_state` is what the API last said of the slice (None: there is none), `stop_requested` whether its owner asked
    to stop, `quiet` for how many seconds no host has written a line, `api_alone` for how many the API has answered and
    no host has.
    """
    if slice_state in (None, "DELETING"):
        return Verdict(Kind.DELETED, SLICE_DELETED)
    if slice_state in ("PREEMPTED", "TERMINATED", "STOPPED"):
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state}"))
    finished = any(view.exit_code == TrainerExit.FINISHED and not view.rebooted for view in views)
    if finished:  # a program does not finish on one host when another reboots under it
        views = [_trust_end(view) for view in views]
    failed = [view for view in views if view.ended and (view.rebooted or view.exit_code not in _SUCCESSES)]
    removed = [view for view in views if view.removed]
    if failed or removed:
        return _judge_failure(views, failed, removed, now, limits, stop_requested=stop_requested)
    if all(view.ended for view in views):
        saved = any(view.exit_code == TrainerExit.SAVED for view in views)
        return Verdict(Kind.SAVED if saved else Kind.FINISHED)
    if api_alone > limits.unreachable:
        return Verdict(Kind.HOST_LOST, _unreachable(views, api_alone))
    return _judge_running(views, now, limits, stop_requested=stop_requested, quiet=quiet)


def _trust_end(view: HostView) -> HostView:
    """The view of a host that finished before it rebooted, as if it had not rebooted."""
    state = view.container
    if state is None or not (state.ended_before_reboot and state.exit_code == TrainerExit.FINISHED):
        return view
    return replace(view, container=replace(state, rebooted=False))


def _judge_running(
    views: Sequence[HostView], now: float, limits: Limits, *, stop_requested: bool, quiet: float
) -> Verdict:
    """The verdict while no host has failed: one may be lost, or all may be stalled."""
    unreachable = [view for view in views if not view.reachable]
    overdue = [view for view in unreachable if now - view.seen > limits.lost and not view.ended]
    # When nobody answers it may be our own network: a host is lost when others were heard for long after it.
    for lost in sorted(overdue, key=lambda view: view.seen):
        if any(view.seen - max(view.answering_since, lost.seen) > limits.lost / 2 for view in views):
            return Verdict(Kind.HOST_LOST, _lost(lost, now))
    if limits.stall is not None and quiet > limits.stall and not unreachable and not stop_requested:
        return Verdict(Kind.STALLED, Cause(-1, f"no host has written a line for {quiet / 60:.1f} minutes"))
    return Verdict(Kind.RUNNING)


def _judge_failure(
    views: Sequence[HostView],
    failed: Sequence[HostView],
    removed: Sequence[HostView],
    now: float,
    limits: Limits,
    *,
    stop_requested: bool,
) -> Verdict:
    """The verdict once a host has failed, or its container is gone: settling, then the first cause."""
    first_seen = min(view.ended_seen if view.ended_seen is not None else now for view in (*failed, *removed))
    others = [view for view in views if view not in failed and view not in removed]
    silent = [view for view in others if not (view.reachable and view.seen > first_seen)]
    settled = all(not view.reachable and now - view.seen > limits.blip for view in silent)
    explained = bool(silent) or any(view.rebooted or view.exit_code != TrainerExit.LOST_PEER for view in failed)
    # Nobody was asked while all were out of reach: those that are not back yet have the time of a new connection.
    returned = any(view.answering_since >= first_seen - limits.blip for view in (*failed, *removed))
    if returned and silent and now - first_seen < limits.reconnect:
        return Verdict(Kind.SETTLING)
    if not (settled and explained) and now - first_seen < limits.settle:
        return Verdict(Kind.SETTLING)
    refused = [view for view in failed if view.exit_code == TrainerExit.BAD_INPUT and not view.rebooted]
    if stop_requested and refused:  # no stop makes a program say that: its owner must know before the next `run`
        return Verdict(Kind.BAD_INPUT, _exit(_first(refused)))
    if stop_requested:
        # SIGTERM and SIGKILL of our own are no failures; that nothing was saved is what its owner must know.
        return Verdict(Kind.STOPPED, _exit(_first(failed)) if failed else None)

    def symptoms(cause: HostView) -> tuple[str, ...]:
        return _symptoms([view for view in failed if view is not cause])

    if rebooted := [view for view in failed if view.rebooted]:
        cause = min(rebooted, key=lambda view: (view.lost_peer_first, view.worker))
        what = "the host rebooted, and its container was killed with it"
        return Verdict(Kind.HOST_LOST, replace(_exit(cause), what=what), symptoms(cause))
    if lost := [view for view in silent if not view.ended]:
        cause = min(lost, key=lambda view: view.seen)
        return Verdict(Kind.HOST_LOST, _lost(cause, now), symptoms(cause))
    if restarted := [view for view in failed if view.ended_away and view.exit_code in _KILLED and not view.oom_killed]:
        cause = min(restarted, key=lambda view: view.finished_at)
        what = "the host went away and came back; its container was killed with it"
        return Verdict(Kind.HOST_LOST, replace(_exit(cause), what=what), symptoms(cause))
    if away := [view for view in removed if view.ended_away]:
        what = "the host went away and came back without its container"
        return Verdict(Kind.HOST_LOST, Cause(away[0].worker, what), symptoms(away[0]))
    if removed and all(view.exit_code == TrainerExit.LOST_PEER for view in failed):
        cause = removed[0]
        return Verdict(Kind.FAILED, Cause(cause.worker, "its container was removed by somebody else"), symptoms(cause))
    cause = _first(failed)
    kind = Kind.BAD_INPUT if cause.exit_code == TrainerExit.BAD_INPUT else Kind.FAILED
    return Verdict(kind, _exit(cause), symptoms(cause))


_SUCCESSES = (TrainerExit.FINISHED, TrainerExit.SAVED)
_KILLED = (137, 143, 255)  # how a container ends when its machine goes down


def _first(failed: Sequence[HostView]) -> HostView:
    """The host whose exit its engine recorded first; one that lost a peer only when there is no other."""
    causes = [view for view in failed if view.exit_code != TrainerExit.LOST_PEER]
    return min(causes or failed, key=lambda view: view.finished_at)


def _lost(view: HostView, now: float) -> Cause:
    return Cause(
        view.worker,
        f"the host has not answered for {now - view.seen:.0f} s ({view.problem or 'no answer yet to the last look'})",
    )


def _unreachable(views: Sequence[HostView], seconds: float) -> Cause:
    first = min((view for view in views if not view.ended), key=lambda view: view.seen)
    who = "no host has" if len(views) > 1 else "the host has not"
    return Cause(
        first.worker,
        f"{who} answered for {seconds / 60:.0f} minutes, while Google's API did ({first.problem or 'no answer yet'}); "
        "what runs on is ended before the next attempt starts",
    )


def _exit(view: HostView) -> Cause:
    state = view.container
    assert state is not None
    return Cause(view.worker, describe_exit(state), state.exit_code, state.oom_killed, state.finished_at)


def _symptoms(views: Sequence[HostView]) -> tuple[str, ...]:
    return tuple(f"host {view.worker}: {describe_exit(view.container)}" for view in views if view.container is not None)


def describe_exit(state: ContainerState) -> str:
    """An exit code in words."""
    code = state.exit_code
    if state.oom_killed:
        return f"killed: out of host memory (exit code {code})"
    meanings = {
        2: "refused its configuration or data (exit code 2)",
        75: "stopped and saved (exit code 75)",
        76: "lost the connection to another host (exit code 76)",
        125: "the container engine failed (exit code 125)",
        126: "the command can't be executed (exit code 126)",
        127: "the command was not found in the image (exit code 127)",
        137: "killed by SIGKILL (exit code 137)",
        139: "crashed by a segmentation fault (exit code 139)",
        143: "ended by SIGTERM (exit code 143)",
    }
    text = meanings.get(code if code is not None else -1, f"exit code {code}")
    return f"{text}: {state.error}" if state.error else text
