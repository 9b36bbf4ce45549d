"""The verdict on an attempt: what the observations of all hosts mean together. Pure: no clock, no network.

The first host that fails ends an attempt, and it, not the hosts that failed because of it, is the *first cause*. In
data-parallel training the death of one host breaks the others within milliseconds, so order of arrival proves little.
The rules, most certain first:

1. A host that rebooted under its container is lost, whatever exit code its engine made up when it came back. A host
   that can't be reached, while others answer, is the cause of failures seen at the same time; so is one that was away
   and whose container was killed meanwhile.
2. An exit that says "I lost a peer" (76) is a symptom as long as anything else explains it; otherwise hosts were
   cut off from each other for a while.
3. Of other failures, the one that its engine recorded first.

Before a failure is judged, every other host must have been asked once more since (or be unreachable), for a few
seconds at most: SETTLING.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from launcher.errors import Exit
from launcher.provider import ContainerState
from training.errors import Exit as TrainerExit


class Kind(enum.Enum):
    """The state of an attempt; all but the first two are its ends, each with the exit code of `tpu-launch run`."""

    RUNNING = "running", None
    SETTLING = "settling", None  # a host failed; the other hosts are polled before the failure is judged
    FINISHED = "finished", Exit.OK
    SAVED = "saved", Exit.SAVED  # the trainer was asked to stop, and committed a checkpoint
    FAILED = "failed", Exit.APPLICATION_FAILED  # the command failed on a host
    BAD_INPUT = "bad input", Exit.BAD_INPUT  # the trainer refused its configuration or data
    HOST_LOST = "host lost", Exit.HOST_LOST
    CONNECTION_LOST = "connection lost", Exit.HOST_LOST  # between hosts, all of which answer
    PREEMPTED = "preempted", Exit.PREEMPTED
    # By a user: a slice that Google takes away stays PREEMPTED until a user deletes it.
    DELETED = "slice deleted", Exit.PREEMPTED
    # No host has made progress, or without such lines written anything, for too long.
    STALLED = "stalled", Exit.STALLED
    STOPPED = "stopped", Exit.STOPPED  # the user stopped it; nothing was saved

    _value_: str
    exit_code: Exit | None

    def __new__(cls, value: str, exit_code: Exit | None = None) -> Self:
        kind = object.__new__(cls)
        kind._value_, kind.exit_code = value, exit_code
        return kind

    @property
    def ended(self) -> bool:
        return self.exit_code is not None


UNSEEN = ContainerState("")  # of a host that has not answered yet


@dataclass(frozen=True)
class HostView:
    """The state of one host, from all its observations. Times are seconds of the launcher's monotonic clock."""

    worker: int
    container: ContainerState  # as last seen
    seen: float  # when the host last answered
    problem: str = ""  # why it does not answer now; empty if it does
    failing_since: float = float("-inf")  # when the first look that asked it failed since it answered; inf: none has
    ended_seen: float | None = None  # when its container was first seen to have ended
    ended_away: bool = False  # its container ended while the host was out of reach
    answering_since: float = float("-inf")  # when it last began to answer without a gap
    asked: float = float("inf")  # when it was asked for that answer: it may have changed since

    @property
    def reachable(self) -> bool:
        return not self.problem

    @property
    def ended(self) -> bool:
        return self.container.ended

    @property
    def exit_code(self) -> int | None:
        return self.container.exit_code

    @property
    def finished(self) -> bool:
        """Whether its container ended with success, and the host has not rebooted since."""
        return self.exit_code == TrainerExit.FINISHED and not self.rebooted

    @property
    def removed(self) -> bool:
        """Whether the host answers that it has no such container."""
        return self.reachable and self.container.status == "absent"

    @property
    def rebooted(self) -> bool:
        """Whether the host rebooted under its container, so that the exit code says nothing. False if the code proves
        an end before: an OOM kill, which only an engine that saw it reports, or 75, 76 or 2 from before the reboot,
        which only the trainer gives (0 may be made up, by a reboot before the last)."""
        state = self.container
        proves_end = state.oom_killed or (state.ended_before_reboot and state.exit_code in _TRAINERS_OWN)
        return state.rebooted and not proves_end


