"""Claims about hangs: which host one is put down to, from stacks as py-spy prints them; and, with a provider in memory,
when a run ends for it, what the verdict says, and what is kept."""

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput, LaunchError
from launcher.masking import SecretMasker
from launcher.run import events, execution
from launcher.run.hang import Hang, blame_silent_host, explain_hang, explain_stall, find_silent_host
from launcher.run.stack_traces import HostStacks, parse_stacks
from launcher.run.verdict import Cause, Kind, Verdict
from tests.launcher.test_runs import Workstation, detach
from training.telemetry.progress_line import ProgressLine

SITE = "/x/site-packages"
PYTHON = "/usr/lib/python3.11"


def thread(*frames: str, name: str = "MainThread", state: str = "idle", number: int = 7, source: str = "") -> str:
    """A thread as py-spy prints it, innermost frame first; `source`: the line of code that dump_stacks adds."""
    lines = "".join(f"    {frame}\n" for frame in frames)
    return f'Thread {number} ({state}): "{name}"\n{lines}' + (f"source {source}\n" if source else "")


COLLECTIVE = thread(
    f"all_reduce ({SITE}/torch/distributed/distributed_c10d.py:2501)",
    f"wrapper ({SITE}/torch/distributed/c10d_logger.py:83)",
    "train_step (/app/train.py:50)",
    "<module> (/app/train.py:90)",
    source="/app/train.py:50     dist.all_reduce(gradients)",
)
READS = thread(
    f"readinto ({PYTHON}/socket.py:705)",
    "getresponse (/x/dist-packages/urllib3/connection.py:461)",
    "open_shard (/app/my_data.py:88)",
    f"run ({PYTHON}/threading.py:975)",
    name="reader",
    number=9,
)
WRITES_PROGRESS = thread(
    f"wait ({PYTHON}/threading.py:320)",
    "_write_repeatedly (/opt/tpu-launch/training/telemetry/host_progress.py:120)",
    name="progress",
    number=11,
    source='/app/my_data.py:88     with open("gs://bucket/part-7") as file:',
)
FOR_QUEUE = (f"wait ({PYTHON}/threading.py:320)", f"get ({PYTHON}/queue.py:171)", "next_batch (/app/train.py:40)")
READER = thread(*FOR_QUEUE) + READS + WRITES_PROGRESS
USER = thread("augment (/app/my_data.py:12)")
LOCKED = thread("write (/app/log.py:8)", source="/app/log.py:8     with log_lock:")
LOGGER = thread("flush (/app/log.py:20)", name="logger", number=8, source="/app/log.py:20     with file_lock:")
DEADLOCK = LOCKED + LOGGER
HOLDER = thread("native (/app/fast.py:3)", state="active+gil")
GIL = HOLDER + thread("f (/app/a.py:1)", name="other", number=8)
WAITS = thread(f"sync ({SITE}/torch_xla/torch_xla.py:90)", "f (/app/a.py:1)")
COMPILING = WAITS.replace("idle", "active")
PREPARES = (f"sync ({SITE}/torch_xla/torch_xla.py:90)", "prepare (/app/a.py:1)")
PASSES = ("xla::HloPassPipeline::Run<xla::HloModule>", "xla::cpu::CpuCompiler::RunHloPasses")
COMPILES = thread(*(f"{name} ({SITE}/_XLAC.so)" for name in PASSES), *PREPARES, state="active")
STARVED = thread("fast_call (libfast.so)", "f (/app/fast.py:3)") + thread(
    "pthread_cond_timedwait (/usr/lib/libc.so.6)", "f (/app/a.py:1)", name="other", number=8
)
PLAIN_LOCK = thread("PyThread_acquire_lock_timed (/usr/bin/python3.11)", "write (/app/log.py:8)")
MEMORY = "memory MemTotal: 24684092 kB MemAvailable: {left} kB full avg10={stalled}.00 oom_kill {killed} \n"


def dump(threads: str, state: str = "S (sleeping)", channel: str = "futex_wait", pid: int = 7) -> str:
    top = f"UID PID\nroot 1\nprocess {pid} [{state}] [{channel}] python train.py\n"
    return f"{top}Process {pid}: python train.py\n{threads}"


def read_stacks(text: str) -> HostStacks:
    return parse_stacks(dump(text) if text.startswith(("Thread", "polling")) else text)


