"""Finds the programs of one process of a run on a slice that is not there, for `tpu-train preflight`: the bytes and
options that TorchTPU gives libtpu in a run, in which the sums over all processes are operations.

A process opens TorchTPU's device once, for one slice, so each tracer has a process of its own. It holds the weights.

libtpu describes any slice, but creates a client only where its chips are. So the functions of its table (see
`compile_cache`) that need chips are replaced: devices are those of the description, the first is this process's own, a
buffer has a shape, but keeps only the values of small ones (a graph's constants), and a program that is to be compiled
is kept, and refused. Arguments of a function are words of 8 bytes: size, extensions, the object, and more."""

import atexit
import contextlib
import ctypes
import hashlib
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

import torch.distributed as dist

from training.accelerators import Accelerator
from training.backends.compile_cache import (
    COMPILE,
    COMPILE_WORDS,
    PluginFunction,
    address_of,
    keep_function,
    read_program,
    words_at,
)
from training.backends.protocol import BuildBackend
from training.backends.torch_tpu import internals
from training.backends.torch_tpu.backend import TorchTpu
from training.backends.torch_tpu.compiler import compile_for_slice, load_plugin, open_topology
from training.batch import Arrays, Signals
from training.distributed.cluster import Cluster
from training.distributed.torch_tpu import find_unsupported, rank_environments
from training.errors import BadInput, TrainError
from training.preflight.compiler import Program, set_environment

# Places in the table, from 0.
_PLATFORM_NAME, _PLATFORM_VERSION, _DESCRIPTIONS, _ATTRIBUTES = 84, 85, 86, 25
_LAYOUTS = 4  # type of the extension in which buffers have a layout
_BUFFER_LAYOUT, _DEFAULT_LAYOUT = 6, 7  # words of this extension: of a buffer; of a shape, by the description
_ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 13: 2}  # by PJRT_Buffer_Type
_KEPT_BYTES = 1 << 20

_Values = tuple[int, ...]
_Answer = _Values | Callable[[Any], _Values | int | None]  # what a function fills, or its words -> that or an error


class AbsentChips:
    """The devices of a slice, in libtpu's table to the end of the process. `programs` grows with each one that is to be
    compiled: the bytes of (program, options)."""

    def __init__(self, slice_: Accelerator) -> None:
        """Loads libtpu, and replaces those functions of its table that need chips. Raises CompilerUnavailable if libtpu
        does not know the slice."""
        self._table = load_plugin()
        self.programs: list[tuple[bytes, bytes]] = []
        self._buffers: dict[int, tuple[Any, int, Any]] = {}  # address -> its values or b"", type, dimensions
        self._kept: list[Any] = []  # what the table points to
        self._topology = open_topology(slice_.name)
        devices, self.devices = self._table.call(_DESCRIPTIONS, self._topology, gives=2)
        self._own: int = words_at(devices, 1)[0]
        self._replace(devices)

    def _replace(self, devices: int) -> None:
        """Replaces the functions in libtpu's table. `devices`: the address of the list of the slice's devices."""
        nothing = keep_function(lambda _address: None)
        memory = self._pointer(self._pointer(*[nothing] * 16))  # an object whose functions all return 0
        handle, own, kind = self._pointer(0), self._pointer(self._own), b"device"
        self._kept.append(kind)
        named, listed = (address_of(kind), len(kind)), (self._pointer(memory), 1)
        constants: dict[int, tuple[int, ...]] = {  # place -> words from the third on
            13: (0,), 15: (devices, self.devices), 16: (own, 1), 19: listed, 95: (self._topology,),  # client
            12: self._text(_PLATFORM_NAME), 14: self._text(_PLATFORM_VERSION),
            31: (0,), 32: listed, 33: (memory,),  # device
            35: (0,), 36: named, 37: named, 38: named, 39: (own, 1), 97: (0,),  # memory
            5: (), 6: (1,), 7: (), 8: (),  # event: has happened
            58: (), 62: (0, 0), 65: (self._own,), 66: (memory,), 68: (0,), 72: (handle,),  # buffer
        }  # fmt: skip
        for place, values in constants.items():
            self._put(place, 3 + len(values), values)
        self._put(10, 9, (handle,))  # a client
        self._put(18, 5, (self._own,))  # a client's device
        self._put(22, 15, lambda words: (handle, self._upload(words)))
        self._put(29, 4, lambda words: (words[2],))  # a device's description: itself
        self._put(30, 4, lambda words: (int(words[2] == self._own),))
        self._put(128, 7, lambda words: (*self._table.call(_ATTRIBUTES, words[2], gives=2)[::-1], 0, nothing))
        self._put(9, 5, lambda words: ctypes.CFUNCTYPE(None, c_void_p, c_void_p)(words[3])(None, words[4]))
        self._put(59, 4, lambda words: (self._buffers[words[2]][1],))
        self._put(60, 5, lambda words: _list(self._buffers[words[2]][2]))
        compile_ = self._table.function(COMPILE)
        self._put(70, 7, lambda words: self._download(words, handle) or _refuse(compile_))
        self._put(COMPILE, COMPILE_WORDS, lambda words: self._keep_program(words, compile_))
        layouts = words_at(words_at(self._table.address, 2)[1], 8)
        while layouts[1] & 0xFFFFFFFF != _LAYOUTS:
            layouts = words_at(layouts[2], 8)
        default = PluginFunction(layouts[_DEFAULT_LAYOUT])
        layouts[_BUFFER_LAYOUT] = keep_function(partial(_fill, 4, lambda words: self._find_layout(words, default)))

    def _put(self, place: int, count: int, answer: _Answer) -> None:
        """Makes `answer` the function at a place of libtpu's table, whose arguments have `count` words."""
        self._table.replace(place, partial(_fill, count, answer))

    def _pointer(self, *values: int) -> int:
        """Returns the address of new words that begin with these values and live as long as this object."""
        words = (c_uint64 * 16)(*values)
        self._kept.append(words)
        return ctypes.addressof(words)

    def _text(self, place: int) -> tuple[int, ...]:
        """Calls libtpu's function at this place; returns (address, length) of its text about the slice."""
        return tuple(self._table.call(place, self._topology, gives=2))

    def _upload(self, words: Any) -> int:
        """Returns a buffer of the host's array in `words`, the arguments of the call. Keeps values up to 1 MiB."""
        dimensions = (c_int64 * words[6])(*words_at(words[5], words[6]) if words[6] else ())
        kind = c_uint32(words[4]).value
        size = math.prod(dimensions) * _ITEM_SIZES.get(kind, 8)
        values = ctypes.string_at(words[3], size) if size <= _KEPT_BYTES else b""
        buffer = self._pointer(0)
        self._buffers[buffer] = (values, kind, dimensions)
        return buffer

    def _download(self, words: Any, event: int) -> tuple[int, int] | None:
        """Copies a buffer's values to the host's memory in `words`, the arguments of the call, if there is memory.
        Returns their size, and `event`; None if the values were not kept."""
        values = self._buffers[words[2]][0]
        if values and words[4]:
            ctypes.memmove(words[4], values, len(values))
        return (len(values), event) if values else None

    def _find_layout(self, words: Any, default: Callable[[int], int | None]) -> tuple[int, ...] | int:
        """Returns the layout that arrays of the shape of a buffer in `words` have on the chips, or the error of
        `default`, libtpu's own function."""
        _, kind, dimensions = self._buffers[words[2]]
        wanted = (c_uint64 * 7)(56, 0, self._topology, kind, *_list(dimensions))
        return default(ctypes.addressof(wanted)) or (wanted[6],)

    def _keep_program(self, words: Any, compile_: Callable[[int], int | None]) -> int | None:
        """Adds a program to `programs` instead of compiling it. Returns an error, which `compile_` makes."""
        self.programs.append(read_program(words))
        return _refuse(compile_)


