"""The procedure: trace what the run would run, compile it for each accelerator, and search for the largest batch that
fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from training.accelerators import Accelerator
from training.config import TrainerConfig, batch_mistake
from training.errors import BadInput
from training.preflight import compiler, report
from training.preflight.compiler import Compiled, Refused
from training.preflight.programs import Traced, trace
from training.preflight.report import AcceleratorResult, GraphResult, Largest, Report
from training.preflight.shapes import Facts, Graph, graphs

MOST_ROWS = 1 << 14  # a device

Say = Callable[[str], None]


def check(config: TrainerConfig, facts: Facts, targets: Sequence[Accelerator], *, max_batch: bool, say: Say) -> Report:
    """Raises BadInput for a batch that can't be divided, NoCompiler, and Untraceable or DataDependent for a step that
    is no single program."""
    compiler.require()
    mistakes = [
        f"{each.name}: {mistake}" for each in targets if (mistake := batch_mistake(config, each.hosts, each.devices))
    ]
    if mistakes:
        raise BadInput("\n".join(mistakes))
    found = []
    traced: dict[int, list[Traced]] = {}  # by number of devices: the program depends on nothing else of the slice
    for target in targets:
        if target.devices not in traced:
            say(f"tracing for {target.devices} devices")
            traced[target.devices] = trace(config, facts, graphs(config, facts), target.devices)
        result = _advised(config, facts, compiled(traced[target.devices], target, say), target, say)
        if max_batch:
            result = replace(result, max_batch=_search(config, facts, target, result.graphs[0], say))
        found.append(result)
    return Report(compiler.version(), found)


def compiled(traced: Sequence[Traced], target: Accelerator, say: Say) -> AcceleratorResult:
    """What the compiler makes of the programs of one run."""

    def one(each: Traced) -> tuple[Traced, Compiled | str, float]:
        say(f"compiling {each.graph} for {target.name}")
        began = time.monotonic()
        try:
            return each, compiler.compile(each.program, target), time.monotonic() - began
        except Refused as error:
            return each, str(error), time.monotonic() - began

    # Two at a time: the compiler keeps little more than one core busy, and more at once would need the memory of all.
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(one, traced))
    code = sum(found.code_bytes for _, found, _ in outcomes if isinstance(found, Compiled))
    results = [
        report.refused(each, found, seconds)
        if isinstance(found, str)
        else report.fitting(each, found, target, code - found.code_bytes)
        for each, found, seconds in outcomes
    ]
    return AcceleratorResult(
        target.name, target.devices, target.hosts, target.generation.usable_hbm_bytes_per_device, results
    )


def _advised(
    config: TrainerConfig, facts: Facts, result: AcceleratorResult, target: Accelerator, say: Say
) -> AcceleratorResult:
    """With what computing whole layers again would change, where the longest training batch does not fit."""
    longest = result.graphs[0]
    if longest.fits or config.backend != "torch-xla" or config.train.remat == "layers":
        return result
    less = config.model_copy(update={"train": config.train.model_copy(update={"remat": "layers"})})
    say(f"it does not fit: tracing it with train.remat: layers for {target.name}")
    try:
        found = compiled(
            trace(less, facts, [Graph(longest.kind, longest.rows, longest.length)], target.devices), target, say
        ).graphs[0]
    except BadInput:  # a model of a family that can't be computed again
        return result
    return replace(result, graphs=[report.advised(longest, found), *result.graphs[1:]])


def _search(config: TrainerConfig, facts: Facts, target: Accelerator, first: GraphResult, say: Say) -> Largest:
    """The largest training batch, over rows a device, from the file's batch on."""
    step = target.devices * config.train.gradient_accumulation
    known = {config.train.global_batch_size // step: first}

    def fits(rows: int) -> bool:
        graph = Graph("training", rows * step, max(facts.lengths))
        one = trace(_with_batch(config, rows * step), facts, [graph], target.devices)
        known[rows] = compiled(one, target, say).graphs[0]
        if known[rows].reason:
            say(f"{graph}: {known[rows].reason}")
        return known[rows].fits

    def edge() -> float | None:
        return where_memory_ends(known, target.generation.usable_hbm_bytes_per_device)

    good, bad = bisect(fits, min(known), first.fits, edge)
    return Largest(
        good * step if good else None,
        bad * step if bad else None,
        good * config.train.gradient_accumulation if good else None,
        len(known) - 1,
    )


def where_memory_ends(known: Mapping[int, GraphResult], capacity: int) -> float | None:
    """Rows a device at which memory is expected to run out, by a line through what is known nearest to it. Without rows
    there are no temporaries.

    None as long as too little is known."""
    needed = {rows: each.needed for rows, each in known.items() if each.needed}
    memory = next((each.memory for each in known.values() if each.memory), None)
    if memory:
        needed[0] = memory.total - memory.temporaries
    if len(needed) < 2:
        return None
    (low, below), (high, above) = sorted(sorted(needed.items(), key=lambda item: abs(item[1] - capacity))[:2])
    if above <= below:
        return high  # more rows in no more memory: it is used up
    return low + (capacity - below) * (high - low) / (above - below)


def bisect(
    fits: Callable[[int], bool], start: int, start_fits: bool, edge: Callable[[], float | None] = lambda: None
) -> tuple[int | None, int | None]:
    """(largest that fits, smallest that was refused). `start` is known already; their difference is at most 1/16 of the
    larger, or 1.

    `edge` tells, from what is known so far, where it is expected; without, it is looked for by doubling or halving, and
    then in the middle."""
    good, bad = (start, None) if start_fits else (None, start)
    tries = surprises = 0
    while (
        (bad is None and good is not None and good < MOST_ROWS)
        or (good is None and bad is not None and bad > 1)
        or not _near(good, bad)
    ):
        tries += 1
        expected = edge() if tries <= 6 else None  # where memory is no line, the middle is sure to lead there
        rows = _next(good, bad, expected, surprises)
        good, bad = (rows, bad) if fits(rows) else (good, rows)
        # Near its end the compiler computes again what it has no memory for: no line shows where that ends, so strides
        # grow.
        surprises += expected is not None and good == rows > expected * 33 / 32
    return good, bad


def _near(good: int | None, bad: int | None) -> bool:
    return good is None or bad is None or bad - good <= max(1, bad // 16)


def _next(good: int | None, bad: int | None, expected: float | None, surprises: int) -> int:
    """What to try next: just below where the edge is expected, or what would end the search where that is known
    already."""
    low, high = (good or 0) + 1, bad - 1 if bad else MOST_ROWS
    if expected is None:
        return min(2 * (good or 0), MOST_ROWS) if bad is None else bad // 2 if good is None else (good + bad) // 2
    just_below = int(expected * 0.99)
    if bad is not None and just_below >= bad:
        just_below = bad - max(1, bad // 16)
    elif just_below <= (good or 0) * 33 // 32:
        just_below = low + max(0, (good or 0) * 2**surprises // 16 - 1)
        just_below = just_below if bad is None or just_below < bad else (low + bad) // 2
    return min(max(just_below, low), high)


def _with_batch(config: TrainerConfig, rows: int) -> TrainerConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": rows})})