def explain(
    *hosts: str, lines: dict[int, ProgressLine] | None = None, seconds: float = 312.0, before: str | None = None
) -> Hang:
    """Explains outputs, or threads of one process. `before`: of host 0 in the first sample, if it differs."""
    stacks = {worker: read_stacks(text) for worker, text in enumerate(hosts)}
    first = stacks if before is None else stacks | {0: read_stacks(before)}
    told = {worker: ProgressLine(12_430, phase="training") for worker in stacks} if lines is None else lines
    return explain_hang(first, stacks, told, seconds)


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        (USER, "code", "is in augment at my_data.py:12"),
        (READER, "storage",
         'for storage in open_shard at my_data.py:88: with open("gs://bucket/part-7") as file: (thread reader)'),
        (LOCKED, "lock", "waits for a lock in write at log.py:8: with log_lock:"),
        (DEADLOCK, "deadlock", "flush at log.py:20"),
        (COMPILES, "compile",
         "compiles in prepare at a.py:1 (native: xla::HloPassPipeline::Run<xla::HloModule> (_XL"),
        (COMPILING, "compile", "compiles or computes in f at a.py:1"),
        (COMPILES.replace("active", "active+gil"), "compile", "compiles in prepare at a.py:1"),
        (STARVED, "interpreter", "others wait: it is in f at fast.py:3 (native: fast_call (libfast.so))"),
        (PLAIN_LOCK, "lock", "waits for a lock in write at log.py:8"),
        (MEMORY.format(left=9_000_000, stalled=0, killed=2) + dump(USER), "memory",
         "had 2 processes killed for lack of memory (OOM), and is in augment at my_data.py:12"),
        (MEMORY.format(left=300_000, stalled=0, killed=0) + dump(USER), "memory",
         "has 0.3 of 23.5 GiB of its memory left"),
        (MEMORY.format(left=9_000_000, stalled=40, killed=0) + dump(USER), "memory", "waited for memory 40 % of the"),
        (MEMORY.format(left=9_000_000, stalled=39, killed=0) + dump(USER), "code", "is in augment at my_data.py:12"),
        (USER.replace("/app", "/usr/lib/python3.11"), "code", "is in augment at my_data.py:12"),
        (GIL, "interpreter", "holds Python's lock: it is in native at fast.py:3"),
        (HOLDER, "code", "holds Python's lock: it is in native at fast.py:3"),
        (dump(STARVED.replace("    pthread", "    wait (/x/libxla.so)\n    pthread")), "code", "is in f at fast.py:3"),
        (dump(USER + DEADLOCK.replace("Thread 7", "Thread 9").replace("MainThread", "writer")), "code", "in augment"),
        (USER.replace("MainThread", "loader"), "code", "is in augment at my_data.py:12 (thread loader)"),
        (dump(USER) + dump(LOCKED, pid=8).replace("train.py\nP", "py-spy\nP"), "code", "is in augment"),
        (dump(USER).replace("train.py", "-m tensorboard.main"), "no stacks", "py-spy can't read its processes"),
        (dump(USER[: USER.index("    ")]), "no stacks", "py-spy can't read its processes"),
        (dump(COLLECTIVE, "T (stopped)"), "stopped", "has a stopped process: process 7 (python train.py)"),
        (dump(COLLECTIVE, "D (disk sleep)", "nfs_wait"), "kernel", "is stuck in the kernel (nfs_wait)"),
        (dump(COLLECTIVE) + "process 9 [Z (zombie)] [] python\n", "ended", "dead process"),
        ("Error response from daemon: container is not running", "no stacks", "gives no stack traces (Error response"),
        (dump("Error: Failed to open process\n"), "no stacks", "py-spy can't read its processes"),
    ],
)  # fmt: skip
def test_the_host_that_differs_is_named_with_its_line(odd: str, kind: str, words: str) -> None:
    for worker in range(4):
        hosts = [COLLECTIVE] * 4
        hosts[worker] = odd
        hang = explain(*hosts)
        assert (hang.kind, hang.worker) == (kind, worker)
        assert "3 of 4 hosts wait in step 12,431's collective (train.py:50); " in hang.what
        assert f"host {worker} " in hang.what
        assert words in hang.what
        assert hang.what.endswith("for 312 s")
        assert len(hang.hosts) == 4
        assert hang.advice in hang.paragraph


def told(*steps: int, **options: Any) -> dict[int, ProgressLine]:
    """Lines of progress of hosts 0, 1, ..., by their steps."""
    return {worker: ProgressLine(step, **options) for worker, step in enumerate(steps)}


