"""Runs a program in the processes that its libraries expect on a host: `tpu-train exec`, and trainers with TorchTPU.

A program of the user's own imports nothing of this package. Hugging Face's Trainer and Accelerate, and
torch.distributed, read the number of processes from the environment; every host of a slice runs `exec`.

* TPU, v4 and newer: one process for each chip of the host (`torch_xla.launch`). Gradients are summed over all chips of
  the slice. On v2 and v3, torch_xla would run two replicas as threads of one process.
* CPU, several hosts (an emulated slice): one process, with the variables that torchrun sets, and torch_xla disabled for
  Hugging Face's libraries: it has no collective between CPU processes, so each host would train a model of its own,
  without an error. The Trainer wraps the model in DistributedDataParallel, which sums with gloo.
* A virtual TPU (an emulated slice of one host): one process, with one of its devices.
* CPU, one host: one process, with torch_xla's CPU device.

With `--runtime torch-tpu`: one process for each chip, on chips and on virtual TPUs of any number of hosts
(`run_chip_processes`); they act as one program (`run_ranks`). `python -m training.cli.processes PROGRAM ARGUMENTS` is
one of these processes.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import runpy
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import IO

from training.accelerators import ACCELERATORS
from training.distributed import torch_tpu
from training.distributed.cluster import SECRET_VARIABLE, Cluster, device_kind, discover, tpu_environment
from training.errors import BadInput, Exit, TrainError
from training.machine import exit_at_once, tell
from training.telemetry.console import warn
from training.telemetry.progress_line import FILE_VARIABLE


def chip_process_environment(cluster: Cluster) -> dict[str, str]:
    """Returns the variables from which `torch_xla.launch` derives those of one process for each chip: `tpu_environment`
    without CLOUD_TPU_TASK_ID, its bounds named as bounds of hosts, as `launch` takes others as final. Raises BadInput
    if the accelerator is unknown, has another number of hosts, or has two devices a chip (v2 and v3)."""
    environment = tpu_environment(cluster)
    accelerator = ACCELERATORS[environment["TPU_ACCELERATOR_TYPE"]]
    if accelerator.generation.devices_per_chip > 1:
        raise BadInput(
            f"tpu-train exec runs one process a chip, and a chip of {accelerator.name} has two devices, which "
            "torch_xla gives to threads of one process; use v4 or newer, or a command of your own"
        )
    del environment["CLOUD_TPU_TASK_ID"]
    environment["TPU_HOST_BOUNDS"] = environment.pop("TPU_PROCESS_BOUNDS")
    environment["TPU_CHIPS_PER_HOST_BOUNDS"] = environment.pop("TPU_CHIPS_PER_PROCESS_BOUNDS")
    return environment


def gloo_environment(cluster: Cluster) -> dict[str, str]:
    """Returns torchrun's variables (https://pytorch.org/docs/stable/elastic/run.html#environment-variables) for one
    process a host, with OMP_NUM_THREADS or one thread, and the switches of transformers and accelerate for CPUs."""
    return {
        "RANK": str(cluster.worker),
        "WORLD_SIZE": str(cluster.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(cluster.gloo_port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "USE_TORCH_XLA": "0",
        "ACCELERATE_USE_CPU": "true",
    }


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a program in this process, as `python SCRIPT ARGUMENTS` would; what it raises passes. Changes sys.argv and
    sys.path."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _run_chip_process(ordinal: int, script: str, arguments: Sequence[str]) -> None:
    """Runs a program in a process of `torch_xla.launch` (this one, on a virtual TPU), with a file of progress of its
    own. Ends the process with FAILED at once on an exception: those of other chips would wait for it in a collective
    forever, and the pool ends them as soon as one is gone. SystemExit reaches the parent with its code."""
    if FILE_VARIABLE in os.environ:
        os.environ[FILE_VARIABLE] += f".{ordinal}"
    try:
        run_script(script, arguments)
    except Exception:
        traceback.print_exc()
        exit_at_once(Exit.FAILED)


def run_on_host(script: str, arguments: Sequence[str]) -> None:
    """Runs a program on this host of the slice and waits for it: on several CPU hosts in this process, where its
    exceptions pass; else through `torch_xla.launch`, where an exception ends its process with FAILED: a child for each
    chip, one child on a CPU, this process on a virtual TPU. Changes os.environ. Raises BadInput if torch_xla is needed
    and missing, or the accelerator is unknown or can't be used so; TrainError if a child ended early."""
    cluster, device = discover(), device_kind()
    os.environ["PJRT_DEVICE"] = device
    if device != "TPU" and cluster.hosts > 1:
        os.environ.update(gloo_environment(cluster))
        run_script(script, arguments)
        return
    if device == "TPU":
        os.environ.update(chip_process_environment(cluster))
    if importlib.util.find_spec("torch_xla") is None:
        raise BadInput("tpu-train exec needs torch_xla, which this image does not have: set image.backend: torch-xla")
    import torch_xla
    from torch_xla._internal.tpu import num_available_chips  # what `launch` counts; torch_xla's version is pinned

    # A virtual TPU has no chips on the PCI bus, and its processes could not exchange anything: one process, one device.
    single = device == "TPU" and num_available_chips() == 0
    try:
        torch_xla.launch(_run_chip_process, args=(script, arguments), debug_single_process=single)
    except BrokenProcessPool:
        raise TrainError(f"a process of {script} ended early; its traceback is above") from None


