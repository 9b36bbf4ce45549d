"""Simulates runs of the launcher and of the trainer in a hostile world, and replays one.

    python -m tests.simulation --side trainer --runs 10000          simulates many runs; prints broken promises
    python -m tests.simulation --side trainer --seed 4711 --trace   replays one run, line by line
    python -m tests.simulation --side trainer --seed 4711 --shrink  replays it with as few faults as still break it

A simulated run is a function of its seed. The first seed changes each day (UTC) and is printed, so that every day
simulates other runs. The exit code is 1 when a promise was broken.
"""

import argparse
import gc
import importlib
import os
import sys
import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

SEEDS_A_DAY = 1_000_000
FIRST_SEED = "SIMULATION_FIRST_SEED"  # the environment variable that replaces the day's first seed
_SHOWN_SEEDS = 5  # of each broken promise
_MOST_FAULTS = 24  # of a simulated run
_PROGRESS_SECONDS = 30.0

Broken = dict[str, list[tuple[int, str]]]
"""Broken promises: for each the seeds that broke it, and what was seen."""


def sides() -> list[str]:
    """Returns the names of the simulators: the folders beside this file that have a simulated_run.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/simulated_run.py"))


def load(side: str) -> Any:
    """Imports a simulator: `simulate(seed, trace=, without=)` returns `broken` (promises, observations) and `trace`."""
    return importlib.import_module(f"tests.simulation.{side}.simulated_run")


def first_seed(today: date | None = None) -> int:
    """Returns the first seed of a day (UTC, today unless given), or the environment's. Days share no seed."""
    if today is None and (chosen := os.environ.get(FIRST_SEED)):
        return int(chosen)
    return (today or datetime.now(UTC).date()).toordinal() % 1000 * SEEDS_A_DAY


def simulate_and_report(side: str, seeds: range) -> Broken:
    """Simulates a run for each seed. Prints the seeds, each broken promise with the command that replays it (to stderr
    at once), and the time taken."""
    print(f"{side}: simulating runs with seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    simulate = load(side).simulate
    gc.collect()
    gc.freeze()  # a run leaves little garbage; scanning all modules after each would take a third of the time
    gc.set_threshold(200_000, 20, 100)
    broken: Broken = {}
    began, cpu = time.monotonic(), time.process_time()
    shown = began
    for count, seed in enumerate(seeds):
        for promise, seen in simulate(seed).broken:
            found = broken.setdefault(promise, [])
            if not found or found[-1][0] != seed:
                found.append((seed, seen))
                replay = f"make simulate SIDE={side} SEED={seed}"
                print(f"{side}: seed {seed}: {promise}: {seen}\n  replay: {replay}", file=sys.stderr, flush=True)
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"{side}: {count + 1} runs, {sum(map(len, broken.values()))} broken", file=sys.stderr, flush=True)
    print(
        f"{side}: {len(seeds)} simulated runs in {time.monotonic() - began:.0f} s "
        f"({time.process_time() - cpu:.0f} s of the processor), {len(broken)} promises broken"
    )
    for promise, found in sorted(broken.items(), key=lambda item: -len(item[1])):
        print(f"  {promise}: {len(found)} runs, such as {', '.join(str(seed) for seed, _ in found[:_SHOWN_SEEDS])}")
        print(f"    {found[0][1][:600]}\n    make simulate SIDE={side} SEED={found[0][0]}")
    return broken


def shrink(side: str, seed: int) -> frozenset[int]:
    """Returns the numbers of the faults without which a run still breaks the promise that it broke first."""
    simulate = load(side).simulate
    without: frozenset[int] = frozenset()
    promise = simulate(seed).broken[0][0]
    for number in range(_MOST_FAULTS):
        fewer = without | {number}
        if promise in dict(simulate(seed, without=fewer).broken):
            without = fewer
    return without


def replay(side: str, seed: int, *, trace: bool, fewer: bool) -> int:
    """Simulates one run again and prints it. Returns the exit code."""
    simulate = load(side).simulate
    without = shrink(side, seed) if fewer and simulate(seed).broken else frozenset()
    result = simulate(seed, trace=trace or fewer, without=without)
    print(*result.trace, sep="\n")
    print(*(f"broken: {promise}: {seen}" for promise, seen in result.broken), sep="\n")
    return int(bool(result.broken))


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", choices=sides(), help="which simulator; both, unless given")
    parser.add_argument("--runs", type=int, default=1000, help="how many runs to simulate (1000)")
    parser.add_argument("--first", type=int, help=f"the first seed; the day's or ${FIRST_SEED}, unless given")
    parser.add_argument("--seed", type=int, help="simulate this run alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens, line by line")
    parser.add_argument("--shrink", action="store_true", help="with --seed: the same, without unnecessary faults")
    options = parser.parse_args(arguments)
    if options.seed is not None and options.side is None:
        parser.error("--seed needs --side")
    if options.seed is not None:
        return replay(options.side, options.seed, trace=options.trace, fewer=options.shrink)
    first = first_seed() if options.first is None else options.first
    seeds = range(first, first + options.runs)
    chosen = [options.side] if options.side else sides()
    broken = [simulate_and_report(side, seeds) for side in chosen]
    return int(any(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
