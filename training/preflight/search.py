"""Runs a preflight: traces the run's programs, compiles them for each accelerator, searches for the largest batch."""

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from training.accelerators import Accelerator
from training.config import Mesh, TrainerConfig, batch_mistake, mesh_mistake
from training.distributed.cluster import LIBTPU_FLAGS, join_flags
from training.errors import BadInput
from training.preflight import compiler, report
from training.preflight.compiler import CompiledProgram
from training.preflight.programs import DataFacts, Graph, TracedProgram, list_graphs, trace_programs
from training.preflight.report import AcceleratorResult, GraphResult, LargestBatch, Report
from training.registry import BACKENDS, load

MOST_ROWS = 1 << 14  # a device

ShowProgress = Callable[[str], None]


def run_preflight(
    config: TrainerConfig, facts: DataFacts, targets: Sequence[Accelerator], *, search_batch: bool, show: ShowProgress
) -> Report:
    """Compiles the programs of a run for each accelerator in `targets`; with `search_batch`, also searches for the
    largest training batch that fits. If PyTorch/XLA's longest step does not fit, also compiles it with train.remat:
    layers and larger meshes, for advice in its reason. `show` gets lines of progress, from two threads. Raises BadInput
    if a batch or the mesh does not fit the devices or the model can't be built, CompilerUnavailable if there is no
    compiler for a slice here, and Untraceable or DataDependentProgram for a step that is not a single program."""
    compiler.require_versions()
    mistakes = []
    for target in targets:
        mesh, batch = config.train.mesh.fsdp, batch_mistake(config, target.hosts, target.devices)
        mistakes += [f"{target.name}: {each}" for each in (mesh_mistake(mesh, target.devices), batch) if each]
    if mistakes:
        raise BadInput("\n".join(mistakes))
    results = []
    traced: dict[tuple[object, ...], list[TracedProgram]] = {}
    for target in targets:
        # Programs depend on nothing else of a slice, but those of TorchTPU on the places of its chips.
        kind = (target.devices, target.generation.runs_kernels, config.backend == "torch-tpu" and target.name)
        if kind not in traced:
            show(f"tracing for {target.devices} devices")
            traced[kind] = trace_programs(config, facts, list_graphs(config, facts), target)
        trial = Trial(config, facts, target, show)
        result = compile_all(traced[kind], target, show, trial.flags)
        longest, *others = result.graphs
        trial = replace(trial, other_programs=sum(each.memory.code for each in others if each.memory))
        if config.backend == "torch-xla" and not longest.fits:
            advice = [str(longest.reason), *trial.advise_remat(longest), *trial.advise_mesh(longest)]
            longest = replace(longest, reason="; ".join(advice))
        largest = trial.search_batch(longest) if search_batch else None
        results.append(replace(result, graphs=[longest, *others], max_batch=largest))
    return Report("libtpu " + importlib.metadata.version("libtpu"), results)


def compile_all(
    programs: Sequence[TracedProgram],
    target: Accelerator,
    show: ShowProgress,
    flags: Mapping[str, str] = MappingProxyType({}),
    other_programs: int = 0,
) -> AcceleratorResult:
    """Compiles a run's programs for one accelerator, two at a time, with `flags` beside LIBTPU_INIT_ARGS. A refused
    program is a result that does not fit. `other_programs`: bytes of the code of the run's programs that are not in
    `programs`. Raises CompilerUnavailable if there is no compiler that knows the slice."""

    def compile_one(traced: TracedProgram) -> tuple[CompiledProgram | str, float]:
        """Returns (the executable's facts or the refusal's message, seconds of the compilation)."""
        show(f"compiling {traced.graph} for {target.name}")
        began = time.monotonic()
        try:
            compiled = compiler.compile_program(traced.program, target, flags)
            return compiled, compiled.seconds
        except compiler.CompilationRefused as error:
            return str(error), time.monotonic() - began

    # Two at a time: the compiler uses little more than one core, and each further one would need more memory.
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(compile_one, programs))
    sizes = [0 if isinstance(outcome, str) else outcome.memory.code for outcome, _ in outcomes]
    graphs = [
        report.describe(traced, outcome, seconds, target, other_programs + sum(sizes) - size)
        for traced, (outcome, seconds), size in zip(programs, outcomes, sizes, strict=True)
    ]
    capacity = target.generation.usable_hbm_bytes_per_device
    all_flags = join_flags(os.environ.get(LIBTPU_FLAGS, "").replace(compiler.DEEP_STACKS, ""), flags)
    return AcceleratorResult(target.name, target.devices, target.hosts, capacity, graphs, flags=all_flags)


