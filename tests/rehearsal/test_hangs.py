"""Claims about hangs: real ones, on hosts of emulated slices, and what the launcher says of each. Each test starts the
containers of a slice and waits until the run is called a stall. The program sums with gloo over all hosts."""

import base64
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.nightly import others_at_night
from tests.rehearsal.conftest import slice_file
from tests.rehearsal.test_recovery import FILE, trainable  # noqa: F401
from tests.rehearsal.workstation import COMPILE_FAST, EmulatedSlice, Workstation, docker, settings, shell

pytestmark = pytest.mark.timeout(900)  # on a busy machine

PROGRAM = """\
import ctypes, json, mmap, multiprocessing, os, queue, signal, socket, subprocess, sys, threading, time, urllib.request

FILE, SOURCE = os.environ["TPU_LAUNCH_PROGRESS_FILE"], "abc"

def tell(step, phase="training", program=SOURCE):
    with open(f"{FILE}.new", "w") as file:
        json.dump({"step": step, "phase": phase, "program": program, "step_seconds": 0.1}, file)
    os.replace(f"{FILE}.new", FILE)

JOIN
records = queue.Queue(2)

def read_records():
    for number in range(10**9):
        read_record(number)
        records.put(number)

def read_record(number):
    if rank in RANKS and number == 5:
        IN_LOADER

def prepare(step):
    if rank in RANKS and step == 5:
        IN_STEP

threading.Thread(target=read_records, name="reader", daemon=True).start()
print("begun", flush=True)
for step in range(10**9):
    tell(step)
    records.get()
    prepare(step)
    SUM
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Framework:
    """What differs in the program."""

    join: str
    sum: str
    run: str
    backend: str
    stall_minutes: float = 0.2


TORCH = Framework(
    """import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(4)""",
    "dist.all_reduce(total)",
    "tpu-train exec",
    "torch-xla",
)
TENSORFLOW = Framework(
    """hosts, rank = os.environ["TPU_WORKER_HOSTNAMES"].split(","), int(os.environ["TPU_WORKER_ID"])
task = {"type": "worker", "index": rank}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": [f"{host}:8490" for host in hosts]}, "task": task})
import tensorflow as tf
HEARTBEAT
strategy = tf.distribute.MultiWorkerMirroredStrategy()
@tf.function
def sum_over_hosts():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(4)))""",
    "sum_over_hosts()",
    "python",
    "tensorflow",
)
HEARTBEAT = """\
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager import context
context.context().configure_coordination_service(
    "standalone", "/job:worker/replica:0/task:0", heartbeat_timeout_in_ms=10**6,
    coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=len(hosts))],
)"""
IMPATIENT = replace(TENSORFLOW, join=TENSORFLOW.join.replace("HEARTBEAT", ""), stall_minutes=0.5)
"""With TensorFlow's own limit for a silent host: 10 s, which comes before ours, and which a busy machine may miss."""

TENSORFLOW = replace(TENSORFLOW, join=TENSORFLOW.join.replace("HEARTBEAT", HEARTBEAT))


@dataclass(frozen=True)
class Injection:
    """A hang of hosts at step 5, and what the explanation must say. The text stands in for a line of the program."""

    says: str  # a pattern, in the first cause
    in_step: str = "pass"
    in_loader: str = "pass"
    worker: int = 1
    ranks: tuple[int, ...] = (1,)
    meanwhile: Callable[[Workstation], object] = lambda work: None  # what is done to the hosts once the program runs
    framework: Framework = TORCH

    def program(self) -> str:
        text = PROGRAM
        for name, code in (("IN_STEP", self.in_step), ("IN_LOADER", self.in_loader), ("RANKS", str(self.ranks))):
            text = text.replace(name, code.replace("\n", "\n        "))
        return text.replace("JOIN", self.framework.join).replace("SUM", self.framework.sum)


STOPPED = Injection("has a stopped process", in_step="os.kill(os.getpid(), signal.SIGSTOP)")
LOADER = Injection("is in read_record at my_program.py", in_loader="time.sleep(10000)")
SILENT = Injection(
    "waits for storage in prepare at my_program.py",
    in_step="""server = socket.create_server(("127.0.0.1", 0))
urllib.request.urlopen("http://127.0.0.1:%d/o/part" % server.getsockname()[1])""",
)