COMPILE, TRAINING = (ProgressLine(5, phase=phase) for phase in ("compile", "training"))
STOPPED = dump(COLLECTIVE, "T (stopped)")
WAITING = [COLLECTIVE] * 3
SAME, LOADER = told(8, 8, 8, program="abc"), f"{SITE}/torch/utils/data/dataloader.py"
PARENT = thread(f"wait ({PYTHON}/multiprocessing/connection.py:930)", number=1)  # of torch_xla.launch's processes
IMPORTS = thread(
    f"<module> ({SITE}/torch_xla/__init__.py:20)",
    "_find_and_load (<frozen importlib._bootstrap>:1178)",
    "open_backend (/opt/tpu-launch/training/backends/torch_xla/backend.py:20)",
    state="active",
)
WORKERS = (
    dump(PARENT, pid=1)
    + dump(thread(f"get ({LOADER}:9)", "f (/app/t.py:3)"))
    + dump(thread("__getitem__ (/app/my_data.py:5)", number=8), pid=8)
)
NEXT = thread(f"__next__ ({SITE}/tensorflow/python/data/ops/iterator_ops.py:1)", "f (/app/t.py:3)")
NO_MEMORY = {worker: ProgressLine(5, memory_used=98 + worker, memory_total=100) for worker in (0, 1)}
AHEAD = COLLECTIVE + READS


@pytest.mark.parametrize(
    ("hosts", "lines", "kind", "worker", "words"),
    [
        ([USER, USER, LOCKED, USER], None, "lock", 2, "host 2 waits for a lock"),
        pytest.param([USER, USER, LOCKED, LOCKED], None, "code", 0, "", id="no half is the odd one"),
        ([USER, USER], {0: TRAINING, 1: replace(TRAINING, step=9)}, "code", -1, ""),
        ([USER, USER], {0: TRAINING, 1: COMPILE}, "code", -1, ""),
        ([USER, STOPPED], None, "stopped", 1, "1 of 2 hosts are elsewhere (code) (my_data.py:12); host 1 has a"),
        ([MEMORY.format(left=1, stalled=0, killed=1) + dump(USER), STOPPED], None, "memory", 0, ""),
        ([USER, COLLECTIVE], {}, "code", 0, "1 of 2 hosts wait (train.py:50); host 0 "),
        ([*WAITING, USER, USER], None, "code", 3, "; hosts 3, 4: each is in augment at my_data.py:12"),
        ([*WAITING, USER, LOCKED], None, "code", 3, "; hosts 3, 4 are elsewhere: host 3 is in augment at my_data"),
        ([COLLECTIVE] * 5, told(8, 8, 8, 9, 9), "step", 3, "hosts 3, 4 are at step 9, the other hosts are at step 8"),
        (WAITING, SAME | {1: ProgressLine(8, program="xyz")}, "program", 1, "host 1 runs another program than the"),
        pytest.param(WAITING, SAME | {1: ProgressLine(8)}, "collective", -1, "", id="its program is not known yet"),
        pytest.param(WAITING, SAME | {3: ProgressLine(9, program="xyz")}, "collective", -1, "", id="it has no stacks"),
        (WAITING, SAME | {2: ProgressLine(9, program="abc")}, "step", 2, "host 2 is at step 9, the other hosts are at"),
        pytest.param([COLLECTIVE] * 2, told(9, 8), "step", 0, "", id="one that is ahead has skipped a collective"),
        ([WAITS, COLLECTIVE], {0: COMPILE, 1: TRAINING}, "compile", 0, "host 0 compiles: waits for devices or other"),
        ([WAITS, COLLECTIVE], {0: TRAINING, 1: COMPILE}, "compile", 1, "host 1 compiles: waits for devices or other"),
        ([f"polling 2\n{NEXT}"] * 2, None, "data", -1, "waits for data in f at t.py:3, 2 threads for a connection"),
        ([f"polling 1\n{NEXT}"], None, "data", 0, "t.py:3, 1 thread for a connection"),
        ([READER, AHEAD], None, "storage", -1, "2 of 2 hosts: each waits for storage in open_shard at my_data.py:88"),
        ([READER, READER, COLLECTIVE], None, "storage", -1, "2 of 3 hosts: each waits for storage in open_shard"),
        ([READER, COLLECTIVE, COLLECTIVE], None, "storage", 0, ""),
        ([READER, COLLECTIVE], None, "storage", 0, ""),
        ([COLLECTIVE, ""], NO_MEMORY, "memory", 1, ""),
        (["", COLLECTIVE], NO_MEMORY, "no stacks", 0, "host 0 gives no stack traces (no answer)"),
        ([PARENT], None, "lock", 0, "waits for another thread or process in wait at connection.py:930"),
        ([WORKERS, COLLECTIVE], None, "code", 0, "__getitem__ at my_data.py:5"),
        pytest.param([dump(PARENT, pid=1) + dump(COLLECTIVE), USER], {}, "code", 1, "", id="a parent's program waits"),
        pytest.param([IMPORTS, COLLECTIVE], None, "code", 0, "", id="a library that is imported is no collective"),
        ([COLLECTIVE] * 2, None, "collective", -1, "all 2 hosts"),
        ([COLLECTIVE.replace("idle", "active")] * 2, None, "collective", -1, "all 2 hosts"),
        ([READER] * 2, None, "storage", -1, "all 2 hosts"),
        ([COMPILING] * 2, told(5, 5, phase="compile"), "compile", -1, "all 2 hosts"),
        ([USER] * 2, told(5, 5, phase="compile"), "code", -1, "all 2 hosts"),
        *(([threads], None, kind, 0, "") for threads, kind in ((COLLECTIVE, "collective"), (READER, "storage"))),
        *(([threads], None, kind, 0, "") for threads, kind in ((COMPILING, "compile"), (USER, "code"))),
    ],
)  # fmt: skip
def test_the_hosts_that_differ_are_told(
    hosts: list[str], lines: dict[int, ProgressLine] | None, kind: str, worker: int, words: str
) -> None:
    """A process that waits for its children, as torch_xla.launch's does, is passed over, as is a DataLoader's. A host
    that has read ahead is still in a collective, with a thread that waits for storage too."""
    hang = explain(*hosts, lines=lines)
    assert (hang.kind, hang.worker) == (kind, worker)
    assert words in hang.what
    assert hang.what.endswith(" for 312 s") == (kind not in ("program", "step"))


