"""Finds the programs of one process of a run on a slice that is not there, for `tpu-train preflight`: the bytes and
options that TorchTPU gives libtpu in a run, in which the sums over all processes are operations.

A process opens TorchTPU's device once, for one slice, so each tracer has a process of its own. It holds the weights.
"""

import atexit
import hashlib
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch.distributed as dist

from training.accelerators import Accelerator
from training.backends.protocol import BuildBackend
from training.backends.torch_tpu import internals
from training.backends.torch_tpu.absent_chips import AbsentChips
from training.backends.torch_tpu.backend import TorchTpu
from training.backends.torch_tpu.compiler import compile_for_slice
from training.batch import Arrays, Signals
from training.distributed.cluster import Cluster
from training.distributed.torch_tpu import find_unsupported, rank_environments
from training.errors import BadInput
from training.preflight.compiler import Program, set_environment


class TorchTpuTracer:
    """Traces in the process of rank 0. See `ProgramTracer`."""

    def __init__(self, open_backend: BuildBackend, slice_: Accelerator) -> None:
        """Starts no process yet. Raises BadInput if TorchTPU does not know the slice."""
        if reason := find_unsupported(slice_):
            raise BadInput(reason)
        self._open_backend, self._slice = open_backend, slice_
        self._worker: ProcessPoolExecutor | None = None

    def open(self) -> dict[str, int]:
        """Builds the model in a process of its own, once. Returns the bytes of each tensor of its state."""
        if self._worker is None:
            spawn = multiprocessing.get_context("spawn")
            self._worker = ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)
            self._sizes = self._worker.submit(_open, self._open_backend, self._slice).result()
        return self._sizes

    def trace(self, kind: str, batch: Arrays) -> Program:
        assert self._worker is not None
        return self._worker.submit(_trace, kind, batch).result()

    def close(self) -> None:
        """Ends the process that holds the model, and waits for its end."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def _end_with_parent() -> None:
    """Starts a thread that ends this process when its parent is gone: a killed one does not tell it to end."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_opened: list[tuple[AbsentChips, TorchTpu]] = []  # in a tracer's process


def _open(open_backend: BuildBackend, slice_: Accelerator) -> dict[str, int]:
    """Builds the model as rank 0 of a run on the slice. Returns the bytes of each tensor of its state. Raises BadInput,
    UnusableTpu, CompilerUnavailable."""
    [environment, *_] = rank_environments(Cluster(0, ("localhost",) * slice_.hosts, slice_.name))
    del environment["TORCH_TPU_DEVICES_PER_HOST"]  # with it, the ranks of a host would be waited for
    set_environment()
    os.environ.update(environment | {"TPU_ACCELERATOR_TYPE": slice_.name})
    chips = AbsentChips(slice_)
    internals.open_device()
    dist.init_process_group(
        internals.PROCESS_GROUP, store=internals.store_of_absent_ranks(slice_), rank=0, world_size=chips.devices
    )
    atexit.register(os._exit, 0)  # before torch_tpu's own, which would wait for the other ranks
    backend: TorchTpu = open_backend(partial(_build, chips.devices))
    _opened[:] = [(chips, backend)]
    return backend.state_bytes()


def _build(devices: int, config: Any, cluster: Cluster, rendezvous: Any, requirements: Any) -> TorchTpu:
    """Opens the backend as process 0 of `devices` processes. Raises BadInput if the state is to be split."""
    if config.train.mesh.fsdp > 1:  # torch_tpu makes a group of processes only with all of them
        raise BadInput(
            "preflight can't compile TorchTPU's step with train.mesh.fsdp: --set backend=torch-xla "
            "--set image.backend=torch-xla compiles that of PyTorch/XLA, whose slices are the same"
        )
    hosts = ("localhost",) * devices
    return TorchTpu(config, Cluster(0, hosts, cluster.accelerator_type), rendezvous, requirements)


def _trace(kind: str, batch: Arrays) -> Program:
    """Traces the "training" step, or else the evaluation, of the opened model. `batch`: of all devices."""
    [(chips, backend)] = _opened
    own = {name: array[: len(array) // chips.devices] for name, array in batch.items()}
    chips.programs.clear()
    try:
        backend.step(0, own, Signals()) if kind == "training" else backend.evaluate(own, Signals())
    except RuntimeError:
        if not chips.programs:
            raise
    code, options = chips.programs[-1]
    arguments = dict(enumerate(backend.state_bytes()))
    digest = hashlib.sha256(code).hexdigest()[:16]
    return Program("", arguments=arguments, hash=digest, compile=partial(compile_for_slice, code, options))
