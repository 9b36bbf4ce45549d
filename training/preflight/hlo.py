"""Reads the text of a compiled program: which buffers, by the model's own names, make up the peak of HBM, and what the
devices exchange. Pure.

The entry computation's lines are in the order of execution (the module is scheduled), so a buffer lives from its line
to the last line that reads it. The compiler's allocator also shares and fragments buffers, so sums here differ by some
per cent from its total, which the report shows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_BITS = {"pred": 8, "token": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|token|bf16|[a-z]\d+(?:[a-z]\w*)?)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(r" ([a-z][a-z0-9-]*)\(")
# Operations whose results are other buffers or parts of them.
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
_NO_ESTIMATE = 2**63 - 1  # libtpu's estimated cycles of a fusion that it did not estimate


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
class _Array:
    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return self.elements * _bits(self.dtype) // 8

    @property
    def in_hbm(self) -> int:
        """Bytes with the padding of its tiles; 0 for an array that is not in HBM."""
        if re.search(r"S\((?!0\))\d+\)", self.layout):
            return 0
        order, _, tiling = self.layout.partition(":")
        tiles = re.match(r"T\(([\d,]+)\)", tiling)
        if not tiles or not self.dims:
            return self.bytes
        minor_first = [int(dimension) for dimension in order.split(",") if dimension]
        physical = [self.dims[dimension] for dimension in reversed(minor_first)]
        tile = [int(size) for size in tiles.group(1).split(",")]
        for axis in range(1, min(len(tile), len(physical)) + 1):  # from the minor end
            physical[-axis] = -(-physical[-axis] // tile[-axis]) * tile[-axis]
        return math.prod(physical) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """Returns the bits of one element of a type: 32 for "s32"."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    assert match, dtype
    return int(match.group(1))


def _parse_arrays(text: str) -> list[_Array]:
    """Returns all arrays that a text names, in their order; a dynamic size counts as its bound."""
    return [
        _Array(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size), layout)
        for dtype, dims, layout in _ARRAY.findall(text)
    ]


@dataclass(frozen=True)
class _Line:
    name: str
    operation: str
    arrays: list[_Array]  # of the result, one for each leaf of a tuple
    operands: list[str]
    index: int | None  # of get-tuple-element, and of a parameter
    where: str
    root: bool


def _parse_lines(text: str) -> Iterator[_Line]:
    """Yields the instructions of the entry computation."""
    _, _, entry = text.partition("\nENTRY ")
    for raw in entry.splitlines()[1:]:
        if raw.startswith("}"):
            return
        match = _LINE.match(raw)
        if not match:
            continue
        root, name, rest = match.groups()
        operation = _OPERATION.search(f" {rest}" if rest[0].isalpha() and "[" not in rest.split("(")[0] else rest)
        if not operation:
            continue
        result, arguments = rest[: operation.start()], rest[operation.end() :]
        index_pattern = {"get-tuple-element": r"index=(\d+)", "parameter": r"^(\d+)\)"}.get(operation.group(1))
        index = re.search(index_pattern, arguments) if index_pattern else None
        yield _Line(
            name=name,
            operation=operation.group(1),
            arrays=_parse_arrays(result),
            operands=re.findall(r"%([\w.-]+)", arguments.split("), ")[0]),
            index=int(index.group(1)) if index else None,
            where=find_origin(raw),
            root=bool(root),
        )


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


_Buffer = tuple[int, int]  # (number of the line that produces it, leaf of that line's result)


def largest_allocations(text: str, count: int, arguments: Mapping[int, str] = MappingProxyType({})) -> list[Allocation]:
    """Returns at most `count` of the largest temporary allocations at the peak of HBM. `arguments` names the program's
    arguments by number, for copies of them."""
    lines = list(_parse_lines(text))
    last_use, results = _buffer_lives(lines)
    sizes = {buffer: lines[buffer[0]].arrays[buffer[1]].in_hbm for buffer in last_use.keys() - results}
    peak = _peak_buffers({buffer: (size, last_use[buffer]) for buffer, size in sizes.items() if size}, len(lines))
    producers = {line.name: number for number, line in enumerate(lines)}
    groups: dict[tuple[str, str], list[int]] = {}
    for number, leaf in peak:
        where = star_numbers(_find_buffer_origin(lines, number, producers, arguments)) or lines[number].operation
        groups.setdefault((where, str(lines[number].arrays[leaf])), []).append(sizes[number, leaf])
    allocations = [Allocation(sum(group), len(group), shape, where) for (where, shape), group in groups.items()]
    return sorted(allocations, key=lambda item: (-item.bytes, item.where, item.shape))[:count]


def _buffer_lives(lines: list[_Line]) -> tuple[dict[_Buffer, int], set[_Buffer]]:
    """Returns (the number of the last line that reads each buffer, the buffers of the program's result)."""
    owners: dict[str, list[list[_Buffer]]] = {}  # name -> for each leaf, the buffers that it may stand for
    last_use: dict[_Buffer, int] = {}
    results: set[_Buffer] = set()
    for number, line in enumerate(lines):
        operands = [owners.get(name, []) for name in line.operands]
        for operand in operands:
            for leaf_buffers in operand:
                last_use.update(dict.fromkeys(leaf_buffers, number))
        owners[line.name] = _owned_buffers(lines, number, operands)
        if line.root:
            results = {buffer for leaf_buffers in owners[line.name] for buffer in leaf_buffers}
    return last_use, results


