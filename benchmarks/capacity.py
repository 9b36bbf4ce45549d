"""Measures how much sooner a run ends that follows spot capacity than one that waits for one type in one zone.

    make benchmark NAME=capacity [ARGS="--weeks 150 --json"]

The weeks are simulated: each of six slices is available half of the time, for hours at a time, and a run is 12 hours of
work on a v4-16. The launcher's own code asks, waits and withdraws. The hours are medians to the last step. No policy is
faster than one that always has the fastest available slice and loses no work.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import finish, row
from launcher.emulator.api import stock
from launcher.emulator.state import EmulatorState
from tests.simulation.capacity.weeks import HOUR, WORK, Week, draw_stock, speed


def find_bound(seed: int) -> float:
    """Returns the hours in which no policy can do better: the fastest slice of the stock at every moment, at once and
    without any loss."""
    entries = stock.StockSection.model_validate(draw_stock(seed)).stock
    state = EmulatorState("", 0, "", "", "", 0.0, 0.0, stock=draw_stock(seed), stock_since=0.0)
    kinds = {(entry.zone, entry.accelerator_type, "spot"): speed(entry.accelerator_type) for entry in entries}
    now, left = 0.0, WORK * HOUR * speed("v4-16")
    while left > 0:
        left -= 60.0 * max((fast for kind, fast in kinds.items() if stock.available(state, *kind, now)), default=0.0)
        now += 60.0
    return now / HOUR


def main() -> None:
    """Plays the weeks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=150)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    seeds = range(options.weeks)
    one, many = (
        statistics.median(Week(seed, follows=follows, kills=False, trace=False).play().hours for seed in seeds)
        for follows in (False, True)
    )
    bound = statistics.median(map(find_bound, seeds))
    rows = [
        row("candidates", "hours", many, "one type in one zone", one, "less than one type"),
        row("the fastest available slice, no loss", "hours", bound, "one type in one zone", one, "no policy is faster"),
    ]
    finish("capacity", rows, options.json)


if __name__ == "__main__":
    main()
