"""Explains a hang: takes the stacks of all hosts twice, without disturbing them, and names the host that differs.
Finds a host that went silent for TensorFlow, whose own limit (10 s) is shorter than that of a stall.

Hosts of a training run wait for each other, so all but one usually wait in the same collective, and the one that is
elsewhere is the cause. Checks, in this order: a host short of memory or without stacks; a process that is dead, stopped
or stuck; Python's lock; another program; another place; another step; the same place on all hosts. `explain_hang` is
pure.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import LaunchError
from launcher.masking import SecretMasker
from launcher.run.ledger import Ledger
from launcher.run.logs import tail
from launcher.run.session import Session
from launcher.run.stack_traces import HostStacks, Place, Waits, merge_samples, parse_stacks, places
from launcher.run.verdict import Cause, Kind, Verdict
from training.telemetry.progress_line import COMPILE, ProgressLine

APART_SECONDS = 5.0  # between the two samples: what moves meanwhile does not hang there
_NO_HEARTBEAT = re.compile(
    r"(?:\(stopped sending heartbeats\):\s{1,9}|Task )/job:\w{1,40}/replica:0/task:(\d{1,6})\b(?: heartbeat timeout|$)",
    re.MULTILINE,
)
_NO_SERVICE = "RPC: /tensorflow.CoordinationService/Heartbeat"
_LAST_BYTES = 200_000  # of a log, in which the message is


@dataclass(frozen=True)
class Hang:
    """The explanation of a hang."""

    kind: str  # a key of `_ADVICE`
    worker: int  # the host that differs; -1: none does
    what: str  # one sentence
    advice: str
    hosts: tuple[str, ...] = ()  # where each host is, one line each

    @property
    def paragraph(self) -> str:
        """Returns the explanation as text that can be pasted into an issue."""
        return "\n".join([self.what, *(f"  {line}" for line in self.hosts), self.advice])


_HELPERS = ("resource_tracker", "forkserver", "py-spy", "tensorboard")  # processes that only serve others
_ADVICE = {
    "memory": "reduce what its processes hold (workers, caches, batches); the post-mortem has its kernel messages",
    "stopped": "a signal (SIGSTOP) or a debugger stopped it; `kill -CONT` resumes it",
    "ended": "its log says why it ended; its parent must exit too before the run can restart",
    "kernel": "look at the host's kernel messages and disks (post-mortem); replace the host if it happens again",
    "no stacks": "look at the host: memory, disk, kernel messages (post-mortem)",
    "program": "give all hosts the same program and settings",
    "code": "look at that line: it must not wait without a limit",
    "storage": "look at the bucket, its region, quotas and credentials; set a time-out for the request",
    "lock": "look for the thread that holds the lock (stacks)",
    "deadlock": "acquire the two locks in the same order everywhere",
    "interpreter": "a native call holds Python's lock (GIL): look at that line",
    "step": "look for a step, or a collective, that one host skips",
    "collective": "a link or a device may be at fault: `tpu-launch doctor --devices` tests them",
    "data": "look at the input pipeline, and at its bucket if threads wait for a connection (stacks)",
    "compile": "compile ahead of time with `tpu-launch preflight`; look for a huge or changing program",
}
_FULL = 0.98  # of its memory, for a host that gives no stacks
_NOT_WAITING = (Waits.CODE, Waits.STORAGE, Waits.LOCK)


@dataclass(frozen=True)
class _HostLook:
    """The state of a host, from two samples of its stacks."""

    kind: str
    what: str
    place: Place | None = None
    storage: Place | None = None  # where a thread of the host waits for storage
    line: ProgressLine | None = None  # its newest line of progress

    @property
    def compiles(self) -> bool:
        """Returns whether the host's newest line of progress says that it compiles."""
        return self.line is not None and self.line.phase == COMPILE

    @property
    def step(self) -> str:
        """Returns its step and phase, to begin a sentence: "step 7, training: "; "" without a line."""
        line = self.line
        return "" if line is None else f"step {line.step:,}{f', {line.phase}' if line.phase else ''}: "


