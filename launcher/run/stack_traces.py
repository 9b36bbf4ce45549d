"""Parses what `container_output.DUMP_STACKS` prints, and tells what a thread of a training program waits for. Pure."""

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


class Waits(enum.Enum):
    """The kind of place at which a thread is: what the host's user has to look at (a kind of hang), and words."""

    CODE = "code", "is in"
    STORAGE = "storage", "waits for storage in"
    LOCK = "lock", "waits for a lock in"
    QUEUE = "lock", "waits for another thread or process in"
    DATA = "data", "waits for data in"
    COLLECTIVE = "collective", "waits for devices or other hosts in"
    COMPILER = "compile", "compiles in"
    BUSY = "compile", "compiles or computes in"

    def __init__(self, kind: str, words: str) -> None:
        self.kind, self.words = kind, words


@dataclass(frozen=True)
class Frame:
    """One call: its function, and the file and line at which it is."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """Returns "file.py:12", without the file's folder."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass
class ThreadStack:
    """The calls of a thread, innermost first."""

    id: str
    name: str
    holds_gil: bool = False
    active: bool = False  # whether it runs, or would if a processor were free
    starves: bool = False  # whether two samples show that it waits for Python's lock at one place
    frames: list[Frame] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    """Calls inside of the innermost one of Python, as "function (library)"; [] where they could not be read."""

    @property
    def waits_for_gil(self) -> bool:
        """Returns whether its native calls show a wait for Python's lock (GIL): a timed one, outside of any library."""
        return "pthread_cond_timedwait (libc.so.6)" in self.native and all(map(_PLAIN.search, self.native))


@dataclass
class ProcessStacks:
    """A process: its state as the kernel reports it ("S", "T", "D", "Z"), and the stacks of its Python threads."""

    pid: int
    state: str
    wait_channel: str
    command: str
    threads: list[ThreadStack] = field(default_factory=list)
    polling: int = 0  # threads, native ones too, that wait for a connection (poll)


@dataclass(frozen=True)
class HostStacks:
    """The Python processes of a host, and the text of the lines at which they are."""

    processes: Sequence[ProcessStacks] = ()
    sources: Mapping[tuple[str, int], str] = field(default_factory=dict)
    problem: str = ""  # the output's last line, if there was no process in it
    memory: str = ""  # how the host is short of it: "has 0.2 of 188.0 GiB of its memory left"; "" if it is not
    refaults: tuple[int, int] = (-1, -1)
    """Pages so far that were read again, or swapped in, after the kernel had evicted them for lack of memory, before
    and after the stacks were taken; -1: unknown."""


_PROCESS = re.compile(r"process (\d{1,10}) \[(\w)?[^\]]*\] \[(\S*?)\] (.*)")
_THREAD = re.compile(r'Thread (\S+) \((\S+)\)(?:: "(.*)")?$')
_FRAME = re.compile(r"    (.{1,300}?) \((.{1,1000}):(\d{1,9})\)$")
_NATIVE = re.compile(r"    (.{1,300}) \((?:/.{0,900}/)?([^():/]{1,200})\)$")
_POLLING = re.compile(r"polling (\d{1,6})$")
_SOURCE = re.compile(r"source (.{1,1000}):(\d{1,9}) (.*)")
_REFAULTS = re.compile(r"workingset_refault_\w+ (\d{1,15})\b")
_LEAST_MEMORY, _MOST_STALLED = 0.02, 40  # share that is left; percent of the time that all processes waited for memory
_MOST_REFAULTS = 25_000  # pages of 4 KiB that are read again between two samples


def _judge_memory(facts: str) -> str:
    """Returns how a host is short of memory, from the kernel's `facts`, a line of stacks.sh; "" if it is not."""
    numbers = {name: int(number) for name, number in re.findall(r"(\w+):? +(\d{1,15})\b", facts)}
    total, left = numbers.get("MemTotal", 0), numbers.get("MemAvailable", 0)
    stalled = max((int(percent) for percent in re.findall(r"full avg10=(\d{1,3})", facts)), default=0)
    if killed := numbers.get("oom_kill", 0):
        return f"had {killed} process{'es'[: 2 * (killed > 1)]} killed for lack of memory (OOM)"
    if left < _LEAST_MEMORY * total:
        return f"has {left / 2**20:.1f} of {total / 2**20:.1f} GiB of its memory left"
    return f"waited for memory {stalled} % of the last 10 s" if stalled >= _MOST_STALLED else ""


