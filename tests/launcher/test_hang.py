"""Claims about hangs: which host one is put down to, from stacks as py-spy prints them; and, with a provider in memory,
when a run ends for it, what the verdict says, and what is kept."""

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput, LaunchError
from launcher.masking import SecretMasker
from launcher.run import events, execution
from launcher.run.hang import Hang, blame_silent_host, explain_hang, explain_stall, find_silent_host
from launcher.run.stack_traces import parse_stacks
from launcher.run.verdict import Cause, Kind, Verdict
from tests.launcher.test_runs import Hosts, Workstation, detach
from training.telemetry.progress_line import ProgressLine

COLLECTIVE = """\
Thread 7 (idle): "MainThread"
    all_reduce (/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py:2501)
    wrapper (/usr/lib/python3/dist-packages/torch/distributed/c10d_logger.py:83)
    train_step (/app/train.py:50)
    <module> (/app/train.py:90)
source /app/train.py:50     dist.all_reduce(gradients)
"""
READER = """\
Thread 7 (idle): "MainThread"
    wait (/usr/lib/python3.11/threading.py:320)
    get (/usr/lib/python3.11/queue.py:171)
    next_batch (/app/train.py:40)
Thread 9 (idle): "reader"
    readinto (/usr/lib/python3.11/socket.py:705)
    _read_status (/usr/lib/python3.11/http/client.py:286)
    getresponse (/usr/lib/python3/dist-packages/urllib3/connection.py:461)
    open_shard (/app/my_data.py:88)
    run (/usr/lib/python3.11/threading.py:975)
Thread 11 (idle): "progress"
    wait (/usr/lib/python3.11/threading.py:320)
    _write_repeatedly (/opt/tpu-launch/training/telemetry/host_progress.py:120)
source /app/my_data.py:88     with open("gs://bucket/part-7") as file:
"""
USER = 'Thread 7 (idle): "MainThread"\n    augment (/app/my_data.py:12)\n'
LOCKED = """\
Thread 7 (idle): "MainThread"
    write (/app/log.py:8)
source /app/log.py:8     with log_lock:
"""
DEADLOCK = (
    LOCKED
    + """\
Thread 8 (idle): "logger"
    flush (/app/log.py:20)
source /app/log.py:20     with file_lock:
"""
)
GIL = """\
Thread 7 (active+gil): "MainThread"
    native (/app/fast.py:3)
Thread 8 (idle): "other"
    f (/app/a.py:1)
"""
COMPILING = (
    'Thread 7 (active): "MainThread"\n    sync (/x/site-packages/torch_xla/torch_xla.py:90)\n    f (/app/a.py:1)\n'
)
WAITS = COMPILING.replace("active", "idle")
COMPILES = """\
Thread 7 (active): "MainThread"
    xla::HloPassPipeline::Run<xla::HloModule> (/x/site-packages/_XLAC.so)
    xla::cpu::CpuCompiler::RunHloPasses (/x/site-packages/_XLAC.so)
    sync (/x/site-packages/torch_xla/torch_xla.py:90)
    prepare (/app/a.py:1)
"""
STARVED = """\
Thread 7 (idle): "MainThread"
    fast_call (libfast.so)
    f (/app/fast.py:3)
Thread 8 (idle): "other"
    pthread_cond_timedwait (/usr/lib/libc.so.6)
    f (/app/a.py:1)
"""
PLAIN_LOCK = """\
Thread 7 (idle): "MainThread"
    PyThread_acquire_lock_timed (/usr/bin/python3.11)
    write (/app/log.py:8)
"""
MEMORY = "memory MemTotal: 24684092 kB MemAvailable: {left} kB full avg10={stalled}.00 oom_kill {killed} \n"


def dump(threads: str, state: str = "S (sleeping)", channel: str = "futex_wait", pid: int = 7) -> str:
    top = f"UID PID\nroot 1\nprocess {pid} [{state}] [{channel}] python train.py\n"
    return f"{top}Process {pid}: python train.py\n{threads}"


