"""Reads the text of a compiled program: what the devices exchange, how long the operations take, and where in the model
an operation comes from. Pure."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|token|bf16|[a-z]\d+(?:[a-z]\w*)?)\[([\d,<=]*)\]")
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


def _bits(dtype: str) -> int:
    """Returns the bits of one element of a type: 32 for "s32"."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    assert match, dtype
    return int(match.group(1))


def _parse_arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (type, dimensions) of all arrays in a text, in their order; a dynamic size counts as its bound."""
    found = _ARRAY.findall(text)
    return [(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)) for dtype, dims in found]


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
class _RunLine:
    text: str
    computation: str
    runs: int  # in a step
    is_fused: bool


def _find_run_lines(text: str) -> Iterator[_RunLine]:
    """Yields the lines of HLO that a step runs, with the number of runs: in a loop's body, those of the loop."""
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
    """Returns how often a loop runs: what the compiler says, else the largest number in its condition, else 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    lines = computations.get(condition[1], ()) if condition else ()
    return max((int(number) for each in lines for number in re.findall(r" constant\((\d+)\)", each)), default=1)


def estimate_cycles(text: str) -> int:
    """Returns the sum of libtpu's estimated cycles of a step's operations; collectives and some fusions have none."""
    return sum(cycles * runs for cycles, runs in _find_cycles(text))


def share_of_loops(text: str) -> float:
    """Returns how many times as many cycles libtpu estimates for a step as for one run of each operation: 1 without
    loops. Its counts of FLOPs and bytes have one run of each."""
    found = _find_cycles(text)
    once = sum(cycles for cycles, _ in found)
    return sum(cycles * runs for cycles, runs in found) / once if once else 1.0


def _find_cycles(text: str) -> list[tuple[int, int]]:
    """Returns the estimated cycles of each operation that has an estimate, and how often it runs in a step."""
    lines = [line for line in _find_run_lines(text) if not line.is_fused]
    found = [(re.search(r'"estimated_cycles":"(\d+)"', line.text), line.runs) for line in lines]
    return [(int(match[1]), runs) for match, runs in found if match and int(match[1]) < _NO_ESTIMATE]


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
            arrays = [(dtype, dims) for dtype, dims in arrays if dims]  # without the contexts of a permutation
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        counts[kind] += runs
        for dtype, dims in arrays:
            elements.setdefault(kind, Counter())[dtype] += runs * math.prod(dims)
            sizes[kind] += runs * (math.prod(dims) * _bits(dtype) // 8)
    return [
        Collective(kind, counts[kind], sum(elements[kind].values()), sizes[kind], dict(elements[kind].most_common()))
        for kind in COLLECTIVES
        if counts[kind]
    ]