def read_again(before: int, after: int, left: int = 9_000_000) -> str:
    """Output with how often memory pages were read again, before and after py-spy read libraries."""
    figures = f"{MEMORY.format(left=left, stalled=0, killed=0).strip()} workingset_refault_file {{}} \n"
    return figures.format(before) + dump(USER) + figures.format(after)


IDLE, EARLY = thread(*PREPARES), read_again(100, 50_100)
STUCK_READ = dump(COLLECTIVE, "D (disk sleep)")
SAMPLES = {
    "compiled in the first": (IDLE, COMPILES, "compile"),
    "compiled in the second": (COMPILES.replace("active", "idle"), IDLE, "compile"),
    "compiled in none": (IDLE, IDLE, "collective"),
    "active in the second": (COMPILING, WAITS, "collective"),
    "active in the first": (WAITS, COMPILING, "collective"),
    "active at two lines": (COMPILING, COMPILING.replace(":90", ":91"), "collective"),
    "held Python's lock in the first": (GIL.replace("active+gil", "active"), GIL, "code"),
    "held it in two places": (GIL, GIL.replace("fast.py:3", "fast.py:4"), "code"),
    "waited for it in the second": (STARVED, "", "code"),
    "waited for it in two places": (STARVED, STARVED.replace("a.py:1", "a.py:2"), "code"),
    "was in the kernel in the second": (STUCK_READ, COLLECTIVE, "collective"),
    "was in the kernel in the first": (COLLECTIVE, STUCK_READ, "collective"),
    "was in the kernel before it ended": ("", STUCK_READ, "collective"),
    "ended because another host was silent": ("", USER, "code"),
    "reads again what it has no memory for": (read_again(150_200, 150_300), EARLY, "memory: read 391 MiB again"),
    "has little memory left too": (read_again(150_200, 150_300, left=300_000), EARLY, "memory: has 0.3 of 23.5 GiB"),
    "had read nothing again yet": (read_again(150_200, 150_300), EARLY.replace("50100", "0"), "memory: read"),
    "read again while py-spy read libraries": (read_again(75_100, 150_300), EARLY, "code"),
    "has no first sample": (read_again(150_200, 150_300), "", "code"),
}