def explain_hang(
    first: Mapping[int, HostStacks], second: Mapping[int, HostStacks], lines: Mapping[int, ProgressLine], seconds: float
) -> Hang | None:
    """Returns which host differs, and what it or all hosts wait for, from two samples of their stacks, their newest
    lines of progress, and the seconds since the last progress (0: unknown). None if `second` has no host; a host that
    gave no stacks counts as the one that differs."""
    merged = {worker: merge_samples(first.get(worker), stacks) for worker, stacks in sorted(second.items())}
    hosts = {worker: _look(stacks, lines.get(worker)) for worker, stacks in merged.items()}
    if not hosts:
        return None
    kind, odd, what = _compare(hosts)
    lasting = f" for {seconds:.0f} s" if seconds and kind not in ("program", "step") else ""
    table = tuple(f"host {worker}: {host.step}{host.what}" for worker, host in hosts.items())
    return Hang(kind, odd[0] if odd else -1, f"{what}{lasting}", _ADVICE[kind], table)


def _compare(hosts: Mapping[int, _HostLook]) -> tuple[str, Sequence[int], str]:
    """Returns the kind of a hang, the hosts that differ ([]: none), and what they or all wait for, in words."""
    for kind in ("memory", "no stacks", "ended", "stopped", "kernel", "interpreter"):
        if odd := [worker for worker, host in hosts.items() if host.kind == kind]:
            return kind, odd, f"{_others(hosts, odd)}{_where(hosts, odd)}"
    lines = {worker: host.line for worker, host in hosts.items() if host.line is not None}
    if odd := _minority({worker: line.program for worker, line in lines.items() if line.program}):
        return "program", odd, f"{_names(odd)} run{'s'[: len(odd) == 1]} another program than the other hosts"
    elsewhere = [worker for worker, host in hosts.items() if host.kind != "collective"]
    if 0 < len(elsewhere) < len(hosts):
        first, all_read = hosts[elsewhere[0]], all(hosts[worker].kind == "storage" for worker in elsewhere)
        readers = sum(host.storage is not None for host in hosts.values())
        if all_read and readers > max(1, len(hosts) / 2):  # the hosts in the collective have read ahead
            return "storage", [], f"{readers} of {len(hosts)} hosts: each {first.storage}"
        return first.kind, elsewhere, f"{_others(hosts, elsewhere)}{_where(hosts, elsewhere)}"
    if not elsewhere:  # all hosts wait in a collective
        compiling = [worker for worker, host in hosts.items() if host.compiles]
        if 0 < len(compiling) < len(hosts):
            what = f"{_names(compiling)} compile{'s'[: len(compiling) == 1]}: {hosts[compiling[0]].what}"
            return "compile", compiling, f"{_others(hosts, compiling)}{what}"
        if odd := _minority({worker: line.step for worker, line in lines.items()}):
            others = next(line.step for worker, line in lines.items() if worker not in odd)
            at = f"{_names(odd)} {'are' if len(odd) > 1 else 'is'} at step {lines[odd[0]].step:,}"
            return "step", odd, f"{at}, the other hosts are at step {others:,}"
    return _compare_alike(hosts)


def _compare_alike(hosts: Mapping[int, _HostLook]) -> tuple[str, Sequence[int], str]:
    """Returns what `_compare` does, for hosts all or none of which wait in a collective. Those of another kind than
    most differ; all hosts if no kind has a majority, or there is one host; none if several are of one kind."""
    if all(host.kind in ("compile", "collective") and host.compiles for host in hosts.values()):
        hosts = {worker: replace(host, kind="compile", what=f"compiles: {host.what}") for worker, host in hosts.items()}
    kinds = Counter(host.kind for host in hosts.values())
    (kind, count), host = kinds.most_common(1)[0], next(iter(hosts.values()))
    if len(hosts) == 1:
        return kind, [*hosts], f"{host.step}the host {host.what}"
    if count == len(hosts):
        return kind, [], f"all {count} hosts: {host.step}each {host.what}"
    odd = [worker for worker, each in hosts.items() if each.kind != kind] if count > len(hosts) / 2 else [*hosts]
    return hosts[odd[0]].kind, odd, f"{_names(odd[:1])} {hosts[odd[0]].what}"


def _others(hosts: Mapping[int, _HostLook], odd: Sequence[int]) -> str:
    """Returns what most hosts other than `odd` do: "3 of 4 hosts wait in step 7 ...; "; "" if there are none."""
    others = [host for worker, host in hosts.items() if worker not in odd]
    if not others:
        return ""
    kind, count = Counter(host.kind for host in others).most_common(1)[0]
    like = next(host for host in others if host.kind == kind)
    place = "" if like.place is None or like.place.frame is None else f" ({like.place.frame.place})"
    line = next((host.line for host in others if host.line is not None), None)
    step = f" in step {line.step + 1:,}'s collective" if line is not None and kind == "collective" else ""
    doing = "wait" if kind == "collective" else f"are elsewhere ({kind})"
    return f"{count} of {len(hosts)} hosts {doing}{step}{place}; "


