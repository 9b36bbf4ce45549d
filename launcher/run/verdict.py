"""What the observations of all hosts mean together. Pure: no clock, no network.

The first host that fails ends an attempt, and it, not the hosts that failed because of it, is the *first cause*. In
data-parallel training the death of one host breaks the others within milliseconds, so order of arrival proves little.
The rules, most certain first:

1. A host that can't be reached, while others answer, is the cause of failures seen at the same time; so is one that was
  away and
   whose container was killed meanwhile.
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
    RUNNING = "running"
    SETTLING = "settling"  # something failed; the other hosts are being asked before it is judged
    FINISHED = "finished"
    SAVED = "saved"  # asked to stop, committed a checkpoint
    FAILED = "failed"  # the command failed on a host
    BAD_INPUT = "bad input"  # the trainer refused its configuration or data
    HOST_LOST = "host lost"
    PREEMPTED = "preempted"
    STALLED = "stalled"  # no host has shown a sign of life for too long
    STOPPED = "stopped"  # somebody stopped it; nothing was saved

    @property
    def ended(self) -> bool:
        return self not in (Kind.RUNNING, Kind.SETTLING)

    @property
    def exit_code(self) -> Exit:
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Kind.FINISHED: Exit.OK,
    Kind.SAVED: Exit.SAVED,
    Kind.FAILED: Exit.APPLICATION_FAILED,
    Kind.BAD_INPUT: Exit.BAD_INPUT,
    Kind.HOST_LOST: Exit.HOST_LOST,
    Kind.PREEMPTED: Exit.PREEMPTED,
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

    @property
    def reachable(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    settle: float = 4.0  # for asking all hosts once more after a failure
    blip: float = 2.5  # a host out of reach for less may just have had a hiccup
    lost: float = 120.0  # a host out of reach for so long is lost even if nobody complains
    stall: float | None = None  # no line of any host for so long, while all answer: the run hangs


@dataclass(frozen=True)
class Cause:
    """The first cause, as a person should read it."""

    worker: int
    what: str
    exit_code: int | None = None
    oom_killed: bool = False
    time: str = ""  # of the host's clock


@dataclass(frozen=True)
class Verdict:
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
) -> Verdict:
    """The state of an attempt.

    `slice_state` is what the API last said of the slice (None: there is none), `stop_requested` whether its owner asked
    to stop, `quiet` for how many seconds no host has written a line.
    """
    if slice_state is None:
        return Verdict(Kind.PREEMPTED, Cause(-1, "the slice does not exist any more"))
    if slice_state in ("PREEMPTED", "TERMINATED", "STOPPED"):
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state}"))
    ended = [view for view in views if view.container is not None and view.container.ended]
    vanished = [
        view for view in views if view.reachable and view.container is not None and view.container.status == "absent"
    ]
    failed = [view for view in ended if _code(view) not in (TrainerExit.FINISHED, TrainerExit.SAVED)]
    unreachable = [view for view in views if not view.reachable]

    if not failed and not vanished:
        if len(ended) == len(views):
            saved = any(_code(view) == TrainerExit.SAVED for view in ended)
            return Verdict(Kind.SAVED if saved else Kind.FINISHED)
        overdue = [
            view
            for view in unreachable
            if now - view.seen > limits.lost and not (view.container and view.container.ended)
        ]
        # When nobody answers it may be our own network: a host is lost when others were heard long after it.
        if overdue and max(view.seen for view in views) - min(view.seen for view in overdue) > limits.lost / 2:
            return Verdict(Kind.HOST_LOST, _lost(min(overdue, key=lambda view: view.seen), now))
        if limits.stall is not None and quiet > limits.stall and not unreachable and not stop_requested:
            return Verdict(Kind.STALLED, Cause(-1, f"no host has written a line for {quiet / 60:.1f} minutes"))
        return Verdict(Kind.RUNNING)

    first_seen = min(view.ended_seen if view.ended_seen is not None else now for view in (*failed, *vanished))
    others = [view for view in views if view not in failed and view not in vanished]
    heard = [view for view in others if view.reachable and view.seen > first_seen]
    silent = [view for view in others if view not in heard]
    settled = all(not view.reachable and now - view.seen > limits.blip for view in silent)
    explained = bool(silent) or any(_code(view) != TrainerExit.LOST_PEER for view in failed)
    if not (settled and explained) and now - first_seen < limits.settle:
        return Verdict(Kind.SETTLING)

    if stop_requested:
        # SIGTERM and SIGKILL of our own are no failures; that nothing was saved is what its owner must know.
        return Verdict(Kind.STOPPED, _exit(failed[0]) if failed else None)
    dead = [view for view in silent if not (view.container and view.container.ended)]
    if dead:
        cause = min(dead, key=lambda view: view.seen)
        return Verdict(Kind.HOST_LOST, _lost(cause, now), _symptoms([view for view in failed if view is not cause]))
    restarted = [view for view in failed if view.ended_away and _code(view) in _KILLED]
    if restarted:
        cause = min(restarted, key=lambda view: view.container.finished_at if view.container else "")
        what = "the host went away and came back; its container was killed with it"
        return Verdict(
            Kind.HOST_LOST, replace(_exit(cause), what=what), _symptoms([view for view in failed if view is not cause])
        )
    causes = [view for view in failed if _code(view) != TrainerExit.LOST_PEER]
    if not causes and vanished:
        return Verdict(
            Kind.FAILED, Cause(vanished[0].worker, "its container was removed by somebody else"), _symptoms(failed)
        )
    first = min(causes or failed, key=lambda view: view.container.finished_at if view.container else "")
    kind = Kind.BAD_INPUT if _code(first) == TrainerExit.BAD_INPUT else Kind.FAILED
    return Verdict(kind, _exit(first), _symptoms([view for view in failed if view is not first]))


_KILLED = (137, 143)  # how a container ends when its machine goes down


def _code(view: HostView) -> int | None:
    return view.container.exit_code if view.container else None


def _lost(view: HostView, now: float) -> Cause:
    return Cause(
        view.worker,
        f"the host has not answered for {now - view.seen:.0f} s ({view.problem or 'no answer yet to the last look'})",
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