def explain(
    *hosts: str, lines: dict[int, ProgressLine] | None = None, seconds: float = 312.0, before: str | None = None
) -> Hang:
    """Explains stacks. `before`: of host 0 in the first sample; as in the second, unless given."""
    stacks = {worker: parse_stacks(text) for worker, text in enumerate(hosts)}
    first = stacks if before is None else stacks | {0: parse_stacks(before)}
    told = {worker: ProgressLine(12_430, phase="training") for worker in stacks} if lines is None else lines
    return explain_hang(first, stacks, told, seconds)


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        (dump(USER), "code", "is in augment at my_data.py:12"),
        (dump(READER), "storage",
         'for storage in open_shard at my_data.py:88: with open("gs://bucket/part-7") as file: (thread reader)'),
        (dump(LOCKED), "lock", "waits for a lock in write at log.py:8: with log_lock:"),
        (dump(DEADLOCK), "deadlock", "flush at log.py:20"),
        (dump(COMPILES), "compile",
         "compiles in prepare at a.py:1 (native: xla::HloPassPipeline::Run<xla::HloModule> (_XL"),
        (dump(COMPILING), "compile", "compiles or computes in f at a.py:1"),
        (dump(COMPILES.replace("active", "active+gil")), "compile", "compiles in prepare at a.py:1"),
        (dump(STARVED), "interpreter", "others wait: it is in f at fast.py:3 (native: fast_call (libfast.so))"),
        (dump(PLAIN_LOCK), "lock", "waits for a lock in write at log.py:8"),
        (MEMORY.format(left=9_000_000, stalled=0, killed=2) + dump(USER), "memory",
         "had 2 processes killed for lack of memory (OOM), and is in augment at my_data.py:12"),
        (MEMORY.format(left=300_000, stalled=0, killed=0) + dump(USER), "memory",
         "has 0.3 of 23.5 GiB of its memory left"),
        (MEMORY.format(left=9_000_000, stalled=40, killed=0) + dump(USER), "memory", "waited for memory 40 % of the"),
        (MEMORY.format(left=9_000_000, stalled=39, killed=0) + dump(USER), "code", "is in augment at my_data.py:12"),
        (dump(USER.replace("/app", "/usr/lib/python3.11")), "code", "is in augment at my_data.py:12"),
        (dump(GIL), "interpreter", "holds Python's lock: it is in native at fast.py:3"),
        (dump(GIL[: GIL.index("Thread 8")]), "code", "holds Python's lock: it is in native at fast.py:3"),
        (dump(STARVED.replace("    pthread", "    wait (/x/libxla.so)\n    pthread")), "code", "is in f at fast.py:3"),
        (dump(USER + DEADLOCK.replace("Thread 7", "Thread 9").replace("MainThread", "writer")), "code", "in augment"),
        (dump(USER.replace("MainThread", "loader")), "code", "is in augment at my_data.py:12 (thread loader)"),
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
        hosts = [dump(COLLECTIVE)] * 4
        hosts[worker] = odd
        hang = explain(*hosts)
        assert (hang.kind, hang.worker) == (kind, worker)
        assert "3 of 4 hosts wait in step 12,431's collective (train.py:50); " in hang.what
        assert f"host {worker} " in hang.what
        assert words in hang.what
        assert hang.what.endswith("for 312 s")
        assert len(hang.hosts) == 4
        assert hang.advice in hang.paragraph