def parse_stacks(output: str) -> HostStacks:
    """Parses the output of stacks.sh: processes, source lines, and how the host is short of memory. Without a process,
    `problem` says why."""
    processes: list[ProcessStacks] = []
    sources, memory, refaults = {}, "", [-1, -1]
    for line in output.splitlines():
        threads = processes[-1].threads if processes else []
        if match := _PROCESS.match(line):
            processes.append(ProcessStacks(int(match[1]), match[2] or "", match[3], match[4].strip()))
        elif match := _THREAD.match(line):
            threads.append(ThreadStack(match[1], match[3] or "", "gil" in match[2], match[2].startswith("active")))
        elif (match := _FRAME.match(line)) and threads:
            threads[-1].frames.append(Frame(match[1], match[2], int(match[3])))
        elif (match := _NATIVE.match(line)) and threads and not threads[-1].frames:
            threads[-1].native.append(f"{match[1]} ({match[2]})")
        elif match := _SOURCE.match(line):
            sources[match[1], int(match[2])] = match[3].strip()
        elif line.startswith("memory "):
            memory = memory if processes else _judge_memory(line)
            refaults[bool(processes)] = sum(map(int, _REFAULTS.findall(line)))
        elif (match := _POLLING.match(line)) and processes:
            processes[-1].polling = int(match[1])
    for process in processes:
        process.threads = _merge_stacks(process.threads)
    problem = "" if processes else (output.strip().splitlines() or ["no answer"])[-1][:200]
    return HostStacks(processes, sources, problem, memory, (refaults[0], refaults[1]))


def _merge_stacks(threads: Sequence[ThreadStack]) -> list[ThreadStack]:
    """Returns a process's threads, each once. One that comes again, in a dump with native code, keeps its first calls
    and, if it is at the same place there, gets the native calls of the later dump, in which py-spy may lose Python's
    calls."""
    merged: dict[str, ThreadStack] = {}
    for thread in threads:
        before = merged.setdefault(thread.id, thread)
        if before.frames[:1] == thread.frames[:1]:
            merged[thread.id] = replace(before, native=thread.native, holds_gil=before.holds_gil or thread.holds_gil)
    return list(merged.values())


def merge_samples(first: HostStacks | None, second: HostStacks) -> HostStacks:
    """Returns the second sample of a host's stacks with what only both show: that a process is stuck in the kernel
    (state "D"), that a thread is active, holds Python's lock or starves at the same place, and that pages are read
    again. Native calls that could not be read then are those of the first sample, at the same place. If only one sample
    has processes, as of a host that ended as another one is silent, that one counts, without what both have to show."""
    if first is None or not first.processes:
        first = HostStacks()
    elif not second.processes:
        first, second = HostStacks(), first
    stuck = {process.pid for process in first.processes if process.state == "D"}
    before = {(process.pid, thread.name): thread for process in first.processes for thread in process.threads}

    def merge(pid: int, thread: ThreadStack) -> ThreadStack:
        old = before.get((pid, thread.name))
        if old is None or old.frames[:1] != thread.frames[:1]:
            return replace(thread, active=False, holds_gil=False)
        active, holds_gil = thread.active and old.active, thread.holds_gil and old.holds_gil
        merged = replace(thread, active=active, holds_gil=holds_gil, native=thread.native or old.native)
        merged.starves = merged.waits_for_gil and old.waits_for_gil and merged.frames == old.frames
        return merged

    processes = [
        replace(
            process,
            state=process.state if process.state != "D" or process.pid in stuck else "",
            threads=[merge(process.pid, thread) for thread in process.threads],
        )
        for process in second.processes
    ]
    memory, pages = second.memory, second.refaults[0] - first.refaults[1]
    if not memory and pages > _MOST_REFAULTS and first.refaults[1] >= 0:
        memory = f"read {pages / 256:,.0f} MiB again between two samples, for which it has no memory"
    return replace(second, processes=processes, memory=memory)