@dataclass(frozen=True)
class Limits:
    """Time limits of `judge`, in seconds."""

    settle: float = 4.0  # for polling all hosts once more after a failure
    reconnect: float = 12.0  # for the other hosts to answer, after a failure seen when hosts came back into reach
    blip: float = 2.5  # out of reach for less than this is a hiccup
    lost: float = 120.0  # a host out of reach for this long is lost even if no other host fails
    unreachable: float = 1800.0  # all hosts out of reach for this long, while the API answers, are lost


@dataclass(frozen=True)
class Cause:
    """The first cause of the end of an attempt."""

    worker: int  # -1: no single host
    what: str
    exit_code: int | None = None
    oom_killed: bool = False
    time: str = ""  # of the host's clock


SLICE_DELETED = Cause(
    -1,
    "the slice does not exist any more, it was deleted: `tpu-launch up` creates it again, then `tpu-launch run` "
    "resumes the run",
)
SLICE_RECREATED = Cause(
    -1, "the slice was deleted, and created again: `tpu-launch up` waits for it, then `tpu-launch run` resumes the run"
)
JOBSET_DELETED = Cause(-1, "another client deleted its JobSet, or it ended 3 days ago: `tpu-launch run` resumes it")
RECREATED = "RECREATED"  # state of a slice that has the name of the attempt's slice, and is another one


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
    stall: str | None = None,
    api_only_seconds: float = 0.0,
    stepped: float = float("-inf"),
) -> Verdict:
    """Returns RUNNING, SETTLING (a failure's cause may still come), or how an attempt ended or has to be ended, with
    the first cause and its symptoms. The slice's state counts before the hosts'.

    Args:
        views: All hosts.
        now: The monotonic clock.
        slice_state: The slice's state as the API last reported it; None: it does not exist.
        stop_requested: Whether the user stopped the run: failures other than bad input then count as STOPPED.
        stall: How the attempt hangs, in words; None: it does not. Counts while all hosts answer, without a stop.
        api_only_seconds: For how many seconds the API has answered while no host has.
        stepped: When a host was last seen to do another training step, by the monotonic clock.
    """
    if slice_state in (None, "DELETING"):
        return Verdict(Kind.DELETED, SLICE_DELETED)
    if slice_state == "DELETED":
        return Verdict(Kind.STOPPED) if stop_requested else Verdict(Kind.DELETED, JOBSET_DELETED)
    if slice_state in ("CREATING", RECREATED):  # no attempt ran on it: another slice has taken the name
        return Verdict(Kind.DELETED, SLICE_RECREATED)
    if slice_state in ("PREEMPTED", "TERMINATED", "STOPPED"):
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state}"))
    if any(view.finished for view in views):  # a program can't finish on one host if another host rebooted under it
        views = [_trust_end(view) for view in views]
    if (verdict := _judge_failure(views, now, limits, stop_requested=stop_requested)) is not None:
        return verdict
    if all(view.ended for view in views):
        saved = any(view.exit_code == TrainerExit.SAVED for view in views)
        return Verdict(Kind.SAVED if saved else Kind.FINISHED)
    if api_only_seconds > limits.unreachable:
        return Verdict(Kind.HOST_LOST, _describe_unreachable(views, api_only_seconds))
    verdict = _judge_lost(views, now, limits, stepped)
    if stop_requested or not all(view.reachable for view in views):
        return verdict or Verdict(Kind.RUNNING)
    if stall is not None:
        return Verdict(Kind.STALLED, Cause(-1, stall))
    return Verdict(Kind.RUNNING)


def _trust_end(view: HostView) -> HostView:
    """Returns a host's view as if it had not rebooted, if its container had finished before; else the given view."""
    state = view.container
    finished = state.ended_before_reboot and state.exit_code == TrainerExit.FINISHED
    return replace(view, container=replace(state, rebooted=False)) if finished else view