def test_where_no_host_waits_for_another_the_few_that_differ_are_named() -> None:
    hang = explain(dump(USER), dump(USER), dump(LOCKED), dump(USER))
    assert (hang.kind, hang.worker) == ("lock", 2)
    assert hang.what.startswith("host 2 waits for a lock")
    hang = explain(dump(USER), dump(USER), dump(LOCKED), dump(LOCKED))
    assert (hang.kind, hang.worker) == ("code", 0), "no half is the odd one"
    for other in (ProgressLine(9, phase="training"), ProgressLine(8, phase="compile")):
        assert explain(dump(USER), dump(USER), lines={0: ProgressLine(8, phase="training"), 1: other}).kind == "code"
    stopped = dump(COLLECTIVE, "T (stopped)")
    assert "host 1 has a stopped process" in explain(dump(USER), stopped).what
    assert "1 of 2 hosts are elsewhere (code) (my_data.py:12); " in explain(dump(USER), stopped).what
    assert explain(MEMORY.format(left=1, stalled=0, killed=1) + dump(USER), stopped).worker == 0
    assert explain(dump(USER), dump(COLLECTIVE), lines={}).what.startswith("1 of 2 hosts wait (train.py:50); host 0 ")


def test_several_hosts_that_differ_are_told_together_where_they_are_at_one_place() -> None:
    waits = [dump(COLLECTIVE)] * 3
    assert "; hosts 3, 4: each is in augment at my_data.py:12" in explain(*waits, *[dump(USER)] * 2).what
    elsewhere = "; hosts 3, 4 are elsewhere: host 3 is in augment at my_data.py:12"
    assert elsewhere in explain(*waits, dump(USER), dump(LOCKED)).what
    lines = {worker: ProgressLine(8 + (worker > 2)) for worker in range(5)}
    ahead = "hosts 3, 4 are at step 9, the other hosts are at step 8"
    assert explain(*waits, *waits[:2], lines=lines).what == ahead


def test_another_program_and_another_step_are_told_where_all_wait() -> None:
    lines = {worker: ProgressLine(8, program="abc") for worker in range(3)}
    hosts = [dump(COLLECTIVE)] * 3
    assert explain(*hosts, lines={**lines, 1: ProgressLine(8, program="xyz")}).what == (
        "host 1 runs another program than the other hosts"
    )
    for more in ({1: ProgressLine(8)}, {3: ProgressLine(9, program="xyz")}):
        assert explain(*hosts, lines={**lines, **more}).kind == "collective", "not known yet, or a host without stacks"
    hang = explain(*hosts, lines={**lines, 2: ProgressLine(9, program="abc")})
    assert (hang.kind, hang.worker, hang.what) == ("step", 2, "host 2 is at step 9, the other hosts are at step 8")
    two = explain(*hosts[:2], lines={0: ProgressLine(9), 1: ProgressLine(8)})
    assert two.worker == 0, "of two, the one that is ahead skipped a collective"


def test_a_host_compiles_by_native_calls_or_activity_in_both_samples_or_by_the_phase_that_it_tells() -> None:
    plain = re.sub(r"    xla.*\n", "", COMPILES).replace("active", "idle")
    other = dump(COLLECTIVE)
    assert explain(dump(plain), other, before=dump(COMPILES)).what.count("compiles in prepare") == 1
    assert explain(dump(plain), other, before=dump(plain)).kind == "collective"
    assert explain(dump(COMPILING), other, before=dump(WAITS)).kind == "collective", "active in one sample only"
    assert explain(dump(WAITS), other, before=dump(COMPILING)).kind == "collective"
    assert explain(dump(COMPILING), other, before=dump(COMPILING.replace(":90", ":91"))).kind == "collective"
    assert explain(dump(COMPILES.replace("active", "idle")), other, before=dump(plain)).kind == "compile"
    lines = {0: ProgressLine(5, phase="compile"), 1: ProgressLine(5, phase="training")}
    for worker in (0, 1):
        hang = explain(dump(WAITS), other, lines={0: lines[worker], 1: lines[1 - worker]})
        assert (hang.kind, hang.worker) == ("compile", worker)
        assert f"host {worker} compiles: waits for devices or other hosts in" in hang.what