@dataclass(frozen=True)
class Trial:
    """Compiles a run's training step with other settings for an accelerator, to find some that fit."""

    config: TrainerConfig
    facts: DataFacts
    target: Accelerator
    show: ShowProgress
    other_programs: int = 0  # bytes of the code of the run's programs but the one that is compiled

    @property
    def flags(self) -> dict[str, str]:
        """Returns libtpu's flags that a run on this slice adds to the LIBTPU_INIT_ARGS of the environment."""
        flags: dict[str, str] = load(BACKENDS[self.config.backend].libtpu_defaults)(
            self.target.generation.name, os.environ.get(LIBTPU_FLAGS, "")
        )
        return flags

    def compile(self, graph: Graph, **settings: Any) -> GraphResult:
        """Traces and compiles a program with other `settings` of the section `train`. Raises as `run_preflight`."""
        programs = trace_programs(self.config.with_train(**settings), self.facts, [graph], self.target)
        return compile_all(programs, self.target, self.show, self.flags, self.other_programs).graphs[0]

    def advise_remat(self, longest: GraphResult) -> Iterator[str]:
        """Yields a sentence: what a program that does not fit needs with train.remat: layers, and whether it fits then;
        nothing if the run has that setting or the model can't."""
        if self.config.train.remat == "layers":
            return
        self.show(f"it does not fit: tracing it with train.remat: layers for {self.target.name}")
        try:
            result = self.compile(Graph(longest.kind, longest.rows, longest.length), remat="layers")
        except BadInput:  # layers of this family can't be recomputed
            return
        needed = f"would need {report.format_gib(result.needed)}" if result.needed else "would not compile either"
        yield f"with train.remat: layers it {needed}{' and fit' if result.fits else ''}"

    def advise_mesh(self, longest: GraphResult) -> Iterator[str]:
        """Yields with which larger mesh a program that does not fit would fit, or that none helps: compiles it with the
        state split over twice as many devices each time. Yields nothing if no mesh is larger."""
        fsdp = self.config.train.mesh.fsdp
        if 2 * fsdp > self.target.devices:
            return
        while self.target.devices % (2 * fsdp) == 0:
            fsdp *= 2
            self.show(f"it does not fit: tracing it with train.mesh.fsdp: {fsdp} for {self.target.name}")
            result = self.compile(Graph(longest.kind, longest.rows, longest.length), mesh=Mesh(fsdp=fsdp))
            if result.fits and result.needed:
                yield f"with train.mesh.fsdp: {fsdp} it would need {report.format_gib(result.needed)} and fit"
                return
        yield f"no train.mesh.fsdp up to {fsdp} makes it fit"

    def search_batch(self, first: GraphResult) -> LargestBatch:
        """Returns the largest training batch that fits, to within 1/16 and up to MOST_ROWS rows per device (`bisect`).
        Starts at the file's batch, whose result is `first`, and traces and compiles each further one. Raises as
        `run_preflight`."""
        step = self.target.devices * self.config.train.gradient_accumulation
        known = {self.config.train.global_batch_size // step: first}

        def fits(rows: int) -> bool:
            """Compiles the step with so many rows a device, notes the result in `known`, returns whether it fits."""
            graph = Graph("training", rows * step, max(self.facts.lengths))
            known[rows] = self.compile(graph, global_batch_size=rows * step)
            if known[rows].reason:
                self.show(f"{graph}: {known[rows].reason}")
            return known[rows].fits

        def estimate() -> float | None:
            return estimate_edge(known, self.target.generation.usable_hbm_bytes_per_device)

        good, bad = bisect(fits, min(known), first.fits, estimate)
        return LargestBatch(
            good * step if good else None,
            bad * step if bad else None,
            good * self.config.train.gradient_accumulation if good else None,
            len(known) - 1,
        )


def estimate_edge(known: Mapping[int, GraphResult], capacity: int) -> float | None:
    """Returns the rows per device at which memory should run out, by a line through the two points nearest to
    `capacity` bytes, or the upper one if it needs no more; None with fewer points. `known`: results by rows per device;
    a compiled one without its temporaries is a point at 0 rows."""
    needed = {rows: result.needed for rows, result in known.items() if result.needed}
    memory = next((result.memory for result in known.values() if result.memory), None)
    if memory:
        needed[0] = memory.total - memory.temporaries
    if len(needed) < 2:
        return None
    (low, below), (high, above) = sorted(sorted(needed.items(), key=lambda item: abs(item[1] - capacity))[:2])
    if above <= below:
        return high  # more rows take no more memory, so the memory is used up
    return low + (capacity - below) * (high - low) / (above - below)


def bisect(
    fits: Callable[[int], bool], start: int, start_fits: bool, estimate: Callable[[], float | None] = lambda: None
) -> tuple[int | None, int | None]:
    """Returns the edge between numbers that fit and numbers that don't, (largest that fits, smallest that does not), at
    most 1/16 of the larger, or 1, apart. The first is None if not even 1 fits, the second if one of MOST_ROWS or more
    fits.

    Args:
        fits: tries a number; not called for `start`, whose result is `start_fits`.
        estimate: returns where the edge is expected now; None: try twice or half the last number, and then the middle.
    """
    good, bad = (start, None) if start_fits else (0, start)
    tries = surprises = 0
    while good < MOST_ROWS if bad is None else bad - good > max(1, bad // 16):
        tries += 1
        expected = estimate() if tries <= 6 else None  # plain bisection ends even if memory does not grow linearly
        rows = _next_rows(good, bad, expected, surprises)
        good, bad = (rows, bad) if fits(rows) else (good, rows)
        # Near the edge the compiler rematerializes to save memory; no line predicts how far, so the strides grow.
        surprises += expected is not None and good == rows > expected * 33 / 32
    return good or None, bad


def _next_rows(good: int, bad: int | None, expected: float | None, surprises: int) -> int:
    """Returns the number to try next: just below the expected edge, with longer strides after more `surprises` (numbers
    that fit far beyond it), or one that would end the search; if `expected` is None, twice, half or the middle."""
    if expected is None:
        return min(2 * good, MOST_ROWS) if bad is None else (good + bad) // 2
    low, high = good + 1, bad - 1 if bad else MOST_ROWS
    just_below = int(expected * 0.99)
    if bad is not None and just_below >= bad:
        just_below = bad - max(1, bad // 16)
    elif just_below <= good * 33 // 32:
        just_below = low + max(0, good * 2**surprises // 16 - 1)
        just_below = just_below if bad is None or just_below < bad else (low + bad) // 2
    return min(max(just_below, low), high)