def _owned_buffers(lines: list[_Line], number: int, operands: list[list[list[_Buffer]]]) -> list[list[_Buffer]]:
    """Returns the buffers that each leaf of a line's result may be. `operands`: the same for each operand."""
    line = lines[number]
    if line.operation == "get-tuple-element" and operands:
        assert line.index is not None
        return [operands[0][line.index]] if line.index < len(operands[0]) else []
    if line.operation == "tuple":
        return [leaf_buffers for operand in operands for leaf_buffers in (operand[:1] or [[]])]
    if line.operation in _VIEWS:
        return operands[0] if operands else []
    if line.operation in _NO_BUFFER:
        return [[] for _ in line.arrays]
    shapes_read: set[str] = set()
    if "-start" in line.operation:  # the result of an asynchronous start lists its operands beside its own arrays
        buffers = (buffer for operand in operands for leaf_buffers in operand for buffer in leaf_buffers)
        shapes_read = {str(lines[maker].arrays[leaf]) for maker, leaf in buffers}
    return [[] if leaf and str(array) in shapes_read else [(number, leaf)] for leaf, array in enumerate(line.arrays)]


def _peak_buffers(lives: Mapping[_Buffer, tuple[int, int]], lines: int) -> list[_Buffer]:
    """Returns the buffers that are alive at the peak. `lives`: buffer -> (bytes, last line that reads it)."""
    begins: dict[int, list[_Buffer]] = {}
    ends: dict[int, list[_Buffer]] = {}
    for buffer, (_, last_line) in lives.items():
        begins.setdefault(buffer[0], []).append(buffer)
        ends.setdefault(last_line + 1, []).append(buffer)
    alive: dict[_Buffer, None] = {}
    total = most = 0
    peak: list[_Buffer] = []
    for number in range(lines + 1):
        for buffer in ends.get(number, ()):
            del alive[buffer]
            total -= lives[buffer][0]
        for buffer in begins.get(number, ()):
            alive[buffer] = None
            total += lives[buffer][0]
        if total > most:
            most, peak = total, list(alive)
    return peak


def _find_buffer_origin(
    lines: list[_Line], number: int, producers: Mapping[str, int], arguments: Mapping[int, str]
) -> str:
    """Returns the place in the model that a buffer's value comes from. A copy or a fusion without a name gets the name
    of its first operand, followed over at most 8 instructions; "" beyond."""
    for _ in range(8):
        line = lines[number]
        if line.operation == "parameter":
            name = arguments.get(-1 if line.index is None else line.index)
            return f"{name}: copy" if name else line.where
        if (line.where and line.where != "device_data") or not line.operands or line.operands[0] not in producers:
            return line.where
        number = producers[line.operands[0]]
    return ""


@dataclass(frozen=True)
class _RunLine:
    text: str
    computation: str
    runs: int  # in a step
    is_fused: bool


def _find_run_lines(text: str) -> Iterator[_RunLine]:
    """Yields each line of the computations that a step runs. Those of a loop's body run as often as the loop."""
    computations: dict[str, list[str]] = {"": []}
    current = entry = ""
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = match[2]
            computations[current], entry = [], current if match[1] else entry
        computations[current].append(line)
    waiting = [(entry, 1, False)]
    while waiting:
        name, runs, is_fused = waiting.pop()
        for line in computations.get(name, ()):
            yield _RunLine(line, name, runs, is_fused)
            called = re.search(r" (while|call|fusion|async-start)\(.*(?:body|to_apply|calls)=%?([\w.-]+)", line)
            if called:
                times = _count_trips(line, computations) if called[1] == "while" else 1
                waiting.append((called[2], runs * times, is_fused or called[1] == "fusion"))


def _count_trips(line: str, computations: Mapping[str, list[str]]) -> int:
    """Returns how often a loop runs: what the compiler says, or the largest number that its condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    lines = computations.get(condition[1], ()) if condition else ()
    return max((int(number) for each in lines for number in re.findall(r" constant\((\d+)\)", each)), default=1)


def estimate_cycles(text: str) -> int:
    """Returns the cycles that libtpu estimates for all operations of a step, one after the other. It has no estimate
    for collectives, for waiting, and for some fusions."""
    lines = [line for line in _find_run_lines(text) if not line.is_fused]
    found = [(re.search(r'"estimated_cycles":"(\d+)"', line.text), line.runs) for line in lines]
    return sum(int(match[1]) * runs for match, runs in found if match and int(match[1]) < _NO_ESTIMATE)


def find_collectives(text: str) -> list[Collective]:
    """Returns the collective operations of a step, one item for each kind; those in a loop as often as it runs."""
    elements: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for run in _find_run_lines(text):
        line, runs = run.text, run.runs
        match = re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", line)
        if not match or " = " not in line:
            continue
        kind, starts = match.group(1), bool(match.group(2))
        kind = "reduce-scatter" if run.computation.startswith("all-reduce-scatter") else kind
        arrays = _parse_arrays(line[line.index(" = ") : match.start()])
        if starts and kind in ("all-gather", "collective-permute") and len(arrays) > 1:
            arrays = [array for array in arrays if array.dims]  # without the contexts of a permutation
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        counts[kind] += runs
        sizes[kind] += runs * sum(array.bytes for array in arrays)
        for array in arrays:
            elements.setdefault(kind, Counter())[array.dtype] += runs * array.elements
    return [
        Collective(kind, counts[kind], sum(elements[kind].values()), sizes[kind], dict(elements[kind].most_common()))
        for kind in COLLECTIVES
        if counts[kind]
    ]
