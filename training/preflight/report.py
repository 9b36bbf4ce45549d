"""Turns the compiler's facts and refusals into the report of a preflight: data, lines of text, JSON. Pure.

Bytes and FLOPs are those of one device; a batch is the global one.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from training.accelerators import Accelerator
from training.preflight.compiler import CompiledProgram, Memory
from training.preflight.hlo import Allocation, Collective, find_origin, star_numbers
from training.preflight.programs import TracedProgram

FORMAT = 1
GIB = 2**30
LARGEST = 6
NOT_VERIFIED = "compiled by the TPU compiler without a TPU: that a TPU loads and runs it is not verified on hardware"


@dataclass(frozen=True)
class Costs:
    """Work of one device, and the bound on the speed that follows."""

    flops: float
    bytes: float
    bound_by: str  # "FLOPs" or "memory bandwidth"
    examples_per_second: float  # of all devices; an upper bound
    cycles: int = 0  # that the compiler estimates for the operations of a step, without collectives
    clock_hertz: float = 1.0

    @property
    def seconds(self) -> float:
        """Returns the compiler's estimate of the seconds that a step's operations take one after the other, without
        collectives and operations that have no estimate."""
        return self.cycles / self.clock_hertz


@dataclass(frozen=True, kw_only=True)
class GraphResult:
    """The result for one program on one accelerator."""

    graph: str  # "training, 256 x 128"
    kind: str
    rows: int
    length: int
    hash: str
    fits: bool
    reason: str | None  # why it does not fit, else None
    needed: int | None  # bytes of HBM, if the compiler's message says so
    memory: Memory | None = None
    costs: Costs | None = None
    largest: Sequence[Allocation] = ()  # that the compiler lists when it refuses the program
    collectives: Sequence[Collective] = ()
    trace_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class LargestBatch:
    """The result of `--max-batch`. All batches in it were compiled."""

    fits: int | None  # global batch; None if not even the smallest fits
    refused: int | None  # the smallest refused one; None if all tried ones fit
    rows_per_device: int | None
    tried: int


@dataclass(frozen=True)
class AcceleratorResult:
    """The results for all programs of the run on one accelerator."""

    accelerator: str
    devices: int
    hosts: int
    capacity: int
    graphs: Sequence[GraphResult]
    max_batch: LargestBatch | None = None
    flags: str = ""  # the run's LIBTPU_INIT_ARGS, with which the programs were compiled

    @property
    def fits(self) -> bool:
        return all(graph.fits for graph in self.graphs)

    @property
    def distinct_programs(self) -> int:
        """Returns the number of programs with different hashes."""
        return len({graph.hash for graph in self.graphs})


@dataclass(frozen=True)
class Report:
    """All results of one preflight."""

    compiler: str
    accelerators: Sequence[AcceleratorResult]

    @property
    def fits(self) -> bool:
        return all(result.fits for result in self.accelerators)

    @property
    def footer(self) -> str:
        return f"({self.compiler}; {NOT_VERIFIED})"

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints and `tpu-launch run` stores."""
        report = asdict(self)
        for result, document in zip(self.accelerators, report["accelerators"], strict=True):
            lines = [*_accelerator_lines(result), self.footer]
            document.update(fits=result.fits, distinct_graphs=result.distinct_programs, lines=lines)
            for graph, graph_document in zip(result.graphs, document["graphs"], strict=True):
                if graph.memory:
                    graph_document["memory"]["total"] = graph.memory.total
        return {"preflight": FORMAT, "fits": self.fits, "note": NOT_VERIFIED, **report}


# --- From facts to results


def describe(
    traced: TracedProgram, outcome: CompiledProgram | str, seconds: float, target: Accelerator, other_programs: int = 0
) -> GraphResult:
    """Returns the result for a program that was compiled, or that the compiler refused with a message, in so many
    seconds. A compiled one still does not fit if the state beside it and the code of the run's other programs
    (`other_programs` bytes) leave too little memory."""
    graph, rows = traced.graph, traced.graph.rows
    facts: dict[str, Any]
    if isinstance(outcome, str):
        needed, reason = explain_refusal(outcome)
        facts = {"fits": False, "reason": reason, "needed": needed, "largest": parse_allocations(outcome)[:LARGEST]}
    else:
        capacity = target.generation.usable_hbm_bytes_per_device
        memory = replace(outcome.memory, resident=traced.resident_bytes + other_programs, capacity=capacity)
        fits, size = memory.total <= capacity, format_gib(memory.resident)
        beside = f" ({size} of them for state and programs beside it)" if memory.resident else ""
        reason = f"{_too_large_reason(memory.total, capacity)}{beside}"
        costs = roofline(outcome.flops, outcome.bytes_accessed, target, rows, outcome.cycles)
        facts = {"fits": fits, "reason": None if fits else reason, "needed": memory.total, "memory": memory}
        facts |= {"costs": costs, "collectives": outcome.collectives}
    return GraphResult(
        graph=str(graph),
        kind=graph.kind,
        rows=rows,
        length=graph.length,
        hash=traced.program.hash,
        trace_seconds=traced.seconds,
        compile_seconds=seconds,
        **facts,
    )


def roofline(flops: float, bytes_accessed: float, target: Accelerator, rows: int, cycles: int = 0) -> Costs:
    """Returns the costs of a step of `rows` in all for which one device needs `flops` and `bytes_accessed`, with the
    examples/s that the slower of the two allows at peak rates (https://doi.org/10.1145/1498765.1498785): infinity if
    both are 0."""
    generation = target.generation
    compute = flops * generation.devices_per_chip / generation.bf16_flops_per_chip
    memory = bytes_accessed * generation.devices_per_chip / generation.hbm_bytes_per_second_per_chip
    seconds = max(compute, memory)
    return Costs(
        flops,
        bytes_accessed,
        "FLOPs" if compute >= memory else "memory bandwidth",
        rows / seconds if seconds else float("inf"),
        cycles,
        generation.clock_hertz,
    )


