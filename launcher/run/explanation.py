"""Takes the stacks of all hosts of a live attempt twice, without disturbing it, and explains what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from launcher.errors import LaunchError
from launcher.masking import SecretMasker
from launcher.provider import Provider
from launcher.run.hang import Hang, explain_hang
from launcher.run.ledger import Ledger
from launcher.run.session import Session
from launcher.run.stack_traces import HostStacks, parse_stacks
from launcher.run.verdict import Cause, Verdict
from training.machine.clock import Clock
from training.telemetry.progress_line import ProgressLine

APART_SECONDS = 5.0
"""Between the two samples: what moves meanwhile does not hang there."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of a hang, None where no stacks could be taken, and the stacks of each host."""

    hang: Hang | None
    stacks: Mapping[int, str]


def explain_live(
    provider: Provider,
    container: str,
    progress: Mapping[int, ProgressLine],
    seconds: float,
    clock: Clock,
    *,
    native: bool,
) -> Explanation:
    """Takes the stacks of all hosts twice and compares them. Takes 10 to 60 s. `native`: of native code too, which
    pauses the processes.

    Args:
        progress: Newest line of each host that tells it.
        seconds: Since the last progress; 0: unknown.
    """
    first: dict[int, str] = {}
    second: dict[int, str] = {}
    try:
        first = provider.stacks(container, native=native)
        clock.sleep(APART_SECONDS)
        second = provider.stacks(container, native=native)
    except LaunchError:  # what is known will do
        second = second or first
    texts = {
        worker: f"{first.get(worker, '')}\n=== {APART_SECONDS:.0f} s later\n{text}" for worker, text in second.items()
    }
    return Explanation(explain_hang(_parse(first), _parse(second), progress, seconds), texts)


def _parse(texts: Mapping[int, str]) -> dict[int, HostStacks]:
    return {worker: parse_stacks(text) for worker, text in texts.items()}


def keep(ledger: Ledger, attempt: int, explanation: Explanation, masker: SecretMasker) -> str:
    """Writes stacks and explanation into the run's folder, masked, and returns the folder."""
    for worker, text in explanation.stacks.items():
        ledger.write_stack(attempt, f"host-{worker}", masker.mask_text(text))
    paragraph = explanation.hang.paragraph if explanation.hang else "no stack traces could be taken"
    return str(ledger.write_stack(attempt, "explanation", masker.mask_text(f"{paragraph}\n")).parent)


def explain_stall(
    session: Session,
    attempt: int,
    verdict: Verdict,
    progress: Mapping[int, ProgressLine],
    since: float,
    masker: SecretMasker,
) -> Verdict:
    """Takes the stacks of all hosts, keeps and prints why the attempt hangs, and returns the verdict with it.

    Args:
        progress: Newest line of each host that tells it.
        since: When the last progress was made, by the monotonic clock.
    """
    say, clock = session.context.output.say, session.machine.clock
    say(f"the run hangs: {verdict.cause.what if verdict.cause else ''}; taking the stacks of all hosts")
    container = session.container(attempt)
    found = explain_live(session.provider, container, progress, clock.monotonic() - since, clock, native=True)
    try:
        say(f"the stacks of all hosts' processes are in {keep(session.ledger, attempt, found, masker)}")
    except OSError as error:
        say(f"the stacks can't be kept: {error}")
    if (hang := found.hang) is None:
        return verdict
    cause = Cause(hang.worker, masker.mask_text(f"{hang.what}; {hang.advice}"))
    others = [line for line in hang.hosts if not line.startswith(f"host {hang.worker}:")]
    return replace(verdict, cause=cause, symptoms=tuple(masker.mask_text(line) for line in others))
