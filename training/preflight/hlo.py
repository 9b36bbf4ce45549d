"""Reading a compiled program: what is in HBM at its fullest moment, by the model's own names, and what travels between
devices.

Pure: the input is the text of a scheduled HLO module, as libtpu gives it. The order of the entry computation's lines is
the order of execution, so a buffer lives from its line to the last line that reads it. The compiler's own allocator
also shares and fragments buffers, so sums differ by some per cent from its total, which is what the report gives as
total; this tells what it is made of.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_BITS = {"pred": 8, "token": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|token|bf16|[a-z]\d+(?:[a-z]\w*)?)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(r" ([a-z][a-z0-9-]*)\(")
# These make no buffer of their own: names for (parts of) others'.
_VIEWS = frozenset(
    {
        "bitcast",
        "get-tuple-element",
        "tuple",
        "optimization-barrier",
        "copy-done",
        "async-done",
        "all-reduce-done",
        "opt-barrier",
    }
)
_NO_BUFFER = _VIEWS | {"parameter", "constant"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BACKWARD = "gradient of "


@dataclass(frozen=True)
class Allocation:
    """Buffers of one shape that one place of the model made, all alive at the fullest moment."""

    bytes: int  # of all of them
    count: int
    shape: str  # of one, "bf16[32,12,128,128]"
    where: str  # "bert.encoder.layer.*.attention.self: softmax"


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind."""

    kind: str
    count: int
    elements: int
    bytes: int  # of what each device puts in
    dtypes: Mapping[str, int]  # elements of each type


@dataclass(frozen=True)
class _Array:
    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without padding."""
        return self.elements * _bits(self.dtype) // 8

    @property
    def in_hbm(self) -> int:
        """Bytes with the padding of its tiles; 0 for what lives in another memory."""
        if re.search(r"S\((?!0\))\d+\)", self.layout):
            return 0
        order, _, tiling = self.layout.partition(":")
        tiles = re.match(r"T\(([\d,]+)\)", tiling)
        if not tiles or not self.dims:
            return self.bytes
        minor_first = [int(each) for each in order.split(",") if each]
        physical = [self.dims[each] for each in reversed(minor_first)]
        tile = [int(each) for each in tiles.group(1).split(",")]
        for place in range(1, min(len(tile), len(physical)) + 1):
            physical[-place] = -(-physical[-place] // tile[-place]) * tile[-place]
        return math.prod(physical) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    assert found, dtype
    return int(found.group(1))


def _arrays(text: str) -> list[_Array]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        found.append(_Array(dtype, tuple(int(each.lstrip("<=")) for each in dims.split(",") if each), layout))
    return found


@dataclass(frozen=True)
class _Line:
    name: str
    operation: str
    arrays: list[_Array]  # of the result, one for each leaf of a tuple
    operands: list[str]
    index: int | None  # of get-tuple-element, and of a parameter
    where: str
    root: bool


def _lines(text: str) -> Iterable[_Line]:
    """The entry computation."""
    _, _, entry = text.partition("\nENTRY ")
    for raw in entry.splitlines()[1:]:
        if raw.startswith("}"):
            return
        found = _LINE.match(raw)
        if not found:
            continue
        root, name, rest = found.groups()
        operation = _OPERATION.search(f" {rest}" if rest[0].isalpha() and "[" not in rest.split("(")[0] else rest)
        if not operation:
            continue
        result, arguments = rest[: operation.start()], rest[operation.end() :]
        numbered = {"get-tuple-element": r"index=(\d+)", "parameter": r"^(\d+)\)"}.get(operation.group(1))
        index = re.search(numbered, arguments) if numbered else None
        yield _Line(
            name=name,
            operation=operation.group(1),
            arrays=_arrays(result),
            operands=re.findall(r"%([\w.-]+)", arguments.split("), ")[0]),
            index=int(index.group(1)) if index else None,
            where=place(raw),
            root=bool(root),
        )


def place(line: str) -> str:
    """Who in the model asked for an operation: "bert.embeddings: dropout", "gradient of bert.pooler: mm", "optimizer:
    addcmul"."""
    found = re.search(r'op_name="([^"]*)"', line)
    if not found:
        return ""
    names = [re.sub(r"\.\d+$", "", each) for each in found.group(1).split("/")]
    if not re.search(r"(aten|xla|prim)__", found.group(1)):
        return _tensorflow_place(names)
    operation = re.sub(r"^(aten|xla|prim)__", "", names[-1])
    modules = [each for each in names if not re.match(r"(aten|xla|prim)__", each)]
    module = modules[-1] if modules else ""
    source = re.search(r'source_file="([^"]*)"', line)
    in_backward = bool(source and source.group(1).endswith("autograd/graph.py"))
    if module.startswith(BACKWARD) and not in_backward:
        module = "optimizer"
    return f"{module}: {operation}" if module else operation


