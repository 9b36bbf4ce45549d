"""Parses what `container_scripts.DUMP_STACKS` prints, and tells what a thread of a training program waits for. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


class Waits(enum.Enum):
    """The kind of place at which a thread is."""

    CODE = "is in"
    STORAGE = "waits for storage in"
    LOCK = "waits for a lock in"
    QUEUE = "waits for another thread or process in"
    DATA = "waits for data in"
    COLLECTIVE = "waits for devices or other hosts in"


@dataclass(frozen=True)
class Frame:
    """One call: its function, and the file and line at which it is."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True)
class ThreadStack:
    """The calls of a thread, innermost first."""

    name: str
    frames: tuple[Frame, ...]
    holds_gil: bool = False


@dataclass(frozen=True)
class ProcessStacks:
    """A process: its state as the kernel reports it ("S", "T", "D", "Z"), and the stacks of its Python threads."""

    pid: int
    state: str
    wait_channel: str
    command: str
    threads: tuple[ThreadStack, ...] = ()


@dataclass(frozen=True)
class HostStacks:
    """The Python processes of a host, and the text of the lines at which they are."""

    processes: tuple[ProcessStacks, ...] = ()
    sources: Mapping[tuple[str, int], str] = field(default_factory=dict)
    problem: str = ""
    """The output's last line, if there was no process in it."""


_PROCESS = re.compile(r"process (\d{1,10}) \[(\w)?[^\]]*\] \[(\S*?)\] (.*)")
_THREAD = re.compile(r'Thread \S+ \((\S+)\)(?:: "(.*)")?$')
_FRAME = re.compile(r"    (.{1,300}?) \((.{1,1000}):(\d{1,9})\)$")
_SOURCE = re.compile(r"source (.{1,1000}):(\d{1,9}) (.*)")


def parse_stacks(output: str) -> HostStacks:
    """Returns the processes and sources in the output of stacks.sh; a problem if it has no process."""
    processes: list[ProcessStacks] = []
    threads: list[ThreadStack] = []
    frames: list[Frame] = []
    sources = {}

    def close() -> None:
        if threads:
            threads[-1] = ThreadStack(threads[-1].name, tuple(frames), threads[-1].holds_gil)
        if processes:
            last = processes[-1]
            processes[-1] = ProcessStacks(last.pid, last.state, last.wait_channel, last.command, tuple(threads))
        frames.clear()

    for line in output.splitlines():
        if match := _PROCESS.match(line):
            close()
            threads.clear()
            processes.append(ProcessStacks(int(match[1]), match[2] or "", match[3], match[4].strip()))
        elif (match := _THREAD.match(line)) and processes:
            close()
            threads.append(ThreadStack(match[2] or "", (), "gil" in match[1]))
        elif (match := _FRAME.match(line)) and threads:
            frames.append(Frame(match[1], match[2], int(match[3])))
        elif match := _SOURCE.match(line):
            sources[match[1], int(match[2])] = match[3].strip()
    close()
    problem = "" if processes else (output.strip().splitlines() or ["no answer"])[-1][:200]
    return HostStacks(tuple(processes), sources, problem)


# Kinds of frames, by "file function". The first that matches a frame counts, innermost frame first.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Waits.COLLECTIVE, r"/torch/distributed/|/torch/autograd/graph\.py |/torch/nn/parallel/|/torch_xla/"),
        (Waits.COLLECTIVE, r"/tensorflow/python/(eager|framework)/|/jax/|/jaxlib/|/horovod/"),
        (Waits.COLLECTIVE, r"/training/distributed/|/training/backends/\S+ (result|update|step|start_program)$"),
        (Waits.STORAGE, r"/google/(cloud|resumable_media|auth|api_core)/|/(gcsfs|fsspec|s3fs|aiohttp|urllib3)/"),
        (Waits.STORAGE, r"/training/storage/|/requests/|/http/client\.py |/urllib/request\.py "),
        (Waits.DATA, r"/training/data/loading/|/torch/utils/data/|/tensorflow/python/data/|/training/\S+ batches$"),
        (Waits.QUEUE, r"/queue\.py (get|put|join)|/multiprocessing/|/concurrent/futures/|/(subprocess|selectors)\.py "),
        (Waits.QUEUE, r"/threading\.py \S*(wait|wait_for|join|_wait_for_tstate_lock)$|/asyncio/"),
        (Waits.LOCK, r"/threading\.py \S*(acquire|__enter__)$"),
    )
)
_BY_SOURCE = (
    (Waits.COLLECTIVE, re.compile(r"all_?reduce|all_gather|\.barrier\(|block_until_ready|\.item\(\)|mark_step")),
    (Waits.STORAGE, re.compile(r"""open\(\s*f?["'](gs|s3|https?)://|/gcs/|urlopen\(""")),
    (Waits.LOCK, re.compile(r"\.acquire\(|^(async )?with \S*(lock|mutex)\S*:", re.IGNORECASE)),
)
_LIBRARY = re.compile(r"/(site|dist)-packages/(?!training/)|/lib/python3|^<frozen|^[\w/]*/?threading\.py$")


@dataclass(frozen=True)
class Place:
    """The place at which a thread is: the innermost call of the program's own code, and what it waits for."""

    waits: Waits
    frame: Frame | None = None
    source: str = ""
    thread: str = ""

    def __str__(self) -> str:
        if self.frame is None:
            return f"{self.waits.value} an unknown place"
        name = "" if self.frame.function == "<module>" else f"{self.frame.function} at "
        thread = f" (thread {self.thread})" if self.thread not in ("", "MainThread") else ""
        return f"{self.waits.value} {name}{self.frame.place}{f': {self.source}' if self.source else ''}{thread}"


def locate(thread: ThreadStack, sources: Mapping[tuple[str, int], str]) -> Place:
    """Returns a thread's place: kinds of library calls count up to the first call of the program's own code."""
    waits: Waits | None = None
    for frame in thread.frames:
        own = not _LIBRARY.search(frame.file)
        source = sources.get((frame.file, frame.line), "")
        if frame.file.startswith("<frozen importlib"):
            waits = Waits.CODE  # a library that is imported waits for nothing yet
        waits = waits or _match(_KINDS, f"{frame.file} {frame.function}")
        if own:
            waits = waits or _match(_BY_SOURCE, source)
            return Place(waits or Waits.CODE, frame, source, thread.name)
    outermost = thread.frames[-1] if thread.frames else None
    return Place(waits or Waits.CODE, outermost, "", thread.name)


def _match(patterns: Sequence[tuple[Waits, re.Pattern[str]]], text: str) -> Waits | None:
    """Returns the kind of the first pattern that is found in the text."""
    return next((kind for kind, pattern in patterns if pattern.search(text)), None)


def places(stacks: HostStacks) -> Iterator[tuple[ProcessStacks, ThreadStack, Place]]:
    """Yields the place of each thread, main threads first."""
    threads = [(process, thread) for process in stacks.processes for thread in process.threads]
    for process, thread in sorted(threads, key=lambda each: each[1].name != "MainThread"):
        yield process, thread, locate(thread, stacks.sources)
