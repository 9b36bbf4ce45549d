"""Runs TensorFlow on a TPU slice of several hosts: one program on host 0 drives all devices through a worker on every
host.

`tpu-train train` and `tpu-train evaluate` start on all hosts alike, as for PyTorch, with the same exit codes:

  every host   starts a worker (a process of this module) and meets the other hosts once the worker listens
  host 0       runs the loop with TPU_NAME=grpc://... as if it were the only host, and sends the workers their rows
  other hosts  serve until host 0 ends, and end with its code if that is 0 or 75, else with 76 (lost a peer)

The rendezvous of all hosts stays open meanwhile: the loss of a host or of its worker ends all hosts; a host that
receives a stop request passes it to host 0 as the name of its phase. Host 0 may notice the loss of a worker before that
worker's host does, as a failed operation: it then waits for that host's report. Never run on TPUs; the workers,
operations on them and the barriers are tested on CPUs.

Ports: 8470 (TPU_TASK_PORT) of the workers; 8471 of libtpu, which finds its peers by TPU_WORKER_HOSTNAMES.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from training.config import TrainerConfig
from training.distributed.agreement import agree, code_hash
from training.distributed.cluster import Cluster, tensorflow_plugin, tpu_environment
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import Exit, LostPeer, StopRequested, TrainError, UnusableTpu

WORKER_PORT = 8470
STOP_PHASE = "asked to stop"  # the phase of a host that has received a stop request
_FOREVER = 10 * 365 * 86400.0  # seconds
CAUSE_SECONDS = 5.0  # host 0 waits so long for the report of the host whose worker it lost
# A host that lost host 0 waits so long for the end of its own worker, because a dying process closes its connections
# first. Less than rendezvous.GRACE.
WORKER_END_SECONDS = 0.5


@contextlib.contextmanager
def open_host(
    config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, shutdown: ShutdownRequest
) -> Iterator[tuple[Cluster, Rendezvous] | None]:
    """Runs this host's worker during the block. On host 0, sets TPU_NAME for good and yields a cluster and a rendezvous
    of one host for the program; then tells the other hosts if the block finished or StopRequested left it. Others wait
    for that and yield None. Raises BadInput if TensorFlow can't drive the slice or hosts differ, StopRequested on other
    hosts if host 0 has saved and stopped, LostPeer (host 0: up to 5 s later), and TrainError if a worker fails."""
    environment = worker_environment(cluster)  # raises if TensorFlow can't drive this slice
    agree(rendezvous, {"configuration": config.hash, "code": code_hash()}, config.rendezvous.start_seconds)
    port = int(os.environ.get("TPU_TASK_PORT") or WORKER_PORT)
    with worker(environment, port, config.rendezvous.start_seconds) as serving:
        rendezvous.set_phase("waiting for the workers of all hosts")
        own = f"{cluster.addresses[cluster.worker]}:{port}"
        workers = rendezvous.meet("workers", own, config.rendezvous.start_seconds)
        if not cluster.is_first:
            _serve(rendezvous, shutdown, serving)
            yield None
            return
        os.environ["TPU_NAME"] = ",".join(f"grpc://{address}" for address in workers)
        chief = Chief(rendezvous, shutdown, serving)
        try:
            yield cluster.alone(), chief
        except StopRequested:
            rendezvous.meet("done", int(Exit.SAVED))
            raise
        except LostPeer:
            chief.await_cause(CAUSE_SECONDS)
            raise
        rendezvous.meet("done", int(Exit.FINISHED))


def worker_environment(cluster: Cluster) -> dict[str, str]:
    """Returns the environment variables of a worker, its plugin and its libtpu. Raises BadInput if the accelerator is
    unknown or has another number of hosts, or TensorFlow is not the wheel for TPUs."""
    return {**tpu_environment(cluster), **tensorflow_plugin(), "TPU_STDERR_LOG_LEVEL": "0"}


@contextlib.contextmanager
def worker(environment: dict[str, str], port: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Starts this host's worker, with `environment` beside this process's variables, waits until it listens on `port`,
    and kills it after the block. Raises TrainError if its TPU is unusable, it ends, or `seconds` pass."""
    command = [sys.executable, "-m", "training.backends.tensorflow.pod", str(port)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # `select` does not see lines that a buffer of Python has
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        _await_serving(process, port, seconds)
        yield process
    finally:
        process.kill()
        process.wait()


def _await_serving(process: subprocess.Popen[bytes], port: int, seconds: float) -> None:
    """Waits until the worker prints on its stdout, a pipe, that it serves. Raises TrainError if it prints that its TPU
    is unusable, it ends, or `seconds` pass. `port` is only for messages."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.5)[0]:
            line = process.stdout.readline()
            if line.strip() == b"serving":
                return
            if line.startswith(b"unusable: "):
                raise TrainError(line.decode().removeprefix("unusable: ").strip())
            if not line:
                raise TrainError(
                    f"the TPU worker of this host (port {port}) ended with code {process.wait()} before it served; "
                    "see its output above"
                )
    raise TrainError(f"the TPU worker of this host does not serve on port {port} within {seconds:g} s")


def _worker_error(serving: subprocess.Popen[bytes]) -> TrainError | None:
    """Returns the error for a worker whose process has ended; None while it runs."""
    code = serving.poll()
    if code is None:
        return None
    return TrainError(f"the TPU worker of this host ended with code {code}; see its output above")


def _serve(rendezvous: Rendezvous, shutdown: ShutdownRequest, serving: subprocess.Popen[bytes]) -> None:
    """Waits until host 0 ends; shows it a stop request of this host, which then does not end by itself (clears
    `nothing_to_save`). Returns if host 0 has finished; raises StopRequested if host 0 was stopped, TrainError if this
    host's worker ends, LostPeer if another host is lost."""
    shutdown.nothing_to_save = False  # host 0 decides, and saves
    outcome: list[Any] = []  # host 0's exit code, or the error of the rendezvous

    def wait() -> None:
        try:
            outcome.append(rendezvous.meet("done", None, _FOREVER)[0])
        except TrainError as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait, name="served", daemon=True)
    waiting.start()
    while waiting.is_alive():
        rendezvous.set_phase(STOP_PHASE if shutdown.requested else "serving")
        if error := _worker_error(serving):
            raise error
        waiting.join(0.2)
    if isinstance(outcome[0], TrainError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            serving.wait(WORKER_END_SECONDS)
        raise _worker_error(serving) or outcome[0]
    if outcome[0] == Exit.SAVED:
        raise StopRequested("host 0 was asked to stop")


class Chief(Rendezvous):
    """The rendezvous of the loop on host 0, which meets no other hosts: `meet` and `check` only raise if another host
    or this host's worker is lost."""

    def __init__(self, outer: Rendezvous, shutdown: ShutdownRequest, serving: subprocess.Popen[bytes]) -> None:
        """Starts a thread that passes stop requests of the hosts of `outer`, the rendezvous of all, to `shutdown`."""
        self._outer, self._shutdown, self._serving = outer, shutdown, serving
        threading.Thread(target=self._listen, name="asked", daemon=True).start()

    def _listen(self) -> None:
        """Tells `shutdown` of another host's stop request, for which it looks every 0.2 s; returns once any stop is
        requested. Runs in a thread."""
        while not self._shutdown.requested:
            if STOP_PHASE in self._outer.phases():
                self._shutdown.note_other_host()
            time.sleep(0.2)

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        """Returns this host's payload alone, at once. Raises as `check`."""
        self.check()
        return [payload]

    def set_phase(self, name: str) -> None:
        self._outer.set_phase(name)

    def set_background_phase(self, name: str) -> None:
        self._outer.set_background_phase(name)

    def check(self) -> None:
        """Raises the error of `outer`, for a lost host, or TrainError if this host's worker has ended."""
        self._outer.check()
        if error := _worker_error(self._serving):
            raise error

    def await_cause(self, seconds: float) -> None:
        """Waits at most `seconds` for the report of the host whose worker is lost. Raises LostPeer, which names the
        host, or TrainError if the worker is this host's own; returns if no report comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)

    def phases(self) -> str:
        return self._outer.phases()

    @contextlib.contextmanager
    def limit(self, what: str, seconds: float) -> Iterator[None]:
        """As `Rendezvous.limit` of the rendezvous of all hosts: may end this process."""
        with self._outer.limit(what, seconds):
            yield

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        self._outer.close(code, reason, overdue=overdue)


def _run_worker(port: int) -> None:
    """Serves this host's devices on `port` to host 0's program until standard input ends, that is until the parent
    process is gone; then exits. Prints `serving` once it listens; or prints `unusable: ` and the reason, and exits.

    Does what `start_grpc_tpu_worker` of the tensorflow-tpu wheel does, but takes its settings from the environment
    instead of the metadata server. (The wheel's script knows host bounds of v2 and v3 only, fails on a v6e, and reads
    only the old format of worker-network-endpoints: tensorflow/python/tools/grpc_tpu_worker.py.)"""
    try:
        import tensorflow as tf  # initialises some TPUs
    except ImportError:
        raise
    except Exception as error:
        print(f"unusable: {UnusableTpu(str(error), os.environ.get('TPU_ACCELERATOR_TYPE'))}", flush=True)
        sys.exit(1)
    # Programs are compiled here: without this a TPU rounds the factors of fp32 products to bf16.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    server = tf.distribute.Server(
        {"tpu_worker": [f"localhost:{port}"]}, job_name="tpu_worker", task_index=0, protocol="grpc", start=True
    )
    print("serving", flush=True)
    sys.stdin.buffer.read()
    del server
    os._exit(0)  # its threads don't end by themselves


if __name__ == "__main__":
    _run_worker(int(sys.argv[1]))
