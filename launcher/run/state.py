"""The state of a run: one pure function from its events, and one from what its hosts answer.

    NEW ──AttemptBegan──► STARTING ──Started──► RUNNING ──Ended──► ENDED or FINISHED
                            │  ▲                   │                 │
                 hosts say: │  └───────────────────┼───AttemptBegan──┘
                     INTERRUPTED           EXITED or VANISHED

Everything that has to know where a run stands asks for its `RunState`.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from launcher.provider import ContainerState
from launcher.run import events
from launcher.run.verdict import Kind, Verdict


class Phase(enum.Enum):
    """Where a run stands."""

    NEW = "new"  # no attempt has begun
    STARTING = "starting"  # an attempt has begun; it is not known to run on all hosts
    RUNNING = "running"  # the attempt was started on all hosts
    ENDED = "ended"  # the last attempt has ended; another may follow
    FINISHED = "finished"  # the last attempt finished; nothing is left to run

    # Seen only on the hosts, of an attempt whose end is not recorded:
    INTERRUPTED = "interrupted"  # its start was interrupted: not every host runs it
    EXITED = "exited"  # its containers have ended on every host
    VANISHED = "vanished"  # no host has a container of it any more

    @property
    def is_open(self) -> bool:
        """Whether an attempt was begun and its end is not recorded."""
        return self in (Phase.STARTING, Phase.RUNNING)


@dataclass(frozen=True)
class RunState:
    """All that a run's events say together."""

    phase: Phase = Phase.NEW
    last_attempt: events.AttemptBegan | None = None
    outcome: str | None = None  # how the last attempt ended ("finished", ...); None while it is open, and without one
    stops: int = 0  # how many stops were requested in the whole run
    acknowledged_stops: int = 0  # how many of them had been requested when `tpu-launch run` was last asked for
    orphans: tuple[events.Orphaned, ...] = ()  # containers that may still be on hosts, and that were not removed since
    recovering: events.Recovering | None = None
    """The recovery that was begun, and has neither started an attempt on all hosts nor been given up or stopped."""

    budget_spent: bool = False  # whether run.budget stopped the run last, and its slice is not known to be deleted
    supervisions: int = 0  # how many times a process took the run's lease
    supervisor: str = ""  # the last of them

    @property
    def attempt(self) -> int:
        """Number of the last attempt; -1 before the first."""
        return self.last_attempt.attempt if self.last_attempt else -1

    @property
    def stop_requested(self) -> bool:
        """Whether the run was stopped, and `tpu-launch run` was not asked for since."""
        return self.stops > self.acknowledged_stops

    def has_ended(self, attempt: int) -> bool:
        """Returns whether the end of an attempt is known, whether or not another attempt follows."""
        return attempt < self.attempt or not self.phase.is_open


def state_of(recorded: Iterable[events.RunEvent]) -> RunState:
    """Returns the state of a run with these events, oldest first."""
    state = RunState()
    for event in recorded:
        match event:
            case events.AttemptBegan():
                state = replace(state, phase=Phase.STARTING, last_attempt=event, outcome=None)
            case events.Started() if event.attempt == state.attempt and state.phase is Phase.STARTING:
                state = replace(state, phase=Phase.RUNNING, recovering=None)
            case events.Ended():
                phase = Phase.FINISHED if event.outcome == Kind.FINISHED.value else Phase.ENDED
                of_round = state.phase is Phase.STARTING and event.outcome in (events.NOT_STARTED, Kind.PREEMPTED.value)
                recovering = state.recovering if of_round else None
                state = replace(state, phase=phase, outcome=event.outcome, recovering=recovering)
            case events.Recovering():
                state = replace(state, recovering=event)
            case events.RecoveryGivenUp():
                state = replace(state, recovering=None, budget_spent=False)
            case events.RunStopRequested():
                state = replace(state, stops=state.stops + 1, recovering=None, budget_spent=event.by_budget)
            case events.Supervised():
                state = replace(state, supervisions=state.supervisions + 1, supervisor=event.holder)
            case events.Requested():
                state = replace(state, acknowledged_stops=event.stops, budget_spent=False)
            case events.Orphaned():
                state = replace(state, orphans=(*state.orphans, event))
            case events.Reaped():
                reaped = (event.attempt, set(event.hosts))
                left = tuple(each for each in state.orphans if (each.attempt, set(each.hosts)) != reaped)
                state = replace(state, orphans=left)
    return state


def recorded_ends(recorded: Iterable[events.RunEvent], attempt: int) -> dict[int, ContainerState]:
    """Returns the ends of an attempt's containers, by worker, that earlier supervisors recorded with an exit code."""
    return {
        event.host: ContainerState("exited", event.exit_code, event.oom, finished_at=event.finished_at)
        for event in recorded
        if isinstance(event, events.HostEnded) and event.attempt == attempt and event.exit_code is not None
    }


def recorded_verdict(recorded: Iterable[events.RunEvent], attempt: int) -> Verdict | None:
    """Returns the verdict by which an earlier supervisor ends an attempt; None if none was recorded."""
    judged = [event for event in recorded if isinstance(event, events.Judged) and event.attempt == attempt]
    return judged[-1].verdict if judged else None


def phase_on_hosts(phase: Phase, containers: Sequence[ContainerState], *, may_lack_secrets: bool) -> Phase:
    """Returns the phase of an open attempt (`phase` by its ledger: STARTING or RUNNING), given its containers on all
    hosts: INTERRUPTED if it is STARTING and a container never ran or `may_lack_secrets`; else VANISHED if none ever
    ran, `phase` while one runs, and EXITED. `may_lack_secrets`: whether one may lack secrets that died with the
    launcher that started it."""
    begun = [container.running or container.ended for container in containers]
    if phase is Phase.STARTING and (not all(begun) or may_lack_secrets):
        return Phase.INTERRUPTED
    if not any(begun):
        return Phase.VANISHED
    return phase if any(container.running for container in containers) else Phase.EXITED