def test_a_host_that_reads_the_same_pages_again_and_again_has_too_little_memory() -> None:
    figures = MEMORY.strip().format(left=9_000_000, stalled=0, killed=0) + " workingset_refault_file {} \n"
    early, late = (
        figures.format(before) + dump(USER) + figures.format(after)
        for before, after in ((100, 50_100), (150_200, 150_300))  # py-spy reads libraries meanwhile
    )
    hang = explain(late, dump(COLLECTIVE), before=early)
    assert (hang.kind, hang.worker) == ("memory", 0)
    assert "host 0 read 391 MiB again between two samples, for which it has no memory, and is in augment" in hang.what
    assert explain(late, dump(COLLECTIVE), before=early.replace("50100", "0")).kind == "memory", "none was read yet"
    assert "0.3 of 23.5 GiB" in explain(late.replace("9000000", "300000"), dump(COLLECTIVE), before=early).what
    calm = late.replace("150200", "75100")
    assert explain(calm, dump(COLLECTIVE), before=early).kind == "code", "py-spy's own reading does not count"
    assert explain(late, dump(COLLECTIVE), before="").kind == "code", "without a first sample nothing has grown"


def test_native_threads_that_wait_for_a_connection_are_counted_where_data_is_waited_for() -> None:
    frames = "    __next__ (/x/site-packages/tensorflow/python/data/ops/iterator_ops.py:1)\n    f (/app/t.py:3)\n"
    hang = explain(*[dump(f'polling 2\nThread 7 (idle): "MainThread"\n{frames}')] * 2)
    assert (hang.kind, hang.worker) == ("data", -1)
    assert "each waits for data in f at t.py:3, 2 threads for a connection" in hang.what
    assert "t.py:3, 1 thread for a" in explain(dump(f'polling 1\nThread 7 (idle): "MainThread"\n{frames}')).what


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


@pytest.mark.parametrize(
    ("threads", "kind", "phase"),
    [
        (COLLECTIVE, "collective", "training"), (COLLECTIVE.replace("idle", "active"), "collective", "training"),
        (READER, "storage", "training"), (COMPILING, "compile", "compile"), (USER, "code", "compile"),
    ],
)  # fmt: skip
def test_no_host_is_named_where_all_are_at_the_same_place(threads: str, kind: str, phase: str) -> None:
    lines = {worker: ProgressLine(5, phase=phase) for worker in range(2)}
    hang = explain(dump(threads), dump(threads), lines=lines)
    assert (hang.kind, hang.worker) == (kind, -1)
    assert "all 2 hosts" in hang.what
    assert explain(dump(threads), lines={0: lines[0]}).worker == 0


def test_storage_is_named_and_no_host_where_all_wait_for_it() -> None:
    """A host that has read ahead is still in a collective, with a thread that waits for storage too."""
    reads = READER[READER.index("Thread 9") :]
    ahead = COLLECTIVE + reads
    for hosts in ((dump(READER), dump(ahead)), (dump(READER), dump(READER), dump(COLLECTIVE))):
        hang = explain(*hosts)
        assert (hang.kind, hang.worker) == ("storage", -1)
        assert f"2 of {len(hosts)} hosts: each waits for storage in open_shard at my_data.py:88" in hang.what
    assert explain(dump(READER), dump(COLLECTIVE), dump(COLLECTIVE)).worker == 0
    assert explain(dump(READER), dump(COLLECTIVE)).worker == 0


def test_a_host_that_gives_no_stacks_and_has_no_memory_left_is_short_of_memory() -> None:
    lines = {worker: ProgressLine(5, memory_used=98 + worker, memory_total=100) for worker in (0, 1)}
    assert explain(dump(COLLECTIVE), "", lines=lines).kind == "memory"
    assert "host 0 gives no stack traces (no answer)" in explain("", dump(COLLECTIVE), lines=lines).what


