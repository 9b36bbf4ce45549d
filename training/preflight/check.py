"""The procedure: trace what the run would run, compile it for each accelerator, and search for the largest batch that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from training.accelerators import Accelerator
from training.config import TrainerConfig, batch_mistake
from training.errors import BadInput
from training.preflight import compiler, report
from training.preflight.compiler import Compiled, Refused
from training.preflight.programs import Traced, trace
from training.preflight.report import AcceleratorResult, Largest, Report
from training.preflight.shapes import Facts, Graph, graphs

MOST_ROWS = 1 << 14  # a device

Say = Callable[[str], None]


def check(config: TrainerConfig, facts: Facts, targets: Sequence[Accelerator], *, max_batch: bool, say: Say) -> Report:
    """Raises BadInput for a batch that can't be divided, NoCompiler, and Untraceable or DataDependent for a step that is no single program."""
    compiler.require()
    mistakes = [f"{each.name}: {mistake}" for each in targets if (mistake := batch_mistake(config, each.hosts, each.devices))]
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
            result = replace(result, max_batch=_search(config, facts, target, result.graphs[0].fits, say))
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
        report.refused(each, found, seconds) if isinstance(found, str) else report.fitting(each, found, target, code - found.code_bytes)
        for each, found, seconds in outcomes
    ]
    return AcceleratorResult(target.name, target.devices, target.hosts, target.generation.usable_hbm_bytes_per_device, results)


def _advised(config: TrainerConfig, facts: Facts, result: AcceleratorResult, target: Accelerator, say: Say) -> AcceleratorResult:
    """With what computing whole layers again would change, where the longest training batch does not fit."""
    longest = result.graphs[0]
    if longest.fits or config.backend != "torch-xla" or config.train.remat == "layers":
        return result
    less = config.model_copy(update={"train": config.train.model_copy(update={"remat": "layers"})})
    say(f"it does not fit: tracing it with train.remat: layers for {target.name}")
    try:
        found = compiled(trace(less, facts, [Graph(longest.kind, longest.rows, longest.length)], target.devices), target, say).graphs[0]
    except BadInput:  # a model of a family that can't be computed again
        return result
    needed = f"would need {report.gib(found.needed)}" if found.needed else "would not compile either"
    advised = replace(longest, reason=f"{longest.reason}; with train.remat: layers it {needed}{' and fit' if found.fits else ''}")
    return replace(result, graphs=[advised, *result.graphs[1:]])


def _search(config: TrainerConfig, facts: Facts, target: Accelerator, fits_now: bool, say: Say) -> Largest:
    """The largest training batch, over rows a device, by doubling or halving from the file's batch and then by bisection to within 1/16."""
    step = target.devices * config.train.gradient_accumulation
    tried = 0

    def fits(rows: int) -> bool:
        nonlocal tried
        tried += 1
        graph = Graph("training", rows * step, max(facts.lengths))
        one = trace(_with_batch(config, rows * step), facts, [graph], target.devices)[0]
        say(f"compiling {graph} for {target.name}")
        try:
            return report.fitting(one, compiler.compile(one.program, target), target, 0).fits
        except Refused as error:
            say(f"{graph}: {report.reason_of(str(error))[1]}")
            return False

    found = bisect(fits, config.train.global_batch_size // step, fits_now)
    good, bad = found
    return Largest(
        good * step if good else None, bad * step if bad else None, good * config.train.gradient_accumulation if good else None, tried
    )


def bisect(fits: Callable[[int], bool], start: int, start_fits: bool) -> tuple[int | None, int | None]:
    """(largest that fits, smallest that was refused). `start` is known already; their difference is at most 1/16 of the larger, or 1."""
    good, bad = (start, None) if start_fits else (None, start)
    while bad is None and good is not None and good < MOST_ROWS:
        good, bad = (good * 2, None) if fits(good * 2) else (good, good * 2)
    while good is None and bad is not None and bad > 1:
        half = bad // 2
        good, bad = (half, bad) if fits(half) else (None, half)
    while good is not None and bad is not None and bad - good > max(1, bad // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


def _with_batch(config: TrainerConfig, rows: int) -> TrainerConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": rows})})