@pytest.mark.parametrize(("now", "before", "kind"), SAMPLES.values(), ids=SAMPLES)
def test_two_samples_tell_what_lasts(now: str, before: str, kind: str) -> None:
    hang = explain(now, COLLECTIVE, before=before)
    assert f"{hang.kind}: {hang.what.partition('host 0 ')[2]}".startswith(kind)
    assert hang.worker == (-1 if kind == "collective" else 0)


@pytest.mark.parametrize(
    ("log", "host"),
    [
        ("x UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
         "/job:worker/replica:0/task:12\nThe tasks have crashed.", 12),
        ("UNAVAILABLE: Task /job:worker/replica:0/task:3 heartbeat timeout. This indicates that", 3),
        ("x DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat", 0),
        ("/job:worker/replica:0/task:1 has connected to coordination service", None),
    ],
)  # fmt: skip
def test_the_host_whose_heartbeat_tensorflow_missed_is_read_from_its_message(log: str, host: int | None) -> None:
    assert find_silent_host(log) == host


def test_native_calls_are_added_where_py_spy_has_kept_those_of_python() -> None:
    plain = re.sub(r"    (xla|fast_call).*\n", "", COMPILES)
    assert parse_stacks(dump(plain + COMPILES)) == parse_stacks(dump(COMPILES))
    assert parse_stacks(dump(plain + COMPILES.replace("active", "active+gil"))).processes[0].threads[0].holds_gil
    lost = 'Thread 7 (active+gil): "MainThread"\n    0x7f60814df24a (/usr/lib/libc.so.6)\n'
    assert parse_stacks(dump(USER + lost)) == parse_stacks(dump(USER))
    assert parse_stacks(dump(COMPILES.replace("active", "active+gil") + plain)).processes[0].threads[0].holds_gil
    assert parse_stacks(dump(USER + "    main (/usr/bin/python3)\n")) == parse_stacks(dump(USER)), "not the innermost"


def test_threads_are_those_of_their_process_and_lines_before_any_process_are_none() -> None:
    two = parse_stacks(dump(DEADLOCK) + dump(USER, pid=8)).processes
    assert [[thread.name for thread in each.threads] for each in two] == [["MainThread", "logger"], ["MainThread"]]
    assert two[1].threads[0].frames[0].function == "augment"
    assert parse_stacks(dump("Thread 7 (idle)\n")).processes[0].threads[0].name == ""
    assert parse_stacks("polling 2\n").problem == "polling 2"
    assert parse_stacks("process 7 [] [] python\n").processes[0].state == "", "it ended while it was looked at"


@given(st.lists(st.text(alphabet=st.sampled_from('process thread7[]():"/.py\n SZT')), min_size=1, max_size=3))
def test_any_output_is_read(hosts: list[str]) -> None:
    assert explain(*hosts, lines={}).what