def _tensorflow_place(names: list[str]) -> str:
    """From the scopes of a TensorFlow operation: gradient_tape/bert/encoder/layer_._0/attention/self/MatMul."""
    if names[0] == "XLA_Args":
        return "copy of an argument"
    gradient = "gradient of " if names[0] == "gradient_tape" and len(names) > 2 else ""
    module = ".".join(names[1:-1] if gradient else names[:-1]).replace("layer_._", "layer.").replace("mlm___cls", "cls")
    return f"{gradient}{module}: {names[-1]}" if module else names[-1]


def largest(text: str, count: int, arguments: Mapping[int, str] = MappingProxyType({})) -> list[Allocation]:
    """The largest temporary allocations at the moment when most HBM is in use; those of like places are counted
    together.

    `arguments`: names of the program's arguments, for copies of them."""
    lines = list(_lines(text))
    # (line, leaf) of each buffer that a name may stand for, leaf by leaf
    owners: dict[str, list[list[tuple[int, int]]]] = {}
    last_use: dict[tuple[int, int], int] = {}
    results: set[tuple[int, int]] = set()
    producers = {line.name: number for number, line in enumerate(lines)}
    for number, line in enumerate(lines):
        parts = [owners.get(each, []) for each in line.operands]
        for part in parts:
            for leaf in part:
                last_use.update(dict.fromkeys(leaf, number))
        if line.operation == "get-tuple-element" and parts:
            assert line.index is not None
            owners[line.name] = [parts[0][line.index]] if line.index < len(parts[0]) else []
        elif line.operation == "tuple":
            owners[line.name] = [leaf for part in parts for leaf in (part[:1] or [[]])]
        elif line.operation in _VIEWS:
            owners[line.name] = parts[0] if parts else []
        elif line.operation in _NO_BUFFER:
            owners[line.name] = [[] for _ in line.arrays]
        else:
            # An asynchronous start lists what it reads beside what it makes.
            read = (
                {str(lines[each[0]].arrays[each[1]]) for part in parts for leaf in part for each in leaf}
                if "-start" in line.operation
                else set()
            )
            owners[line.name] = [
                [] if leaf and str(array) in read else [(number, leaf)] for leaf, array in enumerate(line.arrays)
            ]
        if line.root:
            results = {buffer for leaf in owners[line.name] for buffer in leaf}
    changes: list[Counter[tuple[int, int]]] = [Counter() for _ in range(len(lines) + 1)]
    for buffer, end in last_use.items():
        size = lines[buffer[0]].arrays[buffer[1]].in_hbm
        if size and buffer not in results:
            changes[buffer[0]][buffer] = size
            changes[end + 1][buffer] = -size
    live: dict[tuple[int, int], int] = {}
    total = most = 0
    fullest: dict[tuple[int, int], int] = {}
    for change in changes:
        for buffer, size in change.items():
            total += size
            if size > 0:
                live[buffer] = size
            else:
                live.pop(buffer, None)
        if total > most:
            most, fullest = total, dict(live)
    grouped: dict[tuple[str, str], list[int]] = {}
    for (number, part_of), size in fullest.items():
        where = (
            re.sub(r"(?<=[._])\d+(?=[.:])", "*", _asked_by(lines, number, producers, arguments))
            or lines[number].operation
        )
        grouped.setdefault((where, str(lines[number].arrays[part_of])), []).append(size)
    found = [Allocation(sum(sizes), len(sizes), shape, where) for (where, shape), sizes in grouped.items()]
    return sorted(found, key=lambda each: (-each.bytes, each.where, each.shape))[:count]


def _asked_by(lines: list[_Line], number: int, producers: Mapping[str, int], arguments: Mapping[int, str]) -> str:
    """Copies and what the compiler made of several operations have no name of their own: whose value they hold."""
    for _ in range(8):
        line = lines[number]
        if line.operation == "parameter":
            name = arguments.get(-1 if line.index is None else line.index)
            return f"{name}: copy" if name else line.where
        if (line.where and line.where != "device_data") or not line.operands or line.operands[0] not in producers:
            return line.where
        number = producers[line.operands[0]]
    return ""


def collectives(text: str) -> list[Collective]:
    """What devices exchange, by kind, in all computations of the module."""
    elements: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for raw in text.splitlines():
        found = re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", raw)
        if not found or " = " not in raw:
            continue
        kind, started = found.group(1), bool(found.group(2))
        arrays = _arrays(raw[raw.index(" = ") : found.start()])
        if started and kind in ("all-gather", "collective-permute") and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        counts[kind] += 1
        sizes[kind] += sum(each.bytes for each in arrays)
        for each in arrays:
            elements.setdefault(kind, Counter())[each.dtype] += each.elements
    return [
        Collective(kind, counts[kind], sum(elements[kind].values()), sizes[kind], dict(elements[kind].most_common()))
        for kind in COLLECTIVES
        if counts[kind]
    ]
