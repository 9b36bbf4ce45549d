"""Plays lives of the launcher and of the trainer, and replays one.

    python -m tests.simulation --side trainer --lives 10000         many lives, and which promises were broken
    python -m tests.simulation --side trainer --seed 4711 --story   one life, line by line
    python -m tests.simulation --side trainer --seed 4711 --shrink  the same, with as few faults as still break it

A life is a function of its seed. The exit code is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SHOWN_SEEDS = 5  # of each broken promise
MOST_FAULTS = 24  # of a life
_PROGRESS_SECONDS = 30.0


def sides() -> list[str]:
    """The simulators that there are: folders beside this file with a life.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/life.py"))


def load(side: str) -> Any:
    """A simulator's module: `play(seed, story=, without=)` returns an object with `broken` (name of a promise, and what
    was seen) and `story` (lines)."""
    return importlib.import_module(f"tests.simulation.{side}.life")


def play_lives(side: str, seeds: Iterable[int], *, until_broken: bool = False) -> dict[str, list[tuple[int, str]]]:
    """Plays lives, and returns the broken promises with the seeds that broke them, and how."""
    module = load(side)
    gc.collect()
    gc.freeze()  # a life leaves little that is collected; looking at all modules after each takes a third of the time
    gc.set_threshold(200_000, 20, 100)
    broken: dict[str, list[tuple[int, str]]] = {}
    shown = time.monotonic()
    for count, seed in enumerate(seeds):
        for promise, seen in module.play(seed).broken:
            lives = broken.setdefault(promise, [])
            if not lives or lives[-1][0] != seed:
                lives.append((seed, seen))
                print(f"{side}: life {seed}: {promise}: {seen}", file=sys.stderr, flush=True)
        if broken and until_broken:
            break
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"{side}: {count + 1} lives, {sum(map(len, broken.values()))} broken", file=sys.stderr, flush=True)
    return broken


def shrink(side: str, seed: int) -> frozenset[int]:
    """The numbers of the faults without which a life still breaks the promise that it broke first."""
    play = load(side).play
    without: frozenset[int] = frozenset()
    promise = play(seed).broken[0][0]
    for number in range(MOST_FAULTS):
        fewer = without | {number}
        if promise in dict(play(seed, without=fewer).broken):
            without = fewer
    return without


def replay(side: str, seed: int, *, story: bool, fewer: bool) -> int:
    """One life again."""
    play = load(side).play
    without = shrink(side, seed) if fewer and play(seed).broken else frozenset()
    life = play(seed, story=story or fewer, without=without)
    print(*life.story, sep="\n")
    print(*(f"broken: {promise}: {seen}" for promise, seen in life.broken), sep="\n")
    return int(bool(life.broken))


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--side", choices=sides(), help="which simulator; both, unless given")
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=Path, help="a JSON file: the lives to play, instead of --first and --lives")
    parser.add_argument("--seed", type=int, help="play this life alone")
    parser.add_argument("--story", action="store_true", help="print what happens in it, line by line")
    parser.add_argument("--shrink", action="store_true", help="the same, without the faults that it does not need")
    parser.add_argument("--until-broken", action="store_true", help="stop at the first broken promise")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        if options.side is None:
            parser.error("--seed needs --side")
        return replay(options.side, options.seed, story=options.story, fewer=options.shrink)
    failed = False
    for side in [options.side] if options.side else sides():
        began, cpu = time.monotonic(), time.process_time()
        seeds: Sequence[int] = range(options.first, options.first + options.lives)
        if options.seeds:
            seeds = json.loads(options.seeds.read_text())
        broken = play_lives(side, seeds, until_broken=options.until_broken)
        last = min((lives[0][0] for lives in broken.values()), default=seeds[-1] if seeds else 0)
        played = seeds.index(last) + 1 if options.until_broken and seeds else len(seeds)
        failed = failed or bool(broken)
        if options.json:
            print(json.dumps({"side": side, "lives": played, "broken": broken}))
            continue
        print(
            f"{side}: {played} lives in {time.monotonic() - began:.0f} s "
            f"({time.process_time() - cpu:.0f} s of the processor), {len(broken)} promises broken"
        )
        for promise, lives in sorted(broken.items(), key=lambda item: -len(item[1])):
            print(f"  {promise}: {len(lives)} lives, such as {', '.join(str(seed) for seed, _ in lives[:SHOWN_SEEDS])}")
            print(f"    {lives[0][1][:600]}")
            print(f"    python -m tests.simulation --side {side} --seed {lives[0][0]} --story")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
