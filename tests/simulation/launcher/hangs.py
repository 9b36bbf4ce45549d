"""Programs that tell their progress: healthy ones that are slow in every phase, and ones that hang in one of them."""

import bisect
import functools
import random
from dataclasses import dataclass

from training.telemetry.progress_line import ProgressLine

Timeline = list[tuple[float, str, int]]
PHASES = ("start", "compile", "training", "evaluation", "save", "end")
STEPS = 700  # more than any program does
HEARTBEAT_SECONDS = 10.0  # after which TensorFlow ends the hosts whose peer is silent
_LIMITS = {"start": 12.0, "compile": 12.0, "evaluation": 6.0, "save": 6.0, "end": 12.0}  # times the limit of training
_ALIKE = ("collective", "all in storage", "data")  # no host differs
_SILENT = "silent"
_STOPPED = ("stopped", _SILENT)  # processes

_MAIN = 'Thread 7 (idle): "MainThread"\n'
_OTHER = 'Thread 8 (idle): "other"\n'
_OWN = "    augment (/app/my_data.py:{})\n"
_WAITING = "    all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:9)\n    step (/app/train.py:50)\n"
_STORAGE = "    recv (/usr/lib/python3.11/http/client.py:9)\n    read (/app/my_data.py:88)\n"
_LOCK = "    acquire (/usr/lib/python3.11/threading.py:9)\n    log (/app/log.py:8)\n"
_QUEUE = "    get (/usr/lib/python3.11/queue.py:171)\n    step (/app/train.py:40)\n"
_DATASET = "    __next__ (/x/site-packages/tensorflow/python/data/ops/iterator_ops.py:7)\n    step (/app/train.py:40)\n"
_SYNC = "    sync (/x/site-packages/torch_xla/torch_xla.py:95)\n    step (/app/train.py:50)\n"
_PLACES = {  # the threads of a host there, and words with which an explanation tells it
    "collective": (_MAIN + _WAITING, "in step at train.py:50"),
    "code": (_MAIN + _OWN.format(12), "is in augment at my_data.py:12: item = make(item)"),
    "computing": (_MAIN.replace("idle", "active+gil") + _OWN + _OTHER + _LOCK, "is in augment at my_data.py:14"),
    "importing": (_MAIN + "    main (/app/train.py:3)\n", "is in main at train.py:3"),
    "storage": (_MAIN + _STORAGE, "waits for storage in read at my_data.py:88"),
    "lock": (_MAIN + _LOCK, "waits for a lock in log at log.py:8"),
    "worker": (_MAIN + _QUEUE + _OTHER + _OWN.format(12), "item = make(item) (thread other)"),
    "tracing": (_MAIN.replace("idle", "active") + _SYNC, "in step at train.py:50"),
    "data": (_MAIN + _DATASET, "waits for data in step at train.py:40"),
    "stopped": (_MAIN + _WAITING, "has a stopped process: process 7 (python train.py --token "),
    "no stacks": ("", "gives no stack traces (Error response from daemon: it does not answer)"),
}
_TOLD = {"program": "runs another program than", "step": "at step", _SILENT: "it stopped sending heartbeats"}
KINDS = ("code", "storage", "lock", "worker", "stopped", "no stacks", *_ALIKE, *_TOLD)
HEALTHY = {
    "start": ("importing", "importing", "storage"),
    "compile": ("collective", "tracing"),
    "training": ("collective",) * 12 + ("data", "worker", "computing", "storage"),
    "evaluation": ("collective", "collective", "data"),
    "save": ("collective", "storage", "lock"),
    "end": ("collective", "computing"),
}  # where the hosts of a healthy program are


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

    def show(self, worker: int) -> str:
        """Returns the kind of place at which a host is."""
        kind = self.kind if worker == self.host or self.kind in _ALIKE else "collective"
        kind = {"all in storage": "storage", _SILENT: "stopped"}.get(kind, kind)
        return kind if kind in _PLACES else "collective"

    @property
    def words(self) -> str:
        """Words that the verdict must have."""
        return _TOLD.get(self.kind) or says(self.show(self.host))

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
    step += bool(is_odd and hang is not None and hang.kind == "step")  # it skipped a collective
    loss = 10.0 / (1 + step)  # each step's is less than the last one's
    more = min(step, slow.steps) * 2 if slow is not None and worker == slow.host else 0.0
    waits = step * (0.5 if more else 2.0 if worker == 0 else 1.0)  # for the others, which is no work of its own
    seconds = {"data_wait": step / 8, "dispatch": (step + more) / 4, "result": waits}
    return ProgressLine(
        step, STEPS, phase, count=number, program=program, step_seconds=1.0, loss=loss, examples_per_second=8.0,
        seconds=seconds, memory_used=98 * 2**30, memory_total=100 * 2**30,
    )  # fmt: skip


def stacks(kind: str, sample: int, *, native: bool) -> str:
    """Returns the output of stacks.sh on a host of a program that is at such a place; `sample` counts them."""
    if kind == "no stacks":
        return "Error response from daemon: it does not answer\n"
    state = "T (stopped)" if kind in _STOPPED else "S (sleeping)"
    threads = _PLACES[kind][0].format(12 + sample) * (1 + native)
    command = "python train.py --token hf_sImUlAtEd0123456789"
    return f"process 7 [{state}] [futex] {command}\n{threads}source /app/my_data.py:12 item = make(item)\n"


def says(kind: str) -> str:
    """Returns words with which an explanation tells where a host was in the second sample."""
    return _PLACES[kind][1]