def run_chip_processes(module: Sequence[str]) -> int:
    """Runs a module with its arguments, as `python -m` would, in one process of TorchTPU for each chip of this host.
    Returns the exit code of the first process that failed, or 0. Warns of another version of torch_tpu than ours.
    Raises BadInput without torch_tpu, without a TPU that it knows, or if the number of hosts is wrong."""
    installed = next((found.version for found in importlib.metadata.distributions(name="torch_tpu")), None)
    if other := torch_tpu.find_other_version(installed):
        warn(other)
    if device_kind() != "TPU":
        raise BadInput(
            f"{torch_tpu.RUNTIME} needs TPU chips or a virtual TPU, and PJRT_DEVICE is CPU here: rehearse it "
            "on an emulated slice (tpu-launch --emulated)"
        )
    environments = torch_tpu.rank_environments(cluster := discover())
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun's default, too
    if cluster.hosts == 1 and SECRET_VARIABLE not in os.environ:
        shared[SECRET_VARIABLE] = secrets.token_hex()
    for environment in environments:
        if FILE_VARIABLE in os.environ:
            environment[FILE_VARIABLE] = f"{os.environ[FILE_VARIABLE]}.{environment['RANK']}"
    return run_ranks([sys.executable, "-m", *module], [{**shared, **environment} for environment in environments])


STOP_SECONDS = 8.0  # from the first failure to SIGKILL for the rest
_POLL_SECONDS = 0.1
_SHOWN_LINES = 10
_LONGEST_LINE = 65536  # a progress bar that never ends its line is cut here
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class RankProcess:
    """A process in a session of its own, whose lines threads print with its rank; keeps the last ones."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: threading.Lock) -> None:
        """Starts the process and the threads, which hold `output` while they print."""
        self.rank, self._output = environment["RANK"], output
        self.last_lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which forwards it
        )
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.readers = [threading.Thread(target=self._print_lines, args=each, daemon=True) for each in streams]
        for reader in self.readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """Returns the exit code, 128 + N after signal N; None while the process runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children, unless they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _print_lines(self, source: IO[bytes], target: IO[str]) -> None:
        """Prints and keeps the lines of one stream, as "rank N: LINE", until it ends; splits long ones. A failed write
        is ignored: the process would wait forever for a reader."""
        for line in iter(lambda: source.readline(_LONGEST_LINE), b""):
            text = line.decode(errors="replace").rstrip("\r\n")
            self.last_lines.append(text)
            with self._output, contextlib.suppress(OSError):
                target.write(f"rank {self.rank}: {text}\n")
                target.flush()


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs a command in one process for each environment, which is added to this process's own and has RANK, all at the
    same time; prints their lines after "rank N: ". Returns 0 if none fails, else prints the last lines of the first
    that failed and returns its code, after ending the others: SIGTERM, and SIGKILL after STOP_SECONDS. Forwards
    signals; after SIGTERM or SIGINT waits for all processes without limit."""
    output = threading.Lock()
    ranks: list[RankProcess] = []
    with _forwarding(ranks) as requested:
        for environment in environments:
            ranks.append(RankProcess(command, environment, output))
        for rank in ranks if requested else ():  # a signal came while they were started
            rank.send(requested[-1])
        failed = _await_failure(ranks)
        if failed and not requested:
            deadline = time.monotonic() + STOP_SECONDS
            for rank in ranks:
                rank.send(signal.SIGTERM)
            while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            for rank in ranks:
                rank.send(signal.SIGKILL)
        for rank in ranks:  # after a request to stop each ends in its own time
            rank.process.wait()
    for rank in ranks:
        rank.send(signal.SIGKILL)  # children that outlived it
        for reader in rank.readers:
            reader.join(1.0)
    if failed is None:
        return Exit.FINISHED
    assert failed.code is not None
    tell(describe_failure(failed, len(ranks), bool(requested)))
    return failed.code


def describe_failure(failed: RankProcess, number: int, requested: bool) -> str:
    """Returns the message about the process that failed first, with its exit code and its last lines. `number`: of all
    processes here; `requested`: whether a signal asked them to stop."""
    assert failed.code is not None
    how = f"ended with exit code {failed.code}"
    if failed.process.returncode < 0:
        how = f"was killed by {signal.Signals(-failed.process.returncode).name} (exit code {failed.code})"
    after = "" if requested or number == 1 else f"; the other {number - 1} processes of this host were stopped"
    lines = "".join(f"\n  {line}" for line in failed.last_lines)
    kind = "stopped" if requested or failed.code == Exit.SAVED else "error"
    return f"{kind}: rank {failed.rank} {how}{after}. Its last lines:{lines or ' none'}"


def _await_failure(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Waits until a process fails, and returns it; None when all have ended well. Of several that fail within one poll,
    or two after a lost peer, one that was killed is the cause, and one that lost a peer is not."""
    has_lost_peer = False
    while True:
        codes = [rank.code for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            killed = -signal.SIGKILL
            cause = min(failed, key=lambda rank: (rank.code == Exit.LOST_PEER, rank.process.returncode != killed))
            if has_lost_peer or cause.code != Exit.LOST_PEER:
                return cause
            has_lost_peer = True  # a dying process loses its connections before its parent sees its end
        elif None not in codes:
            return None
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _forwarding(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Forwards SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 to `ranks`, a list that may grow, during the block. Yields a list,
    to which SIGTERM and SIGINT are appended. Restores the former handlers."""
    requested: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            requested.append(number)
        for rank in ranks:
            if rank.process.returncode is None:
                rank.send(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    from training.backends.torch_tpu.internals import open_device

    open_device()
    run_script(sys.argv[1], sys.argv[2:])