def explain_refusal(message: str) -> tuple[int | None, str]:
    """Returns (needed bytes of a device's HBM or None, the reason in plain words) from the compiler's message."""
    used = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message)
    temporaries = re.search(r"HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", message)
    match = used or temporaries
    if match:
        wanted, available = _parse_size(match.group(1)), _parse_size(match.group(2))
        return wanted, _too_large_reason(wanted, available)
    if "allocation_size_words <= std::numeric_limits<int32_t>::max()" in message:
        return None, "does not fit: a single array is larger than the device can address"
    first_line = next((line for line in message.splitlines() if line.strip()), "no reason given")
    return None, f"the compiler refuses it: {first_line[:300]}"


def _too_large_reason(wanted: int, available: int) -> str:
    return f"does not fit: it needs {format_gib(wanted)} of HBM a device, and {format_gib(available)} are there"


def parse_allocations(message: str) -> list[Allocation]:
    """Returns the program allocations that a refusal lists, largest first, with those of all layers summed."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for block in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+[KMGT]?)", block)
        shape = re.search(r"Shape: ([\w]+\[[\d,]*\])", block)
        operator = re.search(r"Operator: (.*)", block)
        if size and shape:
            where = star_numbers(find_origin(operator.group(1))) if operator else ""
            sizes.setdefault((where, shape.group(1)), []).append(_parse_size(size.group(1)))
    allocations = [Allocation(sum(group), len(group), shape, where) for (where, shape), group in sizes.items()]
    return sorted(allocations, key=lambda allocation: -allocation.bytes)


def _parse_size(text: str) -> int:
    """Returns the bytes of "15.48G" or "512"; K, M, G and T are powers of 1024."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1], 1)
    return int(float(text.rstrip("KMGT")) * scale)


# --- From results to text


def format_gib(amount: float) -> str:
    """Returns bytes as for example "15.48 GiB"."""
    return f"{amount / GIB:.2f} GiB"


def format_size(amount: float) -> str:
    """Returns a number of bytes in its largest unit, for example "1.5 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.4g} {unit}"
    return f"{amount:.0f} B"


def format_report(report: Report) -> list[str]:
    return [line for result in report.accelerators for line in _accelerator_lines(result)] + [report.footer]


def _accelerator_lines(result: AcceleratorResult) -> list[str]:
    """Returns the report's lines on one accelerator: verdict, each program, largest batch, flags."""
    hosts = "1 host" if result.hosts == 1 else f"{result.hosts} hosts"
    verdict = "fits" if result.fits else "DOES NOT FIT"
    programs = f"{result.distinct_programs} program{'s' if result.distinct_programs > 1 else ''}"
    seconds = sum(graph.compile_seconds for graph in result.graphs)
    lines = [
        f"{result.accelerator}: {verdict}: {result.devices} devices on {hosts}, "
        f"{format_gib(result.capacity)} of HBM each; {programs} (checkpoints add none), "
        f"compiled here in {seconds:.0f} s"
    ]
    for graph in result.graphs:
        lines += [f"  {line}" for line in _graph_lines(graph, result.devices)]
    if result.max_batch:
        batch = result.max_batch
        found = f"none; not even {batch.refused} fits"
        if batch.fits is not None:
            beyond = f"{batch.refused} does not" if batch.refused else "more was not tried"
            found = f"{batch.fits} fits ({batch.rows_per_device} rows a device), {beyond}"
        lines.append(f"  largest batch: {found} ({batch.tried} compiled)")
    if result.flags:
        lines.append(f"  compiled with the run's LIBTPU_INIT_ARGS: {result.flags}")
    return lines


def _graph_lines(graph: GraphResult, devices: int) -> list[str]:
    """Returns lines on one program: memory, work, time, traffic; or why it was refused, and its largest allocations."""
    head = f"{graph.graph} ({graph.rows // devices} rows a device)"
    if graph.memory is None or graph.costs is None:
        lines = [f"{head}: {graph.reason}"]
    else:
        memory, costs = graph.memory, graph.costs
        intensity = costs.flops / max(costs.bytes, 1)
        lines = [
            f"{head}: {graph.reason or f'fits: {format_gib(memory.total)} of {format_gib(memory.capacity)}'}",
            f"  HBM      arguments {format_size(memory.arguments)}, temporaries {format_size(memory.temporaries)}, "
            f"outputs {format_size(memory.outputs)} ({format_size(memory.donated)} of them in donated arguments), "
            f"code {format_size(memory.code)}, beside it {format_size(memory.resident)}",
            f"  work     {costs.flops / 1e12:.4g} TFLOP, {format_size(costs.bytes)}, {intensity:.0f} FLOP/byte a device"
            f"; bound: at most {costs.examples_per_second:,.0f} examples/s ({costs.bound_by})",
            f"  time     {1e3 * costs.seconds:.4g} ms for a step's operations by the compiler's estimate "
            f"({costs.cycles:,} cycles at {costs.clock_hertz / 1e6:.0f} MHz), without collectives and waiting",
        ]
        lines += [
            f"  traffic  {item.count} x {item.kind}: {format_size(item.bytes)} "
            f"({', '.join(f'{count:,} {dtype}' for dtype, count in item.dtypes.items())})"
            for item in graph.collectives
        ]
    lines += [
        f"  largest  {format_size(item.bytes):>10}  {item.count:3} x {item.shape}  {item.where}"
        for item in graph.largest
    ]
    return lines
