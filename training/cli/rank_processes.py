"""Runs the processes of one host as one program: one prints, fails and stops as all of them.

Each line of a process's output begins with its rank. The first process that fails is the cause: the others get SIGTERM,
then SIGKILL, within STOP_SECONDS, and the exit code is that of the cause. Signals to the parent go to every process,
which then end in their own time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from training.errors import Exit

STOP_SECONDS = 8.0  # from the first failure to SIGKILL for the rest
_POLL_SECONDS = 0.1
_SHOWN_LINES = 10
_LONGEST_LINE = 65536  # a progress bar that never ends its line is cut here
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class RankProcess:
    """A started process, and the last lines of its output."""

    rank: str
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_SHOWN_LINES))

    @property
    def code(self) -> int | None:
        """Returns the exit code, 128 + N after signal N; None while the process runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children, unless they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs a command in one process for each environment, which is added to this process's own and has RANK, all at the
    same time, and forwards signals to them. If one fails, ends the others (after a signal, waits for them instead),
    prints the last lines of the first that failed and returns its exit code. Returns 0 if none fails."""
    output = threading.Lock()
    ranks: list[RankProcess] = []
    requested: list[int] = []
    with _forwarding(ranks, requested):
        for environment in environments:
            ranks.append(start_rank(command, environment, output))
        for rank in ranks if requested else ():  # a signal came while they were started
            rank.send(requested[-1])
        failed = _await_failure(ranks)
        if failed and not requested:
            _stop(ranks)
        for rank in ranks:  # after a request to stop each ends in its own time
            rank.process.wait()
    for rank in ranks:
        rank.send(signal.SIGKILL)  # children that outlived it
        for reader in rank.readers:
            reader.join(1.0)
    if failed is None:
        return Exit.FINISHED
    assert failed.code is not None
    print(describe_failure(failed, len(ranks), bool(requested)), file=sys.stderr, flush=True)
    return failed.code


def start_rank(command: Sequence[str], environment: Mapping[str, str], output: threading.Lock) -> RankProcess:
    """Starts a process in a session of its own, and the threads that print its lines with its rank."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which forwards it
    )
    rank = RankProcess(environment["RANK"], process)
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        reader = threading.Thread(target=_print_lines, args=(rank, source, target, output), daemon=True)
        reader.start()
        rank.readers.append(reader)
    return rank


def describe_failure(failed: RankProcess, number: int, requested: bool) -> str:
    """Returns the message about the process that failed first, with its exit code and its last lines. `number`: of all
    processes here; `requested`: whether a signal asked them to stop."""
    assert failed.code is not None
    how = f"ended with exit code {failed.code}"
    if failed.process.returncode < 0:
        how = f"was killed by {signal.Signals(-failed.process.returncode).name} (exit code {failed.code})"
    after = "" if requested or number == 1 else f"; the other {number - 1} processes of this host were stopped"
    lines = "".join(f"\n  {line}" for line in failed.last_lines)
    kind = "stopped" if requested or failed.code == Exit.SAVED else "error"
    return f"tpu-train: {kind}: rank {failed.rank} {how}{after}. Its last lines:{lines or ' none'}"


def _await_failure(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Waits until a process fails, and returns it; None when all have ended well. Of several that fail within one poll,
    one that was killed is the cause, and one that lost a peer is not."""
    while True:
        codes = [rank.code for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            return min(
                failed, key=lambda rank: (rank.code == Exit.LOST_PEER, rank.process.returncode != -signal.SIGKILL)
            )
        if None not in codes:
            return None
        time.sleep(_POLL_SECONDS)


def _stop(ranks: Sequence[RankProcess]) -> None:
    """Ends the processes that still run: by SIGTERM, and after at most STOP_SECONDS by SIGKILL."""
    deadline = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        rank.send(signal.SIGTERM)
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for rank in ranks:
        rank.send(signal.SIGKILL)


@contextlib.contextmanager
def _forwarding(ranks: Sequence[RankProcess], requested: list[int]) -> Iterator[None]:
    """Forwards signals to the processes during the block. Appends to `requested` those that ask to stop: SIGTERM and
    SIGINT."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            requested.append(number)
        for rank in ranks:
            if rank.process.returncode is None:
                rank.send(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_lines(rank: RankProcess, source: IO[bytes], target: IO[str], output: threading.Lock) -> None:
    """Prints and keeps the lines of one stream of a process, as "rank N: LINE", until it ends; splits long ones."""
    for line in iter(lambda: source.readline(_LONGEST_LINE), b""):
        text = line.decode(errors="replace").rstrip("\r\n")
        rank.last_lines.append(text)
        with output:
            target.write(f"rank {rank.rank}: {text}\n")
            target.flush()