def _judge_lost(views: Sequence[HostView], now: float, limits: Limits, stepped: float) -> Verdict | None:
    """Returns HOST_LOST for a host, not seen to end its container, that has been silent for over `limits.lost` seconds
    and whose looks have failed for over half of that, if another host has since answered for over half of that without
    a gap; else None. A training step, last seen at `stepped` (monotonic clock), ends a silence, but is no such
    answer."""
    unreachable = [view for view in views if not view.reachable]
    # A look may take as long as a short limit: one that failed late shows little.
    failing = [view for view in unreachable if now - view.failing_since > limits.lost / 2 and not view.ended]
    overdue = [view for view in failing if now - max(view.seen, stepped) > limits.lost]
    # If no host answers, our own network may be down: a host is lost if others answered for long after it.
    for lost in sorted(overdue, key=lambda view: view.seen):
        if any(view.seen - max(view.answering_since, lost.seen) > limits.lost / 2 for view in views):
            return Verdict(Kind.HOST_LOST, _describe_lost(lost, now))
    return None


def _judge_failure(views: Sequence[HostView], now: float, limits: Limits, *, stop_requested: bool) -> Verdict | None:
    """Returns None if no host failed; SETTLING while others may still report an earlier cause; then the verdict: after
    a requested stop STOPPED or BAD_INPUT, otherwise by the first cause, with the other failed hosts as its symptoms."""
    failed = [view for view in views if view.ended and (view.rebooted or view.exit_code not in _SUCCESSES)]
    removed = [view for view in views if view.removed]
    if not failed and not removed:
        return None
    first_seen = min(view.ended_seen if view.ended_seen is not None else now for view in (*failed, *removed))
    others = [view for view in views if view not in failed and view not in removed]
    silent = [view for view in others if not view.reachable or view.container is UNSEEN or view.seen <= first_seen]
    returned = any(view.answering_since >= first_seen - limits.blip for view in (*failed, *removed))
    if returned and silent and now - first_seen < limits.reconnect:  # all hosts were out of reach: await the others
        return Verdict(Kind.SETTLING)
    not_asked_since = [view for view in others if view in silent or view.asked <= first_seen]
    settled = all(not view.reachable and now - view.seen > limits.blip for view in not_asked_since)
    explained = bool(silent) or any(view.rebooted or view.exit_code != TrainerExit.LOST_PEER for view in failed)
    if not (settled and explained) and now - first_seen < limits.settle:
        return Verdict(Kind.SETTLING)
    if stop_requested:
        # Our own SIGTERM and SIGKILL are no failures; the user must know that nothing was saved. A stop never makes a
        # trainer refuse its input: the user must know that before the next `run`.
        refused = [view for view in failed if view.exit_code == TrainerExit.BAD_INPUT and not view.rebooted]
        kind, shown = (Kind.BAD_INPUT, refused) if refused else (Kind.STOPPED, failed)
        return Verdict(kind, _describe_exit_of(_first(shown)) if shown else None)
    kind, cause = _find_first_cause(failed, removed, silent, now)
    rest = [view for view in failed if view.worker != cause.worker]
    return Verdict(kind, cause, tuple(f"host {view.worker}: {describe_exit(view.container)}" for view in rest))


def _find_first_cause(
    failed: Sequence[HostView], removed: Sequence[HostView], silent: Sequence[HostView], now: float
) -> tuple[Kind, Cause]:
    """Returns the kind of the end and its first cause, in this order: a rebooted host, a lost one or one that went away
    and came back (HOST_LOST), a removed container, the first failed one (by its exit code)."""
    if rebooted := [view for view in failed if view.rebooted]:
        return Kind.HOST_LOST, _describe_exit_of(rebooted[0], "the host rebooted, and its container was killed with it")
    # No program refuses its input because a host is lost.
    refused = any(view.exit_code == TrainerExit.BAD_INPUT for view in failed)
    if not refused and (lost := _find_lost(failed, removed, silent, now)):
        return Kind.HOST_LOST, lost
    if removed and all(view.exit_code == TrainerExit.LOST_PEER for view in failed):
        return Kind.FAILED, Cause(removed[0].worker, "its container was removed, and not by tpu-launch")
    first = _first(failed)
    return _KINDS.get(first.exit_code, Kind.FAILED), _describe_exit_of(first)


