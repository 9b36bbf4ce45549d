"""Programs that tell their progress: healthy ones that are slow in every phase, and ones that hang in one of them."""

import bisect
import functools
import random
from dataclasses import dataclass

from training.telemetry.progress_line import ProgressLine, encode

Timeline = list[tuple[float, str, int]]
PHASES = ("start", "compile", "training", "evaluation", "save", "end")
STEPS = 700  # more than any program does
HEARTBEAT_SECONDS = 10.0  # after which TensorFlow ends the hosts whose peer is silent
_LIMITS = {"start": 12.0, "compile": 12.0, "evaluation": 6.0, "save": 6.0, "end": 12.0}  # times the limit of training
_AHEAD = "step"  # the host that is ahead skipped a collective
_ALIKE = ("collective", "all in storage", "read ahead", "data")  # no host differs
_SILENT = "silent"

_MAIN = 'Thread 7 (idle): "MainThread"\n'
_RUNS = _MAIN.replace("idle", "active")
_OTHER = 'Thread 8 (idle): "other"\n'
_OWN = "    augment (/app/my_data.py:12)\n"
_WAITING = "    all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:9)\n    step (/app/train.py:50)\n"
_SYNC = "    sync (/x/site-packages/torch_xla/torch_xla.py:90)\n    step (/app/train.py:50)\n"
_STORAGE = "    recv (/usr/lib/python3.11/http/client.py:9)\n    read (/app/my_data.py:88)\n"
_LOCK = "    acquire (/usr/lib/python3.11/threading.py:9)\n    log (/app/log.py:{})\n"
_QUEUE = "    get (/usr/lib/python3.11/queue.py:171)\n    step (/app/train.py:40)\n"
_DATASET = "(/x/site-packages/tensorflow/python/data/ops/iterator_ops.py:7)"
_LINUX_LOCK = "    pthread_cond_timedwait (/usr/lib/libc.so.6)\n"
_WAITS = _MAIN + _WAITING
_PLACES = {
    "code": _MAIN + _OWN,
    "storage": _MAIN + _STORAGE,
    "lock": _MAIN + _LOCK.format(8),
    "deadlock": _MAIN + _LOCK.format(8) + _OTHER + _LOCK.format(20),
    "interpreter": _RUNS.replace("active", "active+gil") + _OWN + _OTHER + _LOCK.format(8),
    "starved": _MAIN + "    spin (libfast.so)\n" + _OWN + _OTHER + _LINUX_LOCK + "    f (/app/log.py:8)\n",
    "memory": _MAIN + _OWN,
    "thrashing": _MAIN + _OWN,
    "ended": f"{_WAITS}process 9 [Z (zombie)] [] python\n",
    "worker": f"{_MAIN}{_QUEUE}{_OTHER}{_OWN}source /app/my_data.py:12 item = make(item)\n",
    "compiler": f"{_MAIN}{_SYNC}{_MAIN}    xla::cpu::CpuCompiler::RunHloPasses (/x/_XLAC.so)\n{_SYNC}",
    "tracing": _RUNS + _SYNC,
    "all in storage": _MAIN + _STORAGE,
    "read ahead": _WAITS + _OTHER + _STORAGE,
    "data": f"{_MAIN}    __next__ {_DATASET}\n    step (/app/train.py:40)\n",
}
_STATES = {"stopped": "T (stopped)", "kernel": "D (disk sleep)", _SILENT: "T (stopped)"}
_SAYS = {
    "code": "is in augment at my_data.py:12",
    "worker": "is in augment at my_data.py:12: item = make(item) (thread other)",
    "storage": "waits for storage in read at my_data.py:88",
    "lock": "waits for a lock in log at log.py:8",
    "deadlock": "wait for each other's locks",
    "interpreter": "holds Python's lock: it is in augment",
    "starved": "holds Python's lock, for which others wait: it is in augment",
    "memory": "had 1 process killed for lack of memory (OOM)",
    "thrashing": "MiB again between two samples, for which it has no memory",
    "ended": "has a dead process",
    "compiler": "compiles in step at train.py:50",
    "tracing": "compiles or computes in step at train.py:50",
    "all in storage": "each waits for storage in read at my_data.py:88",
    "read ahead": "each waits for storage in read at my_data.py:88",
    "data": "each waits for data in step at train.py:40",
    "stopped": "has a stopped process: process 7",
    "kernel": "is stuck in the kernel",
    _SILENT: "stopped sending heartbeats, so TensorFlow ended the other hosts: host",
    "no stacks": "gives no stack traces",
    "program": "runs another program than the other hosts",
    "step": "the other hosts are at step",
    "collective": "waits for devices or other hosts in step at train.py:50",
}
KINDS = (*_PLACES, *_STATES, "no stacks", "program", "step", "collective")


