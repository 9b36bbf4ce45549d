"""Compiles programs with libtpu for slices that are not there, by the functions of its own table (see
`compile_cache`): the bytes and the options that TorchTPU gives libtpu in a run need nothing else to read them.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

import libtpu

from training.accelerators import Accelerator, accelerator
from training.backends.compile_cache import PluginError, PluginProgram, PluginTable, plugin_arguments
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
_INITIALIZE, _EXECUTABLE_DESTROY, _COSTS, _OPTIMIZED, _TOPOLOGY, _COMPILE, _MEMORY = 3, 40, 46, 48, 82, 89, 96
_TEXT, _INT64_LIST, _FLOAT = 0, 2, 3  # types of a named value

_NamedValue = plugin_arguments(
    ("name", c_void_p), ("name_size", c_size_t), ("type", c_int), ("value", c_void_p), ("size", c_size_t)
)
_Topology = plugin_arguments(
    ("name", c_char_p), ("name_size", c_size_t), ("options", c_void_p), ("options_size", c_size_t),
    ("topology", c_void_p),
)  # fmt: skip
_Compile = plugin_arguments(
    ("topology", c_void_p), ("program", c_void_p), ("options", c_char_p), ("options_size", c_size_t),
    ("client", c_void_p), ("executable", c_void_p),
)  # fmt: skip
_Executable = plugin_arguments(("executable", c_void_p))
_MEMORY_FIELDS = ("code", "arguments", "outputs", "donated", "temporaries")
_Memory = plugin_arguments(
    ("executable", c_void_p), *((name, c_int64) for name in _MEMORY_FIELDS), ("more", c_int64 * 7)
)
_Costs = plugin_arguments(("executable", c_void_p), ("size", c_size_t), ("values", c_void_p))
_Optimized = plugin_arguments(("executable", c_void_p), ("program", c_void_p))

_loading = threading.Lock()


@lru_cache(maxsize=1)
def load_plugin() -> tuple[Any, int]:
    """Loads and initializes libtpu, once a process. Returns the library and its table's address."""
    plugin = ctypes.CDLL(libtpu.get_library_path())
    plugin.GetPjrtApi.restype = c_void_p
    address: int = plugin.GetPjrtApi()
    PluginTable(address).call(_INITIALIZE, plugin_arguments()())
    return plugin, address


@lru_cache(maxsize=8)
def open_topology(name: str) -> int:
    """Returns the address of libtpu's description of an accelerator type ("v6e-8"); loads libtpu. Raises
    CompilerUnavailable if libtpu does not know the type."""
    text, options = describe_topology(accelerator(name))
    values = (_NamedValue * len(options))()
    kept = []
    for value, (key, option) in zip(values, options.items(), strict=True):
        is_text = isinstance(option, str)
        text_of_key = ctypes.create_string_buffer(key.encode())
        held = ctypes.create_string_buffer(option.encode()) if is_text else (c_int64 * len(option))(*option)
        kept += [text_of_key, held]
        kind, address = _TEXT if is_text else _INT64_LIST, ctypes.addressof(held)
        value.__init__(ctypes.sizeof(value), None, ctypes.addressof(text_of_key), len(key), kind, address, len(option))
    wanted = _Topology(0, None, text.encode(), len(text), ctypes.addressof(values), len(options))
    try:
        PluginTable(load_plugin()[1]).call(_TOPOLOGY, wanted)
    except PluginError as error:
        raise CompilerUnavailable(f"libtpu knows no topology {text}: {str(error).splitlines()[0]}") from None
    return wanted.topology


def compile_for_slice(code: bytes, options: bytes, slice_: Accelerator) -> CompiledProgram:
    """Compiles a module's bytecode with serialized options. Loads libtpu, and sets its variables (`set_environment`).
    Raises CompilerUnavailable, CompilationRefused."""
    with _loading:
        set_environment()
        table, topology = PluginTable(load_plugin()[1]), open_topology(slice_.name)
    kept = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"mlir")
    program = PluginProgram(0, None, ctypes.addressof(kept[0]), len(code), ctypes.addressof(kept[1]), 4)
    program.struct_size = ctypes.sizeof(program)
    wanted = _Compile(0, None, topology, ctypes.addressof(program), options, len(options))
    began = time.monotonic()
    try:
        table.call(_COMPILE, wanted)
    except PluginError as error:
        raise CompilationRefused(str(error)) from None
    seconds = time.monotonic() - began
    try:
        return _describe(table, wanted.executable, seconds)
    finally:
        table.call(_EXECUTABLE_DESTROY, _Executable(executable=wanted.executable))


def _describe(table: PluginTable, executable: int, seconds: float) -> CompiledProgram:
    """Returns memory, costs (of all rounds of loops) and optimized text of an executable, by its address."""
    memory, costs = _Memory(executable=executable), _Costs(executable=executable)
    table.call(_MEMORY, memory)
    table.call(_COSTS, costs)
    floats = {
        ctypes.string_at(value.name, value.name_size): c_float.from_address(
            ctypes.addressof(value) + _NamedValue.value.offset
        ).value
        for value in (_NamedValue * costs.size).from_address(costs.values)
        if value.type == _FLOAT
    }
    optimized = PluginProgram(ctypes.sizeof(PluginProgram))
    wanted = _Optimized(executable=executable, program=ctypes.addressof(optimized))
    table.call(_OPTIMIZED, wanted)  # tells the size
    module = ctypes.create_string_buffer(optimized.code_size)
    optimized.code = ctypes.addressof(module)
    table.call(_OPTIMIZED, wanted)
    text = "\n".join(_hlo_lines(_Hlo.FromString(module.raw).module))
    loops = share_of_loops(text)
    return CompiledProgram(
        seconds=seconds,
        memory=Memory(**{name: getattr(memory, name) for name in _MEMORY_FIELDS}),
        flops=floats.get(b"flops", 0.0) * loops,
        bytes_accessed=floats.get(b"bytes accessed", 0.0) * loops,
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
