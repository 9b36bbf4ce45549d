"""What a preflight found, in words, as a table and as JSON. Pure: from the compiler's facts and refusals to what a
person and `tpu-launch run` read.

Bytes and FLOPs are those of one device; a batch is the global one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from training.accelerators import Accelerator
from training.preflight.compiler import Compiled
from training.preflight.hlo import Allocation, Collective, collectives, largest, place
from training.preflight.programs import Traced

FORMAT = 1
GIB = 2**30
LARGEST = 6
NOT_VERIFIED = "compiled by the TPU compiler without a TPU: that a TPU loads and runs it is not verified on hardware"


@dataclass(frozen=True)
class Memory:
    """HBM of one device while a program runs, in bytes."""

    arguments: int
    outputs: int
    donated: int  # of the outputs: they live in arguments
    temporaries: int
    code: int
    resident: int  # state that this program does not touch, and the run's other programs
    capacity: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code + self.resident


@dataclass(frozen=True)
class Costs:
    """Work of one device, and what it bounds."""

    flops: float
    bytes: float
    bound_by: str  # "FLOPs" or "memory bandwidth"
    examples_per_second: (
        float  # of all devices: no run is faster than this; how much slower it is, nobody knows before it runs
    )


@dataclass(frozen=True)
class GraphResult:
    """One program on one accelerator."""

    graph: str  # "training, 256 x 128"
    kind: str
    rows: int
    length: int
    hash: str
    fits: bool
    reason: str | None  # why it does not
    needed: int | None  # bytes of HBM that the compiler wanted, where it says so
    memory: Memory | None
    costs: Costs | None
    largest: Sequence[Allocation]
    collectives: Sequence[Collective]
    trace_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class Largest:
    """The outcome of `--max-batch`: each was compiled."""

    fits: int | None  # global batch; None when not even the smallest does
    refused: int | None  # the smallest that was refused; None when the search ended before one was
    rows_per_device: int | None
    tried: int


@dataclass(frozen=True)
class AcceleratorResult:
    """All programs of the run on one accelerator."""

    accelerator: str
    devices: int
    hosts: int
    capacity: int
    graphs: Sequence[GraphResult]
    max_batch: Largest | None = None

    @property
    def fits(self) -> bool:
        return all(each.fits for each in self.graphs)

    @property
    def distinct(self) -> int:
        return len({each.hash for each in self.graphs})


@dataclass(frozen=True)
class Report:
    compiler: str
    accelerators: Sequence[AcceleratorResult]

    @property
    def fits(self) -> bool:
        return all(each.fits for each in self.accelerators)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints, and what `tpu-launch run` keeps."""
        found = asdict(self)
        for one, said in zip(self.accelerators, found["accelerators"], strict=True):
            said.update(fits=one.fits, distinct_graphs=one.distinct, lines=[*_of_accelerator(one), _footer(self)])
            for graph, told in zip(one.graphs, said["graphs"], strict=True):
                if graph.memory:
                    told["memory"]["total"] = graph.memory.total
        return {"preflight": FORMAT, "fits": self.fits, "note": NOT_VERIFIED, **found}


# --- facts to results


def fitting(traced: Traced, compiled: Compiled, target: Accelerator, other_programs: int) -> GraphResult:
    """What compiled. It still does not fit when the state that waits beside it, and the run's other programs, leave too
    little."""
    capacity = target.generation.usable_hbm_bytes_per_device
    memory = Memory(
        arguments=compiled.argument_bytes,
        outputs=compiled.output_bytes,
        donated=compiled.aliased_bytes,
        temporaries=compiled.temporary_bytes,
        code=compiled.code_bytes,
        resident=traced.resident_bytes + other_programs,
        capacity=capacity,
    )
    fits = memory.total <= capacity
    beside = f" ({gib(memory.resident)} of them for state and programs beside it)" if memory.resident else ""
    reason = None if fits else f"{_too_large(memory.total, capacity)}{beside}"
    return _result(
        traced,
        fits=fits,
        reason=reason,
        needed=memory.total,
        memory=memory,
        costs=roofline(compiled.flops, compiled.bytes_accessed, target, traced.graph.rows),
        largest=largest(compiled.text, LARGEST, traced.program.arguments),
        collectives=collectives(compiled.text),
        compile_seconds=compiled.seconds,
    )


def refused(traced: Traced, message: str, seconds: float) -> GraphResult:
    """What the compiler does not compile."""
    needed, reason = reason_of(message)
    return _result(
        traced,
        fits=False,
        reason=reason,
        needed=needed,
        memory=None,
        costs=None,
        largest=allocations_of(message)[:LARGEST],
        collectives=(),
        compile_seconds=seconds,
    )


def advised(graph: GraphResult, again: GraphResult) -> GraphResult:
    """What does not fit, with what became of it when whole layers are computed again backwards."""
    needed = f"would need {gib(again.needed)}" if again.needed else "would not compile either"
    return replace(
        graph, reason=f"{graph.reason}; with train.remat: layers it {needed}{' and fit' if again.fits else ''}"
    )


def _result(traced: Traced, **facts: Any) -> GraphResult:
    graph = traced.graph
    return GraphResult(
        graph=str(graph),
        kind=graph.kind,
        rows=graph.rows,
        length=graph.length,
        hash=traced.program.hash,
        trace_seconds=traced.seconds,
        **facts,
    )