def _find_lost(
    failed: Sequence[HostView], removed: Sequence[HostView], silent: Sequence[HostView], now: float
) -> Cause | None:
    """Returns the loss of a host as the cause: of the one of `silent` (hosts that do not answer) that answered least
    recently, or else of one that went away and came back; None without one."""
    if lost := [view for view in silent if not view.ended]:
        return _describe_lost(min(lost, key=lambda view: view.seen), now)
    killed = [view for view in failed if view.exit_code in _KILLED and not view.container.oom_killed]
    if restarted := [view for view in killed if view.ended_away]:
        host = min(restarted, key=lambda view: view.container.finished_at)
        return _describe_exit_of(host, "the host went away and came back; its container was killed with it")
    if away := [view for view in removed if view.ended_away]:
        return Cause(away[0].worker, "the host went away and came back without its container")
    return None


_KINDS: dict[int | None, Kind] = {
    TrainerExit.BAD_INPUT: Kind.BAD_INPUT,
    TrainerExit.LOST_PEER: Kind.CONNECTION_LOST,
}  # by the first cause's exit code
_SUCCESSES = (TrainerExit.FINISHED, TrainerExit.SAVED)
_TRAINERS_OWN = (TrainerExit.SAVED, TrainerExit.BAD_INPUT, TrainerExit.LOST_PEER)
_KILLED = (137, 143, 255)  # how a container ends when its machine goes down


def _first(failed: Sequence[HostView]) -> HostView:
    """Returns the host whose engine recorded the earliest exit; one that lost a peer only if there is no other."""
    causes = [view for view in failed if view.exit_code != TrainerExit.LOST_PEER]
    return min(causes or failed, key=lambda view: view.container.finished_at)


def _describe_lost(view: HostView, now: float) -> Cause:
    return Cause(
        view.worker,
        f"the host has not answered for {now - view.seen:.0f} s ({view.problem or 'no answer yet to the last look'})",
    )


def _describe_unreachable(views: Sequence[HostView], seconds: float) -> Cause:
    """Returns the cause of an end by all hosts being out of reach for `seconds` while the API answers; it names the
    host that answered least recently, of those not seen to end."""
    first = min((view for view in views if not view.ended), key=lambda view: view.seen)
    who = "no host has" if len(views) > 1 else "the host has not"
    return Cause(
        first.worker,
        f"{who} answered for {seconds / 60:.0f} minutes, while Google's API did ({first.problem}); "
        "what runs on is ended before the next attempt starts",
    )


def _describe_exit_of(view: HostView, what: str = "") -> Cause:
    """Returns the cause of an end by the exit of a host's container; `what` says it in other words than its code."""
    state = view.container
    return Cause(view.worker, what or describe_exit(state), state.exit_code, state.oom_killed, state.finished_at)


def describe_exit(state: ContainerState) -> str:
    """Returns how a container exited, in words."""
    code = state.exit_code
    if state.oom_killed:
        return f"killed: out of host memory (exit code {code})"
    meanings: dict[int | None, str] = {
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
    text = meanings.get(code, f"exit code {code}")
    return f"{text}: {state.error}" if state.error else text


def explain(verdict: Verdict) -> list[str]:
    """Returns a verdict in a few lines for the user, the first cause first."""
    if verdict.cause is None:
        return [verdict.kind.value]
    where = f"host {verdict.cause.worker}: " if verdict.cause.worker >= 0 else ""
    when = f", at {verdict.cause.time}" if verdict.cause.time else ""
    lines = [f"{verdict.kind.value}: {where}{verdict.cause.what}{when}"]
    return lines + [f"as a result: {symptom}" for symptom in verdict.symptoms]
