"""Compiles programs with libtpu for slices that are not there, by the functions of its own table (see
`compile_cache`): the bytes and the options that TorchTPU gives libtpu in a run need nothing else to read them.
"""

import ctypes
import struct
import threading
import time
from collections.abc import Iterator
from ctypes import c_uint64
from functools import lru_cache
from typing import Any

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
    set_environment,
)
from training.preflight.hlo import COLLECTIVES, share_of_loops
from training.protobuf import message_classes

# Places in the table, from 0.
_INITIALIZE, _COSTS, _OPTIMIZED, _TOPOLOGY, _COMPILE, _MEMORY = 3, 46, 48, 82, 89, 96
_TEXT, _INT64_LIST, _FLOAT = 0, 2, 3  # types of a named value

_MEMORY_FIELDS = ("code", "arguments", "outputs", "donated", "temporaries")
_MEMORY_WORDS = 12  # those, and figures that are not read here
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
            costs[ctypes.string_at(name, size)], _ = struct.unpack("2f", struct.pack("Q", value))
    optimized = (c_uint64 * PROGRAM_WORDS)(8 * PROGRAM_WORDS)
    table.call(_OPTIMIZED, executable, ctypes.addressof(optimized))  # tells the size
    module = ctypes.create_string_buffer(optimized[3])
    optimized[2] = ctypes.addressof(module)
    table.call(_OPTIMIZED, executable, ctypes.addressof(optimized))
    text = "\n".join(_hlo_lines(_Hlo.FromString(module.raw).module))
    loops = share_of_loops(text)
    return CompiledProgram(
        seconds=seconds,
        memory=Memory(**dict(zip(_MEMORY_FIELDS, memory, strict=False))),
        flops=costs.get(b"flops", 0.0) * loops,
        bytes_accessed=costs.get(b"bytes accessed", 0.0) * loops,
        text=text,
    )


# --- A HloModuleProto (https://github.com/openxla/xla/blob/main/xla/service/hlo.proto), as far as `hlo` reads its text

_TYPES = [
    "invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple", "opaque",
    "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn",
]  # fmt: skip


_Hlo = message_classes(
    {
        "Hlo": {"module": (1, "Module")},
        "Module": {"computations": (3, "Computation*"), "entry": (6, "int64")},
        "Computation": {"name": (1, "bytes"), "instructions": (2, "Instruction*"), "id": (5, "int64")},
        "Instruction": {
            "name": (1, "bytes"), "opcode": (2, "bytes"), "shape": (3, "Shape"), "literal": (8, "Literal"),
            "called": (38, "int64*"), "config": (43, "bytes"),
        },
        "Shape": {"type": (2, "int64"), "dimensions": (3, "int64*"), "parts": (4, "Shape*")},
        "Literal": {"integers": (4, "int64*")},
    }
)["Hlo"]  # fmt: skip


def _shape(shape: Any) -> str:
    """Returns a ShapeProto as HLO's text writes it, a tuple in parentheses."""
    if shape.parts:
        return f"({', '.join(map(_shape, shape.parts))})"
    return f"{_TYPES[shape.type]}[{','.join(map(str, shape.dimensions))}]"


def _hlo_lines(module: Any) -> Iterator[str]:
    """Yields what the report reads of a module, as lines of HLO's text form: each instruction's name, opcode, called
    computations and backend_config, the shapes of collectives, and integer constants."""
    names = {computation.id: computation.name.decode() for computation in module.computations}
    for computation in module.computations:
        yield f"{'ENTRY ' if computation.id == module.entry else ''}%{names[computation.id]} () {{"
        yield from (_instruction(instruction, names) for instruction in computation.instructions)
        yield "}"


def _instruction(instruction: Any, names: dict[int, str]) -> str:
    """Returns the line of `_hlo_lines` for an instruction. `names`: of the computations, by their ids."""
    opcode = instruction.opcode.decode()
    shape = _shape(instruction.shape) if opcode.startswith(COLLECTIVES) else ""
    # A constant may be what a loop's condition compares with.
    operand = "".join(map(str, instruction.literal.integers[:1])) if opcode == "constant" else ""
    called = [names[number] for number in instruction.called]
    calls = "".join(f", {key}=%{name}" for key, name in zip(("calls", "condition"), called, strict=False))
    calls = calls.replace("calls", "body") if opcode == "while" else calls
    config = instruction.config.decode(errors="replace")
    return f"  %{instruction.name.decode()} = {shape} {opcode}({operand}){calls}, backend_config={config}"