def _look(stacks: HostStacks, line: ProgressLine | None) -> _HostLook:
    """Returns the state of a host, from its merged samples and newest line; its kind is "memory" if memory is short."""
    look, memory = replace(_look_at_processes(stacks), line=line), stacks.memory
    if look.kind == "no stacks" and line is not None and line.memory_used > _FULL * line.memory_total > 0:
        memory = f"uses {line.memory_used / 2**30:.1f} of {line.memory_total / 2**30:.1f} GiB of its memory"
    return replace(look, kind="memory", what=f"{memory}, and {look.what}") if memory else look


def _look_at_processes(stacks: HostStacks) -> _HostLook:
    """Returns where one host is: by the state of its processes, then who holds Python's lock, then the place of a
    thread that tells most. Its kind is "no stacks" if none could be read."""
    if not stacks.processes:
        return _HostLook("no stacks", f"gives no stack traces ({stacks.problem or 'no answer'})")
    for process in stacks.processes:
        name = f"process {process.pid} ({process.command.strip()[:60]})"
        if process.state == "T":
            return _HostLook("stopped", f"has a stopped process: {name}")
        if process.state == "D":
            return _HostLook("kernel", f"is stuck in the kernel ({process.wait_channel}): {name}")
        if process.state == "Z":
            return _HostLook("ended", f"has a dead process that its parent has not reaped: {name}")
    candidates = [
        (process, thread, place)
        for process, thread, place in places(stacks)
        if thread.frames and not any(word in process.command for word in _HELPERS)
    ]
    if not candidates:
        return _HostLook("no stacks", "gives no Python stack traces: py-spy can't read its processes")
    for process, thread, place in candidates:
        if thread.holds_gil and place.waits is not Waits.COMPILER:
            others = sum(each.name != thread.name for each in process.threads)
            return _HostLook("interpreter" if others else "code", f"holds Python's lock: it {place}", place)
    found = [place for _, thread, place in candidates if not thread.starves]
    if found and len(found) < len(candidates):
        holder = _choose(found)
        return _HostLook("interpreter", f"holds Python's lock, for which others wait: it {holder}", holder)
    found = [place for _, _, place in candidates]
    chosen = _choose(found)
    storage = next((place for place in found if place.waits is Waits.STORAGE), None)
    locked = [place for place in found if place.waits is Waits.LOCK]
    if chosen.waits is Waits.LOCK and len(locked) > 1:
        what = " and ".join(map(str, locked[:2]))
        return _HostLook("deadlock", f"has threads that wait for each other's locks: {what}", chosen)
    polling = sum(process.polling for process in stacks.processes) if chosen.waits is Waits.DATA else 0
    native = f", {polling} thread{'s'[: polling > 1]} for a connection" if polling else ""
    return _HostLook(chosen.waits.kind, f"{chosen}{native}", chosen, storage)


def _choose(found: Sequence[Place]) -> Place:
    """Returns the most telling place of a host: a main thread's; if all main threads wait for data, other threads or
    processes, that of another thread which is in code or waits for storage or a lock, if there is one."""
    mains = [place for place in found if place.thread == "MainThread"] or found[:1]
    for wanted in (Waits.CODE, Waits.COMPILER, Waits.BUSY, Waits.STORAGE, Waits.LOCK, Waits.COLLECTIVE):
        for place in mains:
            if place.waits is wanted:
                return place
    workers = [place for place in found if place.waits in _NOT_WAITING]
    return min(workers, key=lambda place: _NOT_WAITING.index(place.waits), default=mains[0])