@dataclass(frozen=True)
class Slow:
    """A host whose own part of a step takes three times the others' time, for so many steps."""

    host: int
    steps: float


@dataclass(frozen=True)
class Hang:
    """A hang: in which phase, of which kind, on which host."""

    phase: str
    kind: str
    host: int

    @property
    def named(self) -> int:
        """The host that the verdict must name; -1: none differs."""
        return -1 if self.kind in _ALIKE else self.host

    @property
    def says(self) -> str:
        """The words that the explanation must contain."""
        return _SAYS[self.kind]

    def limit(self, seconds: float, hosts: int) -> float:
        """Returns the seconds after which it must be noticed; `seconds`: of training without progress."""
        return HEARTBEAT_SECONDS if self.kind == _SILENT and hosts > 1 else limit(self.phase, seconds)

    def last_words(self, worker: int) -> tuple[str, ...]:
        """Returns the lines with which TensorFlow ends another host than the silent one; () if it is none."""
        if self.kind != _SILENT or worker == self.host:
            return ()
        if self.host == 0:  # whose service the others ask
            return "Collective ops is aborted by: Deadline Exceeded", "RPC: /tensorflow.CoordinationService/Heartbeat"
        task = f"/job:worker/replica:0/task:{self.host}"
        return "The following tasks are unhealthy (stopped sending heartbeats):", task


def limit(phase: str, seconds: float) -> float:
    """Returns the seconds without progress after which a phase is a stall; `seconds`: of training."""
    return seconds * _LIMITS.get(phase, 1.0)


@functools.lru_cache(maxsize=200)
def timeline(seed: float, seconds: float, stall_seconds: float, last: str) -> Timeline:
    """Returns when which phase and step begin until `seconds`, all within the limits; the last is the phase `last`."""
    rng = random.Random(seed)
    moments, now, step = [(0.0, "start", 0)], 0.0, 0
    while now < seconds:
        phase = rng.choice(("training",) * 12 + ("compile", "evaluation", "save")) if step else "compile"
        moments.append((now, phase, step))
        longest = 0.8 * limit(phase, stall_seconds)
        now += rng.uniform(0.1, 4.0) if rng.random() < 0.7 else rng.uniform(0.5, 1.0) * longest
        step += phase in ("training", "compile")
    return [*moments, (now, last, step)]


def line(moments: Timeline, since: float, hang: Hang | None, worker: int, slow: Slow | None = None) -> ProgressLine:
    """Returns a host's line so many seconds after the start of the program."""
    number = bisect.bisect_right(moments, since, key=lambda moment: moment[0]) - 1
    _, phase, step = moments[number]
    is_odd = hang is not None and number == len(moments) - 1 and worker == hang.host
    program = "another" if is_odd and hang is not None and hang.kind == "program" else "abc"
    step += bool(is_odd and hang is not None and hang.kind == _AHEAD)
    loss = 10.0 / (1 + step)  # each step's is less than the last one's
    more = min(step, slow.steps) * 2 if slow is not None and worker == slow.host else 0.0
    waits = step * (0.5 if more else 2.0 if worker == 0 else 1.0)  # for the others, which is no work of its own
    seconds = {"data_wait": step / 8, "dispatch": (step + more) / 4, "result": waits}
    return ProgressLine(
        step, STEPS, phase, count=number, program=program, step_seconds=1.0, loss=loss, examples_per_second=8.0,
        seconds=seconds,
    )  # fmt: skip


def format_line(told: ProgressLine) -> str:
    return f"progress {encode(told)}\n"


def stacks(hang: Hang | None, worker: int, now: float, sample: int) -> str:
    """Returns the output of stacks.sh on a host of a program that hangs, at a moment; `sample` counts them."""
    kind = "collective" if hang is None else hang.kind
    if hang is not None and worker != hang.host:
        kind = "storage" if kind == "all in storage" else kind if kind in _ALIKE else "collective"
    elif kind == "read ahead":
        kind = "storage"
    if kind == "no stacks":
        return "Error response from daemon: it does not answer\n"
    pages = int(now * 10_000) if kind == "thrashing" else 7
    used = f"memory MemTotal: 100 kB MemAvailable: 50 kB oom_kill {kind == 'memory':d} workingset_refault_file {pages}"
    state = _STATES.get(kind, "D (disk sleep)" if (sample + worker) % 2 else "S (sleeping)")  # for a moment
    return f"{used}\nprocess 7 [{state}] [futex] python train.py\n{_PLACES.get(kind, _WAITS)}{used}\n"