# Kinds of frames, by "file function". The first that matches a frame counts, innermost frame first.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Waits.COLLECTIVE, r"/torch/distributed/|/torch/autograd/graph\.py |/torch/nn/parallel/|/torch_xla/"),
        (Waits.STORAGE, r"/tensorflow/python/lib/io/"),
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
_XLA = re.compile(r"/torch_xla/|/tensorflow/python/|/jax/|/jaxlib/")
_COMPILER = re.compile(r"(::|\b)(Compile\w*|RunHloPasses|RunBackend)\b|^llvm::")
_LOCK = re.compile(r"\bPyThread_acquire_lock_timed\b")
_PLAIN = re.compile(r"^0x|\((libc|libpthread|libffi|libpython|python|_ctypes|ld-linux)[^()]*\)$")
_LIBRARY = re.compile(r"/(site|dist)-packages/(?!training/)|/lib/python3|^<frozen|^[\w/]*/?threading\.py$")


@dataclass(frozen=True)
class Place:
    """The place at which a thread is: the innermost call of the program's own code, and what it waits for."""

    waits: Waits
    frame: Frame | None = None
    source: str = ""
    thread: str = ""
    native: str = ""  # the innermost call of a native library, if it was read

    def __str__(self) -> str:
        if self.frame is None:
            return f"{self.waits.words} an unknown place"
        name = "" if self.frame.function == "<module>" else f"{self.frame.function} at "
        thread = f" (thread {self.thread})" if self.thread not in ("", "MainThread") else ""
        native = f" (native: {self.native[:120]})" if self.native else ""
        return f"{self.waits.words} {name}{self.frame.place}{f': {self.source}' if self.source else ''}{thread}{native}"


def locate(thread: ThreadStack, sources: Mapping[tuple[str, int], str]) -> Place:
    """Returns the innermost call of the program's own code, and what it waits for, by its native calls, by the library
    calls inside it, or else by its source line; CODE if none tells. Without own code, the outermost call, or none."""
    calls = "\n".join(thread.native)
    waits = _match(((Waits.COMPILER, _COMPILER),), calls)
    native = next((call for call in thread.native if not _PLAIN.search(call)), "")
    for frame in thread.frames:
        own = not _LIBRARY.search(frame.file)
        source = sources.get((frame.file, frame.line), "")
        if frame.file.startswith("<frozen importlib"):
            waits = Waits.CODE  # a library that is imported waits for nothing yet
        waits = waits or _match(_KINDS, f"{frame.file} {frame.function.rpartition('.')[2]}")
        if waits is Waits.COLLECTIVE and thread.active and _XLA.search(frame.file):
            waits = Waits.BUSY  # a thread that waits for devices or other hosts does not run
        if own:
            waits = waits or _match(_BY_SOURCE, source) or _match(((Waits.LOCK, _LOCK),), calls)
            return Place(waits or Waits.CODE, frame, source, thread.name, native)
    outermost = thread.frames[-1] if thread.frames else None
    return Place(waits or Waits.CODE, outermost, "", thread.name, native)


def _match(patterns: Sequence[tuple[Waits, re.Pattern[str]]], text: str) -> Waits | None:
    return next((kind for kind, pattern in patterns if pattern.search(text)), None)


def places(stacks: HostStacks) -> Iterator[tuple[ProcessStacks, ThreadStack, Place]]:
    """Yields each thread with its process, and where it is and what it waits for (`locate`, for a thread without known
    calls too), threads named MainThread first."""
    threads = [(process, thread) for process in stacks.processes for thread in process.threads]
    for process, thread in sorted(threads, key=lambda each: each[1].name != "MainThread"):
        yield process, thread, locate(thread, stacks.sources)