def _minority(values: Mapping[int, Any]) -> list[int]:
    """Returns the hosts whose value is not the most frequent; of equally frequent ones, the smallest counts as usual (a
    host can't be ahead in a collective, so it skipped one). [] if all are equal."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    usual = min(counts, key=lambda value: (-counts[value], value))
    return [worker for worker, value in values.items() if value != usual]


def _where(hosts: Mapping[int, _HostLook], odd: Sequence[int]) -> str:
    """Returns where the hosts are that differ, in words; of several in different places, where the first one is."""
    what = hosts[odd[0]].what
    if all(hosts[worker].what == what for worker in odd):
        return f"{_names(odd)}{': each' if len(odd) > 1 else ''} {what}"
    return f"{_names(odd)} are elsewhere: host {odd[0]} {what}"


def _names(workers: Sequence[int]) -> str:
    """Returns "host 3", or "hosts 3, 5"."""
    return f"host{'s'[: len(workers) > 1]} {', '.join(map(str, workers))}"


def explain_live(
    session: Session,
    attempt: int,
    progress: Mapping[int, ProgressLine],
    seconds: float,
    masker: SecretMasker,
    *,
    native: bool,
    only: Collection[int] | None = None,
) -> tuple[Hang | None, Mapping[int, str]]:
    """Takes the stacks of all hosts twice, 5 s apart (10 to 60 s in all); with `native` those of native code too, which
    pauses the processes. Returns the explanation of `explain_hang` (see there for `progress` and `seconds`), of the
    hosts in `only` (None: all), and the stacks, secrets masked. Ignores errors of the provider: a first sample
    will do, and without one it returns (None, {})."""

    def take() -> dict[int, str]:
        found = session.provider.stacks(session.container(attempt), native=native)
        return {worker: masker.mask_text(text) for worker, text in found.items()}

    first: dict[int, str] = {}
    try:
        first = take()
        session.machine.clock.sleep(APART_SECONDS)
        second = take()
    except LaunchError:  # what is known will do
        second = first
    later = f"=== {APART_SECONDS:.0f} s later"
    texts = {worker: f"{first.get(worker, '')}\n{later}\n{text}" for worker, text in second.items()}
    before, after = ({worker: parse_stacks(text) for worker, text in sample.items()} for sample in (first, second))
    after = {worker: stacks for worker, stacks in after.items() if only is None or worker in only}
    return explain_hang(before, after, progress, seconds), texts


def write_files(ledger: Ledger, attempt: int, hang: Hang | None, stacks: Mapping[int, str]) -> str:
    """Writes each host's stacks and explanation.txt (without `hang`: that no stacks could be taken) into the attempt's
    folder of stacks, over earlier ones. Returns that folder. Raises OSError."""
    for worker, text in stacks.items():
        ledger.write_stack(attempt, f"host-{worker}", text)
    paragraph = hang.paragraph if hang else "no stack traces could be taken"
    return str(ledger.write_stack(attempt, "explanation", f"{paragraph}\n").parent)


def explain_stall(
    session: Session,
    attempt: int,
    verdict: Verdict,
    progress: Mapping[int, ProgressLine],
    since: float,
    masker: SecretMasker,
) -> Verdict:
    """Takes the stacks of all hosts (10 to 60 s) and writes them into the run's folder, or says that it can't. Returns
    the STALLED verdict with the explanation as its cause and what other hosts do as symptoms; if the provider fails, as
    it is. If its cause names a host, explains only that. `since`: when progress was last made (monotonic clock)."""
    say, seconds = session.context.output.say, session.machine.clock.monotonic() - since
    told = verdict.cause or Cause(-1, "")
    say(f"the run hangs: {told.what}; taking stack traces of all hosts")
    only = None if told.worker < 0 else (told.worker,)
    hang, stacks = explain_live(session, attempt, progress, seconds, masker, native=True, only=only)
    if only and hang is not None:
        hang = replace(hang, what=f"{told.what}: {hang.what}")
    try:
        say(f"the stack traces of all hosts are in {write_files(session.ledger, attempt, hang, stacks)}")
    except OSError as error:
        say(f"the stack traces can't be written: {error}")
    if hang is None:
        return verdict
    cause = Cause(hang.worker, f"{hang.what}; {hang.advice}")
    others = [line for line in hang.hosts if not line.startswith(f"host {hang.worker}:")]
    return replace(verdict, cause=cause, symptoms=(*verdict.symptoms, *others))


def blame_silent_host(ledger: Ledger, attempt: int, verdict: Verdict, running: Sequence[int]) -> Verdict:
    """Returns a STALLED verdict with a `running` host as its cause, if `verdict` is FAILED and the last 200 kB of the
    failed host's log say that TensorFlow ended it because that one was silent; else the given verdict."""
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
