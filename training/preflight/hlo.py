"""Reads a compiled program: what the devices exchange, how long the operations take, and where in the model an
operation comes from. Pure."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from training.protobuf import message_classes

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BACKWARD = "gradient of "
_NO_ESTIMATE = 2**63 - 1  # libtpu's estimated cycles of a fusion that it did not estimate

# A HloModuleProto (https://github.com/openxla/xla/blob/main/xla/service/hlo.proto), as far as it is read here.
Module = message_classes(
    {
        "Module": {"computations": (3, "Computation*"), "entry": (6, "int64")},
        "Computation": {"name": (1, "bytes"), "instructions": (2, "Instruction*"), "id": (5, "int64")},
        "Instruction": {
            "opcode": (2, "bytes"), "shape": (3, "Shape"), "literal": (8, "Literal"), "called": (38, "int64*"),
            "config": (43, "bytes"),
        },
        "Shape": {"type": (2, "int64"), "dimensions": (3, "int64*"), "parts": (4, "Shape*")},
        "Literal": {name: (number, "int64*") for number, name in enumerate(("s32", "s64", "u32", "u64"), 4)},
    }
)["Module"]  # fmt: skip
_TYPES = (
    "invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple", "opaque",
    "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz",
    "s2", "u2", "f8e4m3", "f8e3m4", "s1", "u1", "f4e2m1fn", "f8e8m0fnu",
)  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """Buffers of one shape and of the same place in each layer, alive at the same time."""

    bytes: int  # of all `count` buffers
    count: int
    shape: str  # of one buffer, "bf16[32,12,128,128]"
    where: str  # "bert.encoder.layer.*.attention.self: softmax"


@dataclass(frozen=True)
class Collective:
    """All collective operations of one kind."""

    kind: str
    count: int
    elements: int
    bytes: int  # that each device contributes
    dtypes: Mapping[str, int]  # elements by type


@dataclass(frozen=True)
class Work:
    """The cycles and collectives of a step. Operations in a loop count as often as it runs."""

    cycles: int  # libtpu's estimate for all operations; collectives and some fusions have none
    loops: float  # by how much more that is than for one run of each operation, as libtpu counts FLOPs and bytes
    collectives: list[Collective]  # one for each kind


def read_work(module: bytes) -> Work:
    """Returns a step's cycles, as libtpu estimates them, and collectives, from a compiled program, a serialized
    HloModuleProto. Counts a loop's operations once for each of its runs; none in branches of conditionals; no FLOPs."""
    operations = list(_find_operations(Module.FromString(module)))
    estimated = [(cycles, each.runs) for each in operations if (cycles := _estimate_cycles(each))]
    cycles, once = sum(cycles * runs for cycles, runs in estimated), sum(cycles for cycles, _ in estimated)
    return Work(cycles, cycles / once if once else 1.0, _find_collectives(operations))


def find_origin(line: str) -> str:
    """Returns the place in the model that an instruction comes from: "bert.embeddings: dropout", "gradient of
    bert.pooler: mm", "optimizer: addcmul"; "" if it is unknown."""
    match = re.search(r'op_name="([^"]*)"', line)
    if not match:
        return ""
    names = [re.sub(r"\.\d+$", "", name) for name in match.group(1).split("/")]
    if not re.search(r"(aten|xla|prim)__", match.group(1)):
        return _find_tensorflow_origin(names)
    operation = re.sub(r"^(aten|xla|prim)__", "", names[-1])
    modules = [name for name in names if not re.match(r"(aten|xla|prim)__", name)]
    module = modules[-1] if modules else ""
    source = re.search(r'source_file="([^"]*)"', line)
    in_backward = bool(source and source.group(1).endswith("autograd/graph.py"))
    if module.startswith(BACKWARD) and not in_backward:
        module = "optimizer"
    return f"{module}: {operation}" if module else operation