@pytest.fixture
def work(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> Workstation:
    monkeypatch.setattr("launcher.run.supervise._PROGRESS_EVERY", 0.2)
    work.hosts.exits[0] = None
    work.hosts.progress = {worker: (ProgressLine(7, 50, "training", loss=2.5),) for worker in (0, 1)}
    work.hosts.stacks = {0: dump(COLLECTIVE), 1: dump(USER) + "source /app/my_data.py:12     open('s3cret')\n"}
    return work


def test_a_run_that_hangs_ends_with_the_host_and_the_line(work: Workstation) -> None:
    outcome = work.run(work.config("run.stall_minutes=0.02", "run.secrets=[TOKEN]"), {"TOKEN": "s3cret"})
    assert outcome.verdict.kind is Kind.STALLED
    cause = outcome.verdict.cause
    assert cause.worker == 1
    where = "1 of 2 hosts wait in step 8's collective (train.py:50); host 1 is in augment at my_data.py:12"
    assert cause.what.startswith(where)
    assert "host 0: step 7, training: waits for devices" in outcome.verdict.symptoms[0]
    folder = work.ledger.folder
    kept = (folder / "stacks" / "attempt-0" / "explanation.txt").read_text()
    assert "host 1 is in augment" in kept
    assert "s3cret" not in kept + (folder / "events.jsonl").read_text(), "secrets are masked"
    assert (folder / "stacks" / "attempt-0" / "host-1.txt").read_text().count("=== 5 s later") == 1
    with tarfile.open(folder / "post-mortem-0.tar.gz") as archive:
        assert any(name.endswith("stacks/attempt-0/explanation.txt") for name in archive.getnames())
    assert [line["loss"] for line in map(json.loads, (folder / "progress-0.jsonl").read_text().splitlines())] == [2.5]


def test_a_secret_is_masked_before_its_line_is_cut(work: Workstation) -> None:
    command = "python train.py --config configs/larger.yaml --token "  # 60 characters of a command are told
    stopped = dump(COLLECTIVE, state="T (stopped)")
    work.hosts.stacks[1] = stopped.replace("python train.py", command + "hf_secret0123456789")
    config = work.config("run.stall_minutes=0.02", "run.secrets=[TOKEN]")
    cause = work.run(config, {"TOKEN": "hf_secret0123456789"}).verdict.cause
    assert "has a stopped process" in cause.what
    assert "hf_" not in cause.what
    assert "hf_" not in (work.ledger.folder / "stacks" / "attempt-0" / "explanation.txt").read_text()


def test_a_run_that_writes_nothing_but_makes_progress_goes_on(work: Workstation) -> None:
    work.hosts.quiet = True
    steps = iter(range(8, 10**6))

    def step() -> None:
        number = next(steps)
        work.clock.skipped += 5.0  # 75 s in all
        work.hosts.progress = {0: (ProgressLine(number, phase="training", step_seconds=0.25),)}
        if number == 22:
            work.hosts.end(0)

    work.hosts.hooks["observe"] = [step] * 100
    assert work.run(work.config("run.stall_minutes=0.5")).verdict.kind is Kind.FINISHED
    assert [event.step_seconds for event in work.ledger.events() if isinstance(event, events.Ended)] == [0.25]


def test_explain_takes_stacks_from_a_live_run_and_changes_nothing(work: Workstation) -> None:
    config = work.config()
    with pytest.raises(BadInput), execution.live_session(config, work.context(), None):
        pass
    detach(work, config)
    events = len(work.ledger.events())
    with execution.live_session(config, work.context(), None) as session:
        text, folder = execution.explain_run(session)
        assert "in step 8's collective (train.py:50); host 1 is in augment at my_data.py:12" in text
        assert (Path(folder) / "host-0.txt").exists()
        work.hosts.hooks["stacks"] = [lambda: None]
        work.hosts.fail("stacks", LaunchError("away"))
        begun = session.machine.clock.monotonic()
        assert "host 1 is in augment" in execution.explain_run(session)[0], "the first sample will do"
        assert session.machine.clock.monotonic() - begun >= 5.0, "what moves meanwhile does not hang"
        work.hosts.stacks = {}
        assert execution.explain_run(session)[0] is None
        work.hosts.fail("stacks", LaunchError("away"))
        work.hosts.fail("observe", LaunchError("gcloud gives no addresses"))
        assert execution.explain_run(session)[0] is None
    assert len(work.ledger.events()) == events


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_host_that_ended_the_others_is_explained_if_it_still_runs(work: Workstation, silent: int) -> None:
    detach(work, work.config())
    message = f"UNAVAILABLE: Task /job:worker/replica:0/task:{silent} heartbeat timeout. This indicates that"
    (ledger := work.ledger).log_file(0, 1 - silent).write_text(f"2026-01-01T00:00:00Z {message}\n")
    failed = Verdict(Kind.FAILED, Cause(1 - silent, "exit code 1", 1), ("host 2: exit code 1",))
    for other in (replace(failed, kind=Kind.HOST_LOST), replace(failed, cause=Cause(silent, "exit code 1", 1))):
        assert blame_silent_host(ledger, 0, other, [silent]) is other
    assert blame_silent_host(ledger, 0, failed, [1 - silent]) is failed
    stalled = blame_silent_host(ledger, 0, failed, [silent])
    assert (stalled.kind, stalled.cause.worker) == (Kind.STALLED, silent)
    assert stalled.symptoms == (f"host {1 - silent}: exit code 1", "host 2: exit code 1")
    with execution.live_session(work.config(), work.context(), None) as session:
        explained = explain_stall(session, 0, stalled, {}, 0.0, SecretMasker({}))
        work.hosts.stacks = {}
        assert explain_stall(session, 0, stalled, {}, 0.0, SecretMasker({})) is stalled
    assert explained.cause.worker == silent
    assert explained.cause.what.startswith(
        "it stopped sending heartbeats, so TensorFlow ended the other hosts: the host "
    )
    assert explained.symptoms == stalled.symptoms
