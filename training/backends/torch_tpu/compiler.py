"""Compiles programs with libtpu for slices that are not there, by the functions of its own table (see
`compile_cache`): the bytes and the options that TorchTPU gives libtpu in a run need nothing else to read them.
"""

import ctypes
import struct
import threading
import time
from ctypes import c_uint64
from functools import lru_cache

import libtpu

from training.accelerators import Accelerator, accelerator
from training.backends.compile_cache import (
    EXECUTABLE_DESTROY,
    PROGRAM_WORDS,
    PluginError,
    PluginTable,
    address_of,
    words_at,
)
from training.preflight.compiler import (
    CompilationRefused,
    CompiledProgram,
    CompilerUnavailable,
    Memory,
    describe_topology,
    gather_facts,
    set_environment,
)
from training.protobuf import message_classes

# Places in the table, from 0.
_INITIALIZE, _COSTS, _OPTIMIZED, _TOPOLOGY, _COMPILE, _MEMORY = 3, 46, 48, 82, 89, 96
_TEXT, _INT64_LIST, _FLOAT = 0, 2, 3  # types of a named value

_MEMORY_FIELDS = ("code", "arguments", "outputs", "donated", "temporaries")
_MEMORY_WORDS = 12  # those, and figures that are not read here
_Optimized = message_classes({"Optimized": {"module": (1, "bytes")}})["Optimized"]  # beside it is its configuration
_NAMED_VALUE = 7  # words: size, extensions, name and its size, type, value (or its address) and its size

_loading = threading.Lock()


@lru_cache(maxsize=1)
def load_plugin() -> PluginTable:
    """Loads and initializes libtpu, once a process. Returns its table."""
    table = PluginTable(libtpu.get_library_path())
    table.call(_INITIALIZE)
    return table


@lru_cache(maxsize=8)
def open_topology(name: str) -> int:
    """Returns the address of libtpu's description of an accelerator type ("v6e-8"); loads libtpu. Raises
    CompilerUnavailable if libtpu does not know the type."""
    text, options = describe_topology(accelerator(name))
    values, kept = [], []
    for key, option in options.items():
        is_text = isinstance(option, str)
        kept += [key.encode(), option.encode() if is_text else struct.pack(f"{len(option)}q", *option)]
        named, value = map(address_of, kept[-2:])
        kind = _TEXT if is_text else _INT64_LIST
        values += [8 * _NAMED_VALUE, 0, named, len(key), kind, value, len(option)]
    packed = struct.pack(f"{len(values)}Q", *values)
    try:
        [topology] = load_plugin().call(_TOPOLOGY, text.encode(), len(text), packed, len(options), gives=1)
    except PluginError as error:
        raise CompilerUnavailable(f"libtpu knows no topology {text}: {str(error).splitlines()[0]}") from None
    return topology


def compile_for_slice(code: bytes, options: bytes, slice_: Accelerator) -> CompiledProgram:
    """Compiles a module's bytecode with serialized options. Loads libtpu, and sets its variables (`set_environment`).
    Raises CompilerUnavailable, CompilationRefused."""
    with _loading:
        set_environment()
        table, topology = load_plugin(), open_topology(slice_.name)
    form = b"mlir"
    program = struct.pack("6Q", 8 * PROGRAM_WORDS, 0, address_of(code), len(code), address_of(form), len(form))
    began = time.monotonic()
    try:
        [executable] = table.call(_COMPILE, topology, program, options, len(options), 0, gives=1)
    except PluginError as error:
        raise CompilationRefused(str(error)) from None
    seconds = time.monotonic() - began
    try:
        return _describe(table, executable, seconds)
    finally:
        table.call(EXECUTABLE_DESTROY, executable)


def _describe(table: PluginTable, executable: int, seconds: float) -> CompiledProgram:
    """Returns memory, costs (of all rounds of loops) and optimized text of an executable, by its address."""
    memory = table.call(_MEMORY, executable, gives=_MEMORY_WORDS)
    count, first = table.call(_COSTS, executable, gives=2)
    costs = {}
    for number in range(count):
        _, _, name, size, kind, value, _ = words_at(first + 8 * _NAMED_VALUE * number, _NAMED_VALUE)
        if kind & 0xFFFFFFFF == _FLOAT:
            costs[ctypes.string_at(name, size).decode()], _ = struct.unpack("2f", struct.pack("Q", value))
    optimized = (c_uint64 * PROGRAM_WORDS)(8 * PROGRAM_WORDS)
    table.call(_OPTIMIZED, executable, ctypes.addressof(optimized))  # tells the size
    module = ctypes.create_string_buffer(optimized[3])
    optimized[2] = ctypes.addressof(module)
    table.call(_OPTIMIZED, executable, ctypes.addressof(optimized))
    sizes = Memory(**dict(zip(_MEMORY_FIELDS, memory, strict=False)))
    return gather_facts(_Optimized.FromString(module.raw).module, costs, sizes, seconds)