def _find_tensorflow_origin(names: list[str]) -> str:
    """Returns the place in the model of a TensorFlow operation, from its scopes: "gradient of bert.encoder.layer.0:
    MatMul" for gradient_tape, bert, encoder, layer_._0, MatMul."""
    if names[0] == "XLA_Args":
        return "copy of an argument"
    gradient = BACKWARD if names[0] == "gradient_tape" and len(names) > 2 else ""
    module = ".".join(names[1:-1] if gradient else names[:-1]).replace("layer_._", "layer.").replace("mlm___cls", "cls")
    return f"{gradient}{module}: {names[-1]}" if module else names[-1]


def star_numbers(where: str) -> str:
    """Replaces the numbers of layers by "*", so that the same place in all layers has one name."""
    return re.sub(r"(?<=[._])\d+(?=[.:])", "*", where)


@dataclass(frozen=True)
class _Operation:
    instruction: Any
    computation: str
    runs: int  # in a step
    is_fused: bool


def _find_operations(module: Any) -> Iterator[_Operation]:
    """Yields the operations that a step runs, with the number of runs: in a loop's body, those of the loop. Leaves out
    branches of conditionals."""
    computations = {computation.id: computation for computation in module.computations}
    waiting = [(module.entry, 1, False)]
    while waiting:
        number, runs, is_fused = waiting.pop()
        for each in computations[number].instructions:
            yield _Operation(each, computations[number].name.decode(), runs, is_fused)
            if each.opcode in (b"while", b"call", b"fusion", b"async-start"):
                times = _count_trips(each, computations) if each.opcode == b"while" else 1
                waiting.append((each.called[0], runs * times, is_fused or each.opcode == b"fusion"))


def _count_trips(loop: Any, computations: Mapping[int, Any]) -> int:
    """Returns how often a loop runs: what the compiler says, else the largest number in its condition, else 1."""
    if known := re.search(rb'"known_trip_count":\{"n":"(\d+)"', loop.config):
        return int(known[1])
    _body, condition = loop.called
    literals = [each.literal for each in computations[condition].instructions if each.opcode == b"constant"]
    numbers = [number for each in literals for number in (*each.s32, *each.s64, *each.u32, *each.u64)]
    return max((number for number in numbers if number >= 0), default=1)


def _estimate_cycles(operation: _Operation) -> int:
    """Returns libtpu's estimated cycles of one run of an operation; 0 for one that is fused or has no estimate."""
    found = re.search(rb'"estimated_cycles":"(\d+)"', operation.instruction.config)
    return int(found[1]) if found and not operation.is_fused and int(found[1]) < _NO_ESTIMATE else 0


def _find_collectives(operations: list[_Operation]) -> list[Collective]:
    """Returns the collective operations of a step, one item for each kind."""
    elements: dict[str, Counter[str]] = {kind: Counter() for kind in COLLECTIVES}
    counts: Counter[str] = Counter()
    for each in operations:
        opcode = each.instruction.opcode.decode()
        kind = opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        arrays = _list_arrays(each.instruction.shape)
        if kind != opcode and kind in ("all-gather", "collective-permute") and len(arrays) > 1:
            arrays = [(dtype, dims) for dtype, dims in arrays if dims]  # without the contexts of a permutation
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        kind = "reduce-scatter" if each.computation.startswith("all-reduce-scatter") else kind
        counts[kind] += each.runs
        for dtype, dims in arrays:
            elements[kind][dtype] += each.runs * math.prod(dims)
    sizes = {kind: sum(count * _bits(dtype) // 8 for dtype, count in found.items()) for kind, found in elements.items()}
    return [
        Collective(kind, counts[kind], sum(found.values()), sizes[kind], dict(found.most_common()))
        for kind, found in elements.items()
        if counts[kind]
    ]


def _list_arrays(shape: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (type, dimensions) of a shape, or of each array of a tuple; a dynamic size counts as its bound."""
    if shape.parts:
        return [array for part in shape.parts for array in _list_arrays(part)]
    return [(_TYPES[shape.type], tuple(shape.dimensions))]


def _bits(dtype: str) -> int:
    """Returns the bits of one element of a type: 32 for "s32", 8 for "pred", 0 for what is no number."""
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 8 * (dtype == "pred")
