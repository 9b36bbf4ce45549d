"""TensorFlow on a TPU slice of several hosts: one program on host 0 drives all devices, through a worker on every host.

`tpu-train train` and `tpu-train evaluate` are started on all hosts alike, as for PyTorch, and keep the exit codes that
the launcher knows:

  every host  starts a worker (training.backends.tensorflow.worker) and meets the others once it listens
  host 0      runs the loop with TPU_NAME=grpc://...; to the loop it is the only host. Its rows are read by the workers
  the others  serve until host 0 is done, and end as it does: 0 or 75. When it fails, or is gone, they have lost a peer:
  76

The rendezvous of all hosts stays open meanwhile: a host that is gone, or whose worker has ended, ends the others too; a
host that is asked to stop tells host 0 through the name of its phase. Host 0 may notice the end of a worker before
that worker's host does, as an operation that fails: it has lost a peer, and waits for that host to say why. This was
never run on TPUs; the workers, operations on them and the barriers are tested on CPUs.

Ports: 8470 (TPU_TASK_PORT) the workers; 8471 libtpu's, by which it finds its peers in TPU_WORKER_HOSTNAMES.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from training.config import TrainerConfig
from training.distributed.agreement import agree, code_hash
from training.distributed.cluster import Cluster, tensorflow_plugin, tpu_environment
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import Exit, LostPeer, StopRequested, TrainError

WORKER_PORT = 8470
ASKED = "asked to stop"  # the phase of a host that was
_ALWAYS = 10 * 365 * 86400.0  # seconds
CAUSE_SECONDS = 5.0  # that host 0, whose operations failed for a lost worker, waits for that worker's host to say so
# That a host which lost host 0 waits for the end of its own worker: a dying process closes its connections first. Less
# than rendezvous.GRACE.
WORKER_END_SECONDS = 0.5

# What host 0 runs: (config, cluster, rendezvous, shutdown).
Program = Callable[[TrainerConfig, Cluster, Rendezvous, ShutdownRequest], Any]


def run(
    config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, shutdown: ShutdownRequest, program: Program
) -> None:
    """Starts this host's worker. Then host 0 runs the program, and the others serve until it ends. Raises StopRequested
    once host 0 has committed, LostPeer, TrainError, and whatever the program raises."""
    environment = worker_environment(cluster)  # raises where TensorFlow can't drive this slice
    agree(rendezvous, {"configuration": config.hash, "code": code_hash()}, config.rendezvous.start_seconds)
    port = int(os.environ.get("TPU_TASK_PORT") or WORKER_PORT)
    with worker(environment, port, config.rendezvous.start_seconds) as serving:
        rendezvous.set_phase("waiting for the workers of all hosts")
        workers = rendezvous.meet(
            "workers", f"{cluster.addresses[cluster.worker]}:{port}", config.rendezvous.start_seconds
        )
        if not cluster.is_first:
            return _serve(rendezvous, shutdown, serving)
        os.environ["TPU_NAME"] = ",".join(f"grpc://{address}" for address in workers)
        chief = Chief(rendezvous, shutdown, serving)
        try:
            program(config, cluster.alone(), chief, shutdown)
        except StopRequested:
            rendezvous.meet("done", int(Exit.SAVED))
            raise
        except LostPeer:
            chief.await_cause(CAUSE_SECONDS)
            raise
        rendezvous.meet("done", int(Exit.FINISHED))
        return None


def worker_environment(cluster: Cluster) -> dict[str, str]:
    """What a worker, its plugin and its libtpu must be told.

    libtpu's workers find each other by TPU_WORKER_HOSTNAMES, at port 8471 of every host.

    Raises:
        BadInput: the accelerator is unknown or has another number of hosts, or TensorFlow is not the wheel for TPUs.
    """
    return {
        **tpu_environment(cluster),
        **tensorflow_plugin(),
        "TPU_STDERR_LOG_LEVEL": "0",
        # A block of a shard is at most 256 KB: TensorFlow would fetch 64 MB for it.
        "GCS_READ_CACHE_BLOCK_SIZE_MB": "1",
    }


@contextlib.contextmanager
def worker(environment: dict[str, str], port: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """This host's worker, listening. Raises TrainError when it does not within `seconds`."""
    command = [sys.executable, "-m", "training.backends.tensorflow.worker", str(port)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
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
                    "see its lines above"
                )
    raise TrainError(f"the TPU worker of this host does not serve on port {port} within {seconds:g} s")


def _ended(serving: subprocess.Popen[bytes]) -> TrainError | None:
    code = serving.poll()
    return (
        None if code is None else TrainError(f"the TPU worker of this host ended with code {code}; see its lines above")
    )


def _serve(rendezvous: Rendezvous, shutdown: ShutdownRequest, serving: subprocess.Popen[bytes]) -> None:
    """Waits until host 0 is done."""
    shutdown.nothing_to_save = False  # host 0 decides, and saves
    end: list[Any] = []  # host 0's exit code, or why it is lost

    def wait() -> None:
        try:
            end.append(rendezvous.meet("done", None, _ALWAYS)[0])
        except TrainError as error:
            end.append(error)

    waiting = threading.Thread(target=wait, name="served", daemon=True)
    waiting.start()
    while waiting.is_alive():
        rendezvous.set_phase(ASKED if shutdown.requested else "serving")
        if error := _ended(serving):
            raise error
        waiting.join(0.2)
    if isinstance(end[0], TrainError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            serving.wait(WORKER_END_SECONDS)
        raise _ended(serving) or end[0]
    if end[0] == Exit.SAVED:
        raise StopRequested("host 0 has committed and stopped")


class Chief:
    """The rendezvous for the loop on host 0, which has no other hosts to meet; but the others must stay connected, and
    the worker alive."""

    def __init__(self, outer: Rendezvous, shutdown: ShutdownRequest, serving: subprocess.Popen[bytes]) -> None:
        self._outer, self._shutdown, self._serving = outer, shutdown, serving
        threading.Thread(target=self._listen, name="asked", daemon=True).start()

    def _listen(self) -> None:
        """Passes on that another host is asked to stop."""
        while not self._shutdown.requested:
            if ASKED in self._outer.phases():
                self._shutdown.note_other_host()
            time.sleep(0.2)

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        self.check()
        return [payload]

    def set_phase(self, name: str) -> None:
        self._outer.set_phase(name)

    def set_background_phase(self, name: str) -> None:
        self._outer.set_background_phase(name)

    def check(self) -> None:
        self._outer.check()
        if error := _ended(self._serving):
            raise error

    def await_cause(self, seconds: float) -> None:
        """After an operation failed because a worker is lost: waits until the host of that worker says so, for at most
        `seconds`. Raises LostPeer, which names the host, or TrainError where the worker is this host's own."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)

    def phases(self) -> str:
        return self._outer.phases()

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        self._outer.close(code, reason, overdue=overdue)