def roofline(flops: float, bytes_accessed: float, target: Accelerator, rows: int) -> Costs:
    """The larger of the times that FLOPs and memory traffic take at the published peaks
    (https://doi.org/10.1145/1498765.1498785)."""
    generation = target.generation
    compute = flops * generation.devices_per_chip / generation.bf16_flops_per_chip
    memory = bytes_accessed * generation.devices_per_chip / generation.hbm_bytes_per_second_per_chip
    seconds = max(compute, memory)
    return Costs(
        flops,
        bytes_accessed,
        "FLOPs" if compute >= memory else "memory bandwidth",
        rows / seconds if seconds else float("inf"),
    )


def reason_of(message: str) -> tuple[int | None, str]:
    """(bytes of HBM that were wanted, the reason in plain words) from the compiler's refusal."""
    used = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message)
    temporaries = re.search(r"HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", message)
    found = used or temporaries
    if found:
        wanted, there = _size(found.group(1)), _size(found.group(2))
        return wanted, _too_large(wanted, there)
    if "allocation_size_words <= std::numeric_limits<int32_t>::max()" in message:
        return None, "does not fit: a single array is larger than the device can address"
    first = next((line for line in message.splitlines() if line.strip()), "no reason given")
    return None, f"the compiler refuses it: {first[:300]}"


def _too_large(wanted: int, there: int) -> str:
    return f"does not fit: it needs {gib(wanted)} of HBM a device, and {gib(there)} are there"


def allocations_of(message: str) -> list[Allocation]:
    """The largest program allocations that a refusal lists."""
    found = []
    for block in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+[KMGT]?)", block)
        shape = re.search(r"Shape: ([\w]+\[[\d,]*\])", block)
        operator = re.search(r"Operator: (.*)", block)
        if size and shape:
            where = re.sub(r"(?<=[._])\d+(?=[.:])", "*", place(operator.group(1))) if operator else ""
            found.append(Allocation(_size(size.group(1)), 1, shape.group(1), where))
    return sorted(_together(found), key=lambda each: -each.bytes)


def _together(found: Sequence[Allocation]) -> list[Allocation]:
    groups: dict[tuple[str, str], list[int]] = {}
    for each in found:
        groups.setdefault((each.where, each.shape), []).append(each.bytes)
    return [Allocation(sum(sizes), len(sizes), shape, where) for (where, shape), sizes in groups.items()]


def _size(text: str) -> int:
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1], 1)
    return int(float(text.rstrip("KMGT")) * scale)


# --- to people


def gib(amount: float) -> str:
    return f"{amount / GIB:.2f} GiB"


def size(amount: float) -> str:
    """In the largest unit that leaves a whole number."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.4g} {unit}"
    return f"{amount:.0f} B"


def _dtypes(found: Collective) -> str:
    return ", ".join(f"{count:,} {dtype}" for dtype, count in found.dtypes.items())


def lines(report: Report) -> list[str]:
    """What `preflight` prints."""
    return [line for one in report.accelerators for line in _of_accelerator(one)] + [_footer(report)]


def _footer(report: Report) -> str:
    return f"({report.compiler}; {NOT_VERIFIED})"


def _of_accelerator(one: AcceleratorResult) -> list[str]:
    hosts = "1 host" if one.hosts == 1 else f"{one.hosts} hosts"
    verdict = "fits" if one.fits else "DOES NOT FIT"
    said = [
        f"{one.accelerator}: {verdict}: {one.devices} devices on {hosts}, {gib(one.capacity)} of HBM each; {_programs(one)}"
    ]
    for graph in one.graphs:
        said += [f"  {line}" for line in _of_graph(graph, one.devices)]
    if one.max_batch:
        said.append(f"  {_of_largest(one.max_batch)}")
    return said


def _programs(one: AcceleratorResult) -> str:
    seconds = sum(each.compile_seconds for each in one.graphs)
    return f"{one.distinct} program{'s' if one.distinct > 1 else ''} (checkpoints add none), compiled here in {seconds:.0f} s"


def _of_graph(graph: GraphResult, devices: int) -> list[str]:
    head = f"{graph.graph} ({graph.rows // devices} rows a device)"
    if graph.memory is None or graph.costs is None:
        said = [f"{head}: {graph.reason}"]
    else:
        memory, costs = graph.memory, graph.costs
        said = [
            f"{head}: {graph.reason or f'fits: {gib(memory.total)} of {gib(memory.capacity)}'}",
            f"  HBM      arguments {size(memory.arguments)}, temporaries {size(memory.temporaries)}, outputs {size(memory.outputs)} "
            f"({size(memory.donated)} of them in donated arguments), code {size(memory.code)}, beside it {size(memory.resident)}",
            f"  work     {costs.flops / 1e12:.4g} TFLOP, {size(costs.bytes)}, {costs.flops / max(costs.bytes, 1):.0f} FLOP/byte a device; "
            f"bound: at most {costs.examples_per_second:,.0f} examples/s ({costs.bound_by})",
        ]
        said += [
            f"  traffic  {each.count} x {each.kind}: {size(each.bytes)} ({_dtypes(each)})" for each in graph.collectives
        ]
    for each in graph.largest:
        said.append(f"  largest  {size(each.bytes):>10}  {each.count:3} x {each.shape}  {each.where}")
    return said


def _of_largest(found: Largest) -> str:
    if found.fits is None:
        return f"largest batch: none; not even {found.refused} fits ({found.tried} compiled)"
    beyond = f"{found.refused} does not" if found.refused else "more was not tried"
    return (
        f"largest batch: {found.fits} fits ({found.rows_per_device} rows a device), {beyond} ({found.tried} compiled)"
    )