def limit_memory(work: Workstation) -> None:
    """Limits the memory of the container on host 1, as a pod's limit or the machine's does."""
    docker("update", "--memory", "1200m", "--memory-swap", "1200m", *work.containers(1))


MEMORY = Injection(
    r"killed for lack of memory \(OOM\)",
    in_step="""global fill
def fill(_):
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    parts = []
    while len(parts) < 300:
        parts.append(bytearray(os.urandom(1000) * 10_000))
        time.sleep(0.1)
multiprocessing.get_context("fork").Pool(1).map(fill, [0])""",
    meanwhile=limit_memory,
)
THRASHING = Injection(
    "MiB again between two samples, for which it has no memory, and is in prepare at my_program.py",
    in_step="""with open("/tmp/part", "wb") as file:
    for _ in range(1500):
        file.write(b"x" * 2**20)
part = mmap.mmap(os.open("/tmp/part", os.O_RDONLY), 0, prot=mmap.PROT_READ)
while True:
    for place in range(0, len(part), 4096):
        part[place]""",
    meanwhile=limit_memory,
)
BUCKET_SILENT = Injection(
    "each waits for storage in read_record at my_program.py",
    in_loader="""from google.cloud import storage
blob = storage.Client(project="p").bucket("rehearsal").blob(f"record-{rank}")
blob.upload_from_string("abc")
while True:
    blob.download_as_bytes(timeout=None)
    records.put(number)""",
    worker=-1,
    ranks=(0, 1),
    meanwhile=lambda work: work.good("emulator", "inject", "slow", "--service", "storage", "--seconds", "10000"),
)
COMPILATION = Injection(
    "compiles (or computes )?in prepare at my_program.py",  # native calls can't be read in 15 s on a very busy machine
    in_step="""tell(step, "start")  # importing and tracing take long on a busy machine
os.environ["PJRT_DEVICE"] = "CPU"
import torch_xla
value = weights = torch.ones(8, 8).to(torch_xla.device())
for number in range(30_000):
    value = torch.sin(value @ weights) + number
tell(step)
torch_xla.sync()""",
)
FILE_SILENT = replace(
    BUCKET_SILENT,
    in_loader="""path = f"gs://rehearsal/record-{rank}"
with tf.io.gfile.GFile(path, "w") as file:
    file.write("abc")
while True:
    tf.io.gfile.GFile(path).read()
    records.put(number)""",
)
PIPELINE_SILENT = replace(
    BUCKET_SILENT,
    says="each waits for data in prepare at my_program.py",
    in_step="""path = f"gs://rehearsal/record-{rank}"
with tf.io.gfile.GFile(path, "w") as file:
    file.write("abc")
for number, _ in enumerate(tf.data.Dataset.from_tensors(path).repeat().map(tf.io.read_file)):
    tell(step + number)""",
    in_loader="pass",
)
NEVER_ENTERED = Injection("is in prepare at my_program.py", in_step="time.sleep(10000)")
INJECTIONS = {
    "stopped": STOPPED,
    "loader": LOADER,
    "silent": SILENT,
    "out of memory": MEMORY,
    "too little memory": THRASHING,
    "a bucket that stops answering": BUCKET_SILENT,
    "an endless compilation": COMPILATION,
    "two locks": Injection(
        "threads that wait for each other's locks",
        in_step="""a_lock, b_lock = threading.Lock(), threading.Lock()
def other():
    with b_lock:
        time.sleep(1)
        with a_lock:
            pass
threading.Thread(target=other, name="other", daemon=True).start()
with a_lock:
    time.sleep(2)
    with b_lock:
        pass""",
    ),
    "a native call that holds Python's lock": Injection(
        "holds Python's lock, for which others wait: it is in prepare at my_program.py",
        in_step="threading.Thread(target=time.sleep, args=(1,)).start()\nctypes.PyDLL(None).sleep(10000)",
    ),
    "a collective that one host never enters": NEVER_ENTERED,
    **{
        f"TensorFlow: {name}": replace(injection, framework=TENSORFLOW)
        for name, injection in {
            "stopped": STOPPED,
            "loader": LOADER,
            "a bucket that stops answering": FILE_SILENT,
            "a tf.data pipeline on a silent bucket": PIPELINE_SILENT,
            "a collective that one host never enters": NEVER_ENTERED,
        }.items()
    },
    **{  # host 0 has the coordination service, so that host 1 only misses its answers
        f"TensorFlow: it finds host {worker} silent first": Injection(
            "it stopped sending heartbeats, so TensorFlow ended the other hosts: host",
            STOPPED.in_step,
            worker=worker,
            ranks=(worker,),
            framework=IMPATIENT,
        )
        for worker in (0, 1)
    },
}