def _fill(count: int, answer: _Answer, address: int) -> int | None:
    """Fills the last of the `count` words of arguments at an address with `answer`, or with what it returns when called
    with them; if that is an error, returns it."""
    words = words_at(address, count)
    result = answer(words) if callable(answer) else answer
    if isinstance(result, tuple):
        words[count - len(result) :] = result
        return None
    return result


def _refuse(function: Callable[[int], int | None]) -> int | None:
    """Calls libtpu's function with arguments of size 0, which it refuses, and returns its error."""
    arguments = (c_uint64 * 7)()
    return function(ctypes.addressof(arguments))


def _list(values: Any) -> tuple[int, int]:
    """Returns (address, length) of a ctypes array."""
    return ctypes.addressof(values), len(values)


class TorchTpuTracer:
    """Traces in the process of rank 0. See `ProgramTracer`."""

    def __init__(self, open_backend: BuildBackend, slice_: Accelerator) -> None:
        """Starts no process yet. Raises BadInput if TorchTPU does not know the slice."""
        if reason := find_unsupported(slice_):
            raise BadInput(reason)
        self._open_backend, self._slice = open_backend, slice_
        self._worker: ProcessPoolExecutor | None = None

    def open(self) -> dict[str, int]:
        """Builds the model in a process of its own, unless it is built. Returns the bytes of one chip's part of each
        tensor of the state. Raises as `_open`, and TrainError if the process dies; `close` then."""
        if self._worker is None:
            spawn = multiprocessing.get_context("spawn")
            self._worker = ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)
            with _telling_of_its_end():
                self._sizes = self._worker.submit(_open, self._open_backend, self._slice).result()
        return self._sizes

    def trace(self, kind: str, batch: Arrays) -> Program:
        """Traces the step (`kind` is "training") or the evaluation for a global batch, in the process that `open`,
        which must come first, has started. Raises TrainError if the process dies."""
        assert self._worker is not None
        with _telling_of_its_end():
            return self._worker.submit(_trace, kind, batch).result()

    def close(self) -> None:
        """Ends the process that holds the model, and waits for its end."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


@contextlib.contextmanager
def _telling_of_its_end() -> Iterator[None]:
    """Turns the error of a block whose process has died into a TrainError."""
    try:
        yield
    except BrokenProcessPool:
        raise TrainError(
            "the process that builds the model ended early: what it printed is above; if that is nothing, it may have "
            "been killed because this machine's memory is too small"
        ) from None


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
    """Builds the model as rank 0 of a run on the slice, once a process: sets its variables, opens its device for good,
    and makes its end skip earlier exit handlers, with code 0. Returns the bytes of its part of each tensor of the
    state. Raises BadInput, UnusableTpu, CompilerUnavailable."""
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
