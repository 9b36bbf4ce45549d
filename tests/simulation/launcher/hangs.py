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
_AHEAD = "step"  # the host that is ahead skipped a collective
_ALIKE = ("collective", "all in storage", "read ahead", "data")  # no host differs
_SILENT = "silent"

_COMMAND = "python train.py --token hf_sImUlAtEd0123456789"
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
_HELPERS = f'process 20 [S (sleeping)] [] python -c import resource_tracker\nThread 20 (idle): "MainThread"\n{_OWN}'
_SOURCE = "source /app/my_data.py:12 item = make(item)\n"
_LOADER = f'process 30 [S (sleeping)] [] python -c spawn_main\npolling 1\nThread 30 (idle): "MainThread"\n{_QUEUE}'
_PLACES = {
    "code": _MAIN + _OWN,
    "computing": _RUNS.replace("active", "active+gil") + _OWN.replace("12", "{}") + _OTHER + _LOCK.format(8),
    "importing": _MAIN + "    _load (<frozen importlib._bootstrap>:9)\n    main (/app/train.py:3)\n",
    "storage": _MAIN + _STORAGE,
    "lock": _MAIN + _LOCK.format(8),
    "deadlock": _MAIN + _LOCK.format(8) + _OTHER + _LOCK.format(20),
    "interpreter": _RUNS.replace("active", "active+gil") + _OWN + _OTHER + _LOCK.format(8),
    "starved": _MAIN + "    spin (libfast.so)\n" + _OWN + _OTHER + _LINUX_LOCK + "    f (/app/log.py:8)\n",
    "memory": _MAIN + _OWN,
    "thrashing": _MAIN + _OWN,
    "little memory": _MAIN + _OWN,
    "pressure": _MAIN + _OWN,
    "ended": _WAITS,
    "worker": _MAIN + _QUEUE + _OTHER + _OWN,
    "compiler": f"{_MAIN}    xla::cpu::CpuCompiler::RunHloPasses (/x/_XLAC.so)\n{_SYNC}",
    "tracing": _RUNS + _SYNC.replace(":90", ":95"),
    "all in storage": _MAIN + _STORAGE,
    "read ahead": _WAITS + _OTHER + _STORAGE,
    "data": f"{_MAIN}    __next__ {_DATASET}\n    step (/app/train.py:40)\n",
}
_STATES = {"stopped": "T (stopped)", "kernel": "D (disk sleep)", _SILENT: "T (stopped)"}
_NO_STACKS = ("no stacks", "full")
_IN_CODE = "is in augment at my_data.py:12: item = make(item)"
_WAITS_FOR_ALL = "waits for devices or other hosts in step at train.py:50"
_ANSWERS_NOT = "gives no stack traces (Error response from daemon: it does not answer)"
NO_HEARTBEATS = "it stopped sending heartbeats, so TensorFlow ended the other hosts"
_SAYS = {
    "code": _IN_CODE,
    "computing": "is in augment at my_data.py:{}",
    "importing": "is in main at train.py:3",
    "worker": f"{_IN_CODE} (thread other)",
    "storage": "waits for storage in read at my_data.py:88",
    "lock": "waits for a lock in log at log.py:8",
    "deadlock": "has threads that wait for each other's locks: waits for a lock in log at log.py:8 and waits for "
    "a lock in log at log.py:20 (thread other)",
    "interpreter": f"holds Python's lock: it {_IN_CODE}",
    "starved": _IN_CODE,
    "memory": f"had 1 process killed for lack of memory (OOM), and {_IN_CODE}",
    "thrashing": f"read 234 MiB again between two samples, for which it has no memory, and {_IN_CODE}",
    "little memory": f"has 1.0 of 100.0 GiB of its memory left, and {_IN_CODE}",
    "pressure": f"waited for memory 40 % of the last 10 s, and {_IN_CODE}",
    "full": f"uses 99.0 of 100.0 GiB of its memory, and {_ANSWERS_NOT}",
    "ended": "has a dead process that its parent has not reaped: process 9 (python)",
    "tracing": "compiles or computes in step at train.py:50",
    "data": "waits for data in step at train.py:40, 3 threads for a connection",
    "stopped": "has a stopped process: process 7 (python train.py --token ***)",
    "kernel": "is stuck in the kernel (futex): process 7 (python train.py --token ***)",
    "no stacks": _ANSWERS_NOT,
}
_SAYS |= {"all in storage": _SAYS["storage"], _SILENT: _SAYS["stopped"]}
_WITH_NATIVE = {
    "compiler": "compiles in step at train.py:50 (native: xla::cpu::CpuCompiler::RunHloPasses (_XLAC.so))",
    "starved": f"holds Python's lock, for which others wait: it {_IN_CODE} (native: spin (libfast.so))",
}
_ADVICE = (  # the first words that an explanation has, and those of its advice
    ("memory", "workers, caches, batches"), ("stopped process", "kill -CONT"), ("dead process", "its log"),
    ("in the kernel", "replace the host"), ("gives no stack", "memory, disk"), ("each other's locks", "same order"),
    ("Python's lock", "a native call"), ("another program", "same program"), ("at step", "a collective"),
    ("compiles", "preflight"), (" storage", "the bucket, its region"), ("waits for a lock", "that holds the lock"),
    ("waits for data", "input pipeline"), ("is in ", "at that line"), ("waits for devices", "doctor --devices"),
)  # fmt: skip
KINDS = (*(kind for kind in _PLACES if kind not in ("computing", "importing")), *_STATES, *_NO_STACKS, "program",
         "step", "collective")  # fmt: skip
