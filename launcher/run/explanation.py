"""Takes the stacks of all hosts of a live attempt twice, without disturbing it, and explains what it waits for.

Finds a host that went silent for TensorFlow, whose own limit (10 s) is shorter than that of a stall.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.errors import LaunchError
from launcher.masking import SecretMasker
from launcher.provider import Provider
from launcher.run.hang import Hang, explain_hang
from launcher.run.ledger import Ledger
from launcher.run.logs import tail
from launcher.run.session import Session
from launcher.run.stack_traces import HostStacks, parse_stacks
from launcher.run.verdict import Cause, Kind, Verdict
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine

APART_SECONDS = 5.0
"""Between the two samples: what moves meanwhile does not hang there."""

_NO_HEARTBEAT = re.compile(
    r"(?:\(stopped sending heartbeats\):\s{1,9}|Task )/job:\w{1,40}/replica:0/task:(\d{1,6})\b(?: heartbeat timeout|$)",
    re.MULTILINE,
)
_NO_SERVICE = "RPC: /tensorflow.CoordinationService/Heartbeat"
_LAST_BYTES = 200_000  # of a log, in which the message is


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
    masker: SecretMasker,
    *,
    native: bool,
    only: Collection[int] | None = None,
) -> Explanation:
    """Takes the stacks of all hosts twice, masks secrets in them before any line is cut, and compares them. Takes 10 to
    60 s. Ignores errors of the provider.

    Args:
        progress: Newest line of each host that tells it.
        seconds: Since the last progress; 0: unknown.
        native: Take the stacks of native code too, which pauses the processes.
        only: Compare only these hosts; the result has the stacks of all. None: compare all.
    """

    def take() -> dict[int, str]:
        return {worker: masker.mask_text(text) for worker, text in provider.stacks(container, native=native).items()}

    first: dict[int, str] = {}
    try:
        first = take()
        clock.sleep(APART_SECONDS)
        second = take()
    except LaunchError:  # what is known will do
        second = first
    texts = {
        worker: f"{first.get(worker, '')}\n=== {APART_SECONDS:.0f} s later\n{text}" for worker, text in second.items()
    }
    second = {worker: text for worker, text in second.items() if only is None or worker in only}
    return Explanation(explain_hang(_parse(first), _parse(second), progress, seconds), texts)


def _parse(texts: Mapping[int, str]) -> dict[int, HostStacks]:
    return {worker: parse_stacks(text) for worker, text in texts.items()}


def write_files(ledger: Ledger, attempt: int, explanation: Explanation) -> str:
    """Writes each host's stacks and explanation.txt into the run's folder; returns their folder."""
    for worker, text in explanation.stacks.items():
        ledger.write_stack(attempt, f"host-{worker}", text)
    paragraph = explanation.hang.paragraph if explanation.hang else "no stack traces could be taken"
    return str(ledger.write_stack(attempt, "explanation", f"{paragraph}\n").parent)


def explain_stall(
    session: Session,
    attempt: int,
    verdict: Verdict,
    progress: Mapping[int, ProgressLine],
    since: float,
    masker: SecretMasker,
) -> Verdict:
    """Takes the stacks of all hosts and writes them into the run's folder, or says that it can't. Returns the verdict
    with the explanation as its cause and what the other hosts do as symptoms; without stacks, the given verdict.

    Args:
        verdict: STALLED. If its cause names a host, only the stacks of that host are explained.
        progress: Newest line of each host that tells it.
        since: When the last progress was made, by the monotonic clock.
    """
    say, clock = session.context.output.say, session.machine.clock
    told = verdict.cause or Cause(-1, "")
    say(f"the run hangs: {told.what}; taking stack traces of all hosts")
    container, seconds = session.container(attempt), clock.monotonic() - since
    only = None if told.worker < 0 else (told.worker,)
    found = explain_live(session.provider, container, progress, seconds, clock, masker, native=True, only=only)
    if only and found.hang is not None:
        found = replace(found, hang=replace(found.hang, what=f"{told.what}: {found.hang.what}"))
    try:
        say(f"the stack traces of all hosts are in {write_files(session.ledger, attempt, found)}")
    except OSError as error:
        say(f"the stack traces can't be written: {error}")
    if (hang := found.hang) is None:
        return verdict
    cause = Cause(hang.worker, f"{hang.what}; {hang.advice}")
    others = [line for line in hang.hosts if not line.startswith(f"host {hang.worker}:")]
    return replace(verdict, cause=cause, symptoms=(*verdict.symptoms, *others))


def blame_silent_host(ledger: Ledger, attempt: int, verdict: Verdict, running: Sequence[int]) -> Verdict:
    """Returns a STALLED verdict with a `running` host as its cause, if the failed host's log says that TensorFlow ended
    it because that one was silent; else the given verdict."""
    if verdict.kind is not Kind.FAILED or verdict.cause is None:
        return verdict
    path = ledger.log_file(attempt, verdict.cause.worker)
    lines = tail(path, _LAST_BYTES) if path.exists() else []
    silent = find_silent_host("\n".join(line.text for line in lines))
    if silent is None or silent not in running:
        return verdict
    symptom = f"host {verdict.cause.worker}: {verdict.cause.what}"
    what = "it stopped sending heartbeats, so TensorFlow ended the other hosts"
    return Verdict(Kind.STALLED, Cause(silent, what), (symptom, *verdict.symptoms))


def find_silent_host(log: str) -> int | None:
    """Returns the host whose heartbeats TensorFlow missed, from the log of a host that it ended: the task that the
    message names, or 0 if its coordination service did not answer; None without such a message."""
    if match := _NO_HEARTBEAT.search(log):
        return int(match[1])
    return 0 if _NO_SERVICE in log else None
