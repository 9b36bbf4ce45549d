"""The programs of the torch-xla backend, traced from its own step for `tpu-train preflight`."""

from __future__ import annotations

import ctypes
import gc

from training.backends.protocol import BuildBackend
from training.backends.torch_xla import tracing
from training.backends.torch_xla.backend import TorchXla
from training.batch import Arrays, Signals
from training.preflight.compiler import COMPILER_VERSIONS, TRACING_VERSIONS, Program, require_versions


class TorchTracer:
    """One program for all devices of a slice, which the compiler partitions."""

    def __init__(self, open_backend: BuildBackend, devices: int) -> None:
        require_versions({**COMPILER_VERSIONS, **TRACING_VERSIONS})
        self._open_backend = open_backend
        self._backend: TorchXla | None = None
        self._state_is_lost = False  # a traced step leaves the state uncomputed
        tracing.simulate_devices(devices)

    def open(self) -> dict[str, int]:
        if self._state_is_lost:
            self.close()
        if self._backend is None:
            self._backend = self._open_backend(TorchXla)
            self._state_is_lost = False
        self._backend.upload()
        return {name: value.numel() * 4 for name, value in self._backend.state_buffers().items()}

    def trace(self, kind: str, batch: Arrays) -> Program:
        backend = self._backend
        assert backend is not None
        network = backend.upload()
        state = tracing.buffer_names(backend.state_buffers())
        with tracing.record_module_names(network), tracing.forbid_data_dependence():
            if kind == "training":
                self._state_is_lost = True
                report = backend.trace_step(0, batch, Signals())
                outputs = [*backend.state_buffers().values(), report]
            else:
                outputs = [backend.trace_evaluation(batch, Signals())]
            return tracing.extract_program(outputs, state)

    def close(self) -> None:
        self._backend = None
        gc.collect()
        return_freed_memory()


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system, for the compiler: the allocator would keep it for a while. It is
    jemalloc in the image, and glibc's elsewhere."""
    library = ctypes.CDLL(None)
    purge, trim = getattr(library, "mallctl", None), getattr(library, "malloc_trim", None)
    if purge is not None:
        # MALLCTL_ARENAS_ALL: https://jemalloc.net/jemalloc.3.html#arena.i.purge
        purge(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))
    elif trim is not None:
        trim(0)