HEALTHY = {
    "start": ("importing", "importing", "storage"),
    "compile": ("compiler", "tracing"),
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
        if worker == self.host:
            return "storage" if self.kind == "read ahead" else self.kind
        return "storage" if self.kind == "all in storage" else self.kind if self.kind in _ALIKE else "collective"

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
    used = 99 if is_odd and hang is not None and hang.kind == "full" else 98  # GiB
    return ProgressLine(
        step, STEPS, phase, count=number, program=program, step_seconds=1.0, loss=loss, examples_per_second=8.0,
        seconds=seconds, memory_used=used * 2**30, memory_total=100 * 2**30,
    )  # fmt: skip


def _names(workers: list[int]) -> str:
    return f"host{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def _step(told: str) -> int:
    return int(told.split()[1][:-1]) if told else 0


def sentences(told: list[str], says: dict[int, str], kinds: set[str]) -> list[str]:
    """Returns the explanations that fit what hosts have told ("step 7, save"), where they are, and kinds of places."""
    count, workers = len(told), range(len(told))
    odd, waiting = [[w for w in workers if (says[w] != _WAITS_FOR_ALL) == is_odd] for is_odd in (True, False)]
    compiling = [worker for worker in workers if told[worker].endswith("compile")]
    stored = [worker for worker in odd if "for storage" in says[worker]]
    ahead = [worker for worker in workers if _step(told[worker]) > min(map(_step, told))]
    if "program" in kinds and count > 1:
        return [f"host {worker} runs another program than the other hosts" for worker in workers]
    if odd == stored and ("read ahead" in kinds or (waiting and len(odd) > max(1, count / 2))):
        return [f"{count if 'read ahead' in kinds else len(odd)} of {count} hosts: each {says[odd[0]]}"]
    if waiting and (odd or 0 < len(compiling) < count):
        differ = odd or compiling
        others = [worker for worker in workers if worker not in differ]
        step = f" in step {_step(told[others[0]]) + 1}'s collective" if told[others[0]] else ""
        compiles = "" if odd else f"compile{'s' * (len(compiling) == 1)}: "
        where = f"{len(others)} of {count} hosts wait{step} (train.py:50); {_names(differ)}"
        if odd and len({says[worker] for worker in odd}) > 1:
            return [f"{where} are elsewhere: host {odd[0]} {says[odd[0]]}"]
        return [f"{where}{': each' if len(odd) > 1 else ''} {compiles}{says[differ[0]]}"]
    if waiting and ahead:
        steps = sorted({*map(_step, told)})
        behind = [worker for worker in workers if worker not in ahead]
        names = ((ahead, steps[-1], steps[0]), (behind, steps[0], steps[-1]))
        verbs = {True: "are", False: "is"}
        return [f"{_names(odd)} {verbs[len(odd) > 1]} at step {step}, the other hosts are at step {other}"
                for odd, step, other in names]  # fmt: skip
    if len({advice(text) for text in says.values()}) > 1:
        return [f"host {worker} {says[worker]}" for worker in workers]
    compiles = "compiles: " * (len(compiling) == count and says[0].startswith(("compiles", "waits for devices")))
    place = f"{told[0]}: " if told[0] else ""
    if count == 1:
        return [f"{place}the host {compiles}{says[0]}", f"host 0 {says[0]}"]
    return [f"all {count} hosts: {place}each {compiles}{says[0]}"]


def advice(what: str) -> str:
    """Returns words that the advice has which follows an explanation."""
    return next((words for reason, words in _ADVICE if reason in what), "?")


def stacks(kind: str, worker: int, sample: int, *, native: bool) -> str:
    """Returns the output of stacks.sh on a host of a program that is at such a place; `sample` counts them."""
    if kind in _NO_STACKS:
        return "Error response from daemon: it does not answer\n"
    pages = sample * (100_000 if kind == "thrashing" else 60_000)  # py-spy itself makes the kernel read 40,000 again
    left = 1 if kind == "little memory" else 2
    used = "memory MemTotal: 104857600 kB MemAvailable: {} kB full avg10={}.00 oom_kill {} workingset_refault_file {}\n"
    before = used.format(left * 2**20, 40 if kind == "pressure" else 39, int(kind == "memory"), pages)
    state = _STATES.get(kind, "D (disk sleep)" if (sample + worker) % 2 else "S (sleeping)")  # for a moment
    threads = _PLACES.get(kind, _WAITS).format(12 + sample)
    plain = "".join(line for line in threads.splitlines(keepends=True) if ".so" not in line)
    found = f"{before}process 7 [{state}] [futex] {_COMMAND}\npolling 2\n{plain}{_SOURCE}"
    found += threads if native else ""
    found += "process 9 [Z (zombie)] [] python\n" if kind == "ended" else ""
    return f"{found}{_HELPERS}{_LOADER}{used.format(2**20, 90, 1, pages + 40_000)}"


def says(kinds: list[str], *, native: bool) -> str:
    """Returns what an explanation says of a host that was at places of these kinds in the two samples."""
    before, kind = kinds
    if kind == "tracing" and before != kind:  # it may have begun to wait
        return _WAITS_FOR_ALL
    found = _WITH_NATIVE.get(kind) if native else None
    return (found or _SAYS.get(kind, _WAITS_FOR_ALL)).format(14)