def test_what_a_host_shows_in_one_of_two_samples_is_no_cause() -> None:
    ended = explain("", dump(COLLECTIVE), dump(COLLECTIVE), before=dump(USER))
    assert (ended.kind, ended.worker) == ("code", 0), "it has ended because another host was silent"
    held = dump(GIL.replace("active+gil", "active"))
    assert explain(held, dump(COLLECTIVE), before=dump(GIL)).kind == "code", "it was held in one sample only"
    moves = dump(GIL.replace("fast.py:3", "fast.py:4"))
    assert explain(dump(GIL), dump(COLLECTIVE), before=moves).kind == "code", "it was held in two places"
    for before in ("", dump(STARVED.replace("a.py:1", "a.py:2"))):
        assert explain(dump(STARVED), dump(COLLECTIVE), before=before).kind == "code", "it waited in one sample only"
    reads = dump(COLLECTIVE, "D (disk sleep)")
    other = dump(COLLECTIVE)
    for now, before in ((reads, other), (other, reads), ("", reads)):
        assert explain(now, other, before=before).kind == "collective", "it was seen in one sample only"


def test_native_calls_are_added_where_py_spy_has_kept_those_of_python() -> None:
    plain = re.sub(r"    (xla|fast_call).*\n", "", COMPILES)
    assert parse_stacks(dump(plain + COMPILES)) == parse_stacks(dump(COMPILES))
    holder = parse_stacks(dump(plain + COMPILES.replace("active", "active+gil"))).processes[0].threads[0]
    assert holder.holds_gil
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


def test_a_process_that_waits_for_its_children_is_passed_over() -> None:
    """torch_xla.launch's parent, and a DataLoader's workers."""
    parent = 'Thread 1 (idle): "MainThread"\n    wait (/usr/lib/python3.11/multiprocessing/connection.py:930)\n'
    file = "/x/site-packages/torch/utils/data/dataloader.py"
    loader = f'Thread 7 (idle): "MainThread"\n    get ({file}:9)\n    f (/app/t.py:3)\n'
    worker = 'Thread 8 (idle): "MainThread"\n    __getitem__ (/app/my_data.py:5)\n'
    assert "waits for another thread or process in wait at connection.py:930" in explain(dump(parent)).what
    hang = explain(dump(parent, pid=1) + dump(loader) + dump(worker, pid=8), dump(COLLECTIVE))
    assert (hang.worker, hang.kind) == (0, "code")
    assert "__getitem__ at my_data.py:5" in hang.what
    assert explain(dump(parent, pid=1) + dump(COLLECTIVE), dump(USER), lines={}).worker == 1, "its program waits"


def test_a_library_that_is_imported_is_no_collective() -> None:
    frames = (
        "    <module> (/x/site-packages/torch_xla/__init__.py:20)\n"
        "    _find_and_load (<frozen importlib._bootstrap>:1178)\n"
        "    open_backend (/opt/tpu-launch/training/backends/torch_xla/backend.py:20)\n"
    )
    hang = explain(dump(f'Thread 7 (active): "MainThread"\n{frames}'), dump(COLLECTIVE))
    assert (hang.kind, hang.worker) == ("code", 0)


@given(st.lists(st.text(alphabet=st.sampled_from('process thread7[]():"/.py\n SZT')), min_size=1, max_size=3))
def test_any_output_is_read(hosts: list[str]) -> None:
    assert explain(*hosts, lines={}).what


STUCK = {worker: (ProgressLine(7, 50, "training", loss=2.5),) for worker in (0, 1)}
STACKS = {0: dump(COLLECTIVE), 1: dump(USER) + "source /app/my_data.py:12     open('s3cret')\n"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workstation:
    monkeypatch.setattr("launcher.run.supervise._PROGRESS_EVERY", 0.2)
    work = Workstation(tmp_path, Hosts([None]))
    work.hosts.progress, work.hosts.stacks = dict(STUCK), dict(STACKS)
    return work


def test_a_run_that_hangs_ends_with_the_host_and_the_line(work: Workstation) -> None:
    config = work.config("run.stall_minutes=0.02", "run.secrets=[TOKEN]")
    outcome = work.run(config, {"TOKEN": "s3cret"})
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