def explain_injection(slice_: EmulatedSlice, injection: Injection) -> None:
    """Runs the program until it hangs, and checks the verdict: the right host, and the right line."""
    text = base64.b64encode(injection.program().encode()).decode()
    line = """echo '{"step": 0, "phase": "start"}' >"$TPU_LAUNCH_PROGRESS_FILE\""""  # before imports, which take long
    framework = injection.framework
    start = f"{line}; echo {text} | base64 -d >/tmp/my_program.py; exec {framework.run} /tmp/my_program.py"
    changes = settings(f"run.stall_minutes={framework.stall_minutes}", f"image.backend={framework.backend}")
    running = slice_.begin_run(start, *changes)
    running.wait_for(r"^\[1\] begun", 200)
    begun = time.monotonic()
    injection.meanwhile(slice_)
    ended = running.end(240)
    slice_.good("emulator", "inject", "clear")
    seconds = time.monotonic() - begun
    told = ended.require(13).json()
    assert (told["outcome"], told["cause"]["worker"]) == ("stalled", injection.worker), ended.output
    assert re.search(injection.says, told["cause"]["what"]), told["cause"]["what"]
    folder = slice_.runs / told["run"] / "stacks" / "attempt-0"
    assert re.search(injection.says, (folder / "explanation.txt").read_text())
    print(f"{seconds:.0f} s: {told['cause']['what']}")


@pytest.mark.parametrize("name", others_at_night(INJECTIONS, ("stopped", "loader", "silent")))
def test_the_host_and_the_line_of_a_hang_are_named(two_hosts: EmulatedSlice, name: str) -> None:
    explain_injection(two_hosts, INJECTIONS[name])


@pytest.fixture(scope="module")
def four_hosts(emulator: Workstation) -> Iterator[EmulatedSlice]:
    """A v4-32 that is READY."""
    with emulator.slice_of(emulator.file("four.yaml", slice_file("four", "v4-32"))) as made:
        yield made


@pytest.mark.nightly
def test_one_of_four_hosts_is_named(four_hosts: EmulatedSlice) -> None:
    says = "3 of 4 hosts wait in step 6's collective"
    explain_injection(four_hosts, replace(NEVER_ENTERED, says=says, worker=2, ranks=(2,)))


@pytest.mark.nightly
def test_a_trainer_that_is_stopped_on_one_host_is_explained_live_and_in_the_verdict(trainable: Workstation) -> None:  # noqa: F811
    work = trainable
    steps = ("train.steps=100000", "run.stall_minutes=2", "checkpoint.every_steps=100000", "train.log_every=1")
    running = work.begin("--emulated", "run", "--new", "-f", FILE, "--json", *COMPILE_FAST, *settings(*steps))
    running.wait_for(r"^\[0\].*\bstep +1[0-9]/", 400)
    time.sleep(8)  # until it is told
    for columns in ("80", "160"):
        shown = work.good("--emulated", "top", "-f", FILE, "--once", "--columns", columns).output
        print(shown)
        assert "training" in shown
        assert re.search(r"step \d+/100,000", shown)
    find = "tr '\\0' ' ' <$p/cmdline | grep -q '^[^ ]*python.* train '"
    stop = f"for p in /proc/[0-9]*; do {find} && kill -STOP ${{p#/proc/}}; done; :"
    work.good("--emulated", "exec", "-f", FILE, "--host", "1", *shell(stop))
    live = work.good("--emulated", "explain", "-f", FILE).output
    print(live)
    assert re.search(r"host 1 has a stopped process: process \d+ \(\S*python", live)
    told = running.end(400).require(13).json()
    assert told["cause"]["worker"] == 1, told
    assert "1 of 2 hosts wait in step" in told["cause"]["what"]
