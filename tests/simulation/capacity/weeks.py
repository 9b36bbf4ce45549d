"""Weeks of capacity: a run that follows the stock of several zones, or waits for one type in its zones in turn.

Google is the launcher's simulation of it, with a stock that a seed draws and spot slices that are taken when it falls.
The launcher's own `candidates.create` asks, waits and withdraws; training is a number of steps that a slice does in its
time, and loses since its last checkpoint. Commands are killed at writes of the record of requests, and started again.

    python -m tests.simulation.capacity.weeks 200      both policies and the bound: median hours to the last step
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from launcher.config import Config, load
from launcher.costs import per_hour
from launcher.emulator.api import stock
from launcher.emulator.state import EmulatorState
from launcher.errors import LaunchError
from launcher.gcloud.errors import Stockout
from launcher.tpu_vm import candidates, deletion, requests
from launcher.tpu_vm.requests import RequestRecord, create_only
from tests.simulation.launcher.machine import make_machine
from tests.simulation.launcher.world import Actor, Laptop, World
from tests.simulation.scheduler import Event, Process, Scheduler, Stuck
from training.accelerators import accelerator

HOUR, WEEK = 3600.0, 7 * 24 * 3600.0
_PRICE_LIMIT = 25.0  # dollars an hour: room for all but one
_WORK = 12.0  # hours on a v4-16
_START, _CHECKPOINT = 120.0, 600.0  # seconds from READY to the first step; between two checkpoints
_LOOK = 30.0  # seconds between two looks at the slice
_SLICE = "{name: bert, accelerator_type: v4-16, capacity: spot, stockout_minutes: 20000, create_minutes: 60"
_FOLLOW = (
    ", candidates: [{accelerator_type: v5litepod-8, zones: [us-central1-a, us-west4-a]}, {accelerator_type: v4-8}, "
    f"{{accelerator_type: v3-8, zones: [us-central1-a, europe-west4-a]}}], price_limit: {_PRICE_LIMIT}"
)


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]
    trace: list[str]
    hours: float  # to the last step; infinite if it was not reached within four weeks


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tpu-launch-weeks-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


@functools.cache
def make_config(follows: bool) -> Config:
    """Returns the configuration of a policy: with candidates, or with one type."""
    path = _folder() / "run.yaml"
    more = _FOLLOW if follows else ""
    path.write_text(f"project: p\nzone: us-central2-b\nslice: {_SLICE}{more}}}\nrun: {{command: [train]}}\n")
    return load(path)


def draw_stock(seed: int) -> dict[str, object]:
    """Draws how many slices of each candidate there are: none or one, for hours at a time."""
    rng = random.Random(f"stock {seed}")
    entries = [
        {
            "zone": candidate.zone,
            "accelerator_type": candidate.accelerator_type,
            "capacity": "spot",
            "random": {"every": rng.uniform(1.0, 10.0) * HOUR, "most": 1},
        }
        for candidate in make_config(True).candidates
    ]
    return {"seed": seed, "speed": 1.0, "stock": entries}


class Week:
    """One run, from its first request to its last step."""

    def __init__(self, seed: int, *, follows: bool, kills: bool, trace: bool) -> None:
        self.config, self.follows = make_config(follows), follows
        self.scheduler = Scheduler(random.Random(f"tasks {seed}"), preempt=0.03)
        self.scheduler.trace = [] if trace else None
        self.world = World(self.scheduler, random.Random(f"world {seed}"), [], [])
        self.world.price_limit = _PRICE_LIMIT if follows else None
        self.world.google.state.stock = draw_stock(seed)
        self.world.google.state.stock_since = self.world.google._now
        self.rng = random.Random(f"kills {seed}")
        self.kills = kills
        self.laptop = Laptop("ann", "ann", _folder() / "ann")
        self.laptop.at_work = lambda: self.process.alive
        self.world.laptops = [self.laptop]
        self.left = _WORK * HOUR * _speed("v4-16")
        self.deleted, self.over, self.hours = False, False, float("inf")
        self.process = Process("tpu-launch")

    @mock.patch.dict(os.environ)
    def play(self) -> Result:
        shutil.rmtree(self.laptop.home, ignore_errors=True)
        self.laptop.home.mkdir(parents=True)
        os.environ["TPU_LAUNCH_HOME"] = str(self.laptop.home)
        requests.create_only = self._write
        try:
            self.scheduler.spawn(self._take_what_falls, name="stock", process=self.scheduler.world)
            self.scheduler.spawn(self._user, name="user", process=self.scheduler.world)
            self.scheduler.run(lambda: self.over, seconds=6 * WEEK, steps=20_000_000)
            self._check_end()
        except Stuck as stuck:
            self.world.break_promise("every wait ends", str(stuck)[:1000])
        finally:
            requests.create_only = create_only
            self.scheduler.close()
        for task in self.scheduler.crashed:
            self.world.break_promise("every ending has a documented code", f"{task} raised {task.error!r}")
        return Result(self.world.record.broken, self.scheduler.trace or [], self.hours)

    def _take_what_falls(self) -> None:
        google = self.world.google
        while not self.over:
            self.scheduler.sleep(60.0)
            for node in stock.taken(google.state, google._now):
                google.preempt(google.slices[node.name], 0.0)

    def _user(self) -> None:
        """Starts the launcher again when it was killed, until the run is over."""
        while not self.deleted and self.scheduler.now < 4 * WEEK:
            self.process, ended = Process("tpu-launch"), Event(self.scheduler, "the launcher's end")
            self.scheduler.spawn(self._launcher, ended, name="main", process=self.process)
            while self.process.alive and not ended.wait(60.0):
                pass
            self.scheduler.sleep(self.rng.uniform(5.0, 120.0))
        self.over = True

    def _launcher(self, ended: Event) -> None:
        """Gets a slice, trains on it until it is taken away, and again; deletes it after the last step."""
        actor = Actor(self.laptop, "up", self.process)
        machine = make_machine(self.world, actor, random.Random(self.rng.random()))
        say = self.scheduler.note
        while self.left > 0:
            try:
                state = candidates.create(self.config, say, machine, machine)
                self._train(state.accelerator_type, machine)
            except Stockout:
                continue
            except LaunchError as error:
                say(f"error: {error}")
                self.scheduler.sleep(60.0)
        self.hours = min(self.hours, self.scheduler.now / HOUR)
        deletion.delete(self.config, say, machine)
        self.deleted = True
        ended.set()

    def _train(self, name: str, machine: object) -> None:
        """Does steps until the slice is taken away or all are done; what follows the last checkpoint is lost."""
        self.scheduler.sleep(_START)
        done = 0.0
        while self.left > done:
            ours = [node for node in self.world.google.slices.values() if node.state == "READY"]
            if not any(node.node.resource["acceleratorType"] == name for node in ours):
                kept = _CHECKPOINT * _speed(name)
                self.left -= done // kept * kept
                return
            self.scheduler.sleep(_LOOK)
            done += _LOOK * _speed(name)
        self.left = 0.0

    def _write(self, path: Path, text: str) -> bool:
        """Writes to the record; now and then the launcher is killed before or after that."""
        kills = self.kills and self.rng.random() < 0.02
        if kills and self.rng.random() < 0.5:
            self._kill()
        written = create_only(path, text)
        if kills:
            self._kill()
        return written

    def _kill(self) -> None:
        if self.process.alive:
            self.world.note("the launcher is killed")
            self.scheduler.kill(self.process)

    def _check_end(self) -> None:
        if self.left > 0:
            return
        for node in self.world.google.slices.values():
            if node.state != "DELETING":
                self.world.break_promise("nothing is left at the end", f"{node}")
        for request in RequestRecord(self.config).open():
            self.world.break_promise("every request is withdrawn or used", f"{request}")


def _speed(name: str) -> float:
    """Returns how fast a slice trains: its peak."""
    size = accelerator(name)
    return size.generation.bf16_flops_per_chip * size.chips


def simulate(seed: int, *, trace: bool = False, without: Collection[int] = ()) -> Result:
    """Simulates a run that follows capacity, with kills; `without` is not used: there are no faults to leave out."""
    return Week(seed, follows=True, kills=True, trace=trace).play()


def bound(seed: int) -> float:
    """Returns the hours in which no policy can do better: the fastest slice of the stock at every moment, at once and
    without any loss."""
    entries = stock.StockSection.model_validate(draw_stock(seed)).stock
    state = EmulatorState("", 0, "", "", "", 0.0, 0.0, stock=draw_stock(seed), stock_since=0.0)
    kinds = {(entry.zone, entry.accelerator_type, "spot"): _speed(entry.accelerator_type) for entry in entries}
    now, left = 0.0, _WORK * HOUR * _speed("v4-16")
    while left > 0:
        left -= 60.0 * max((speed for kind, speed in kinds.items() if stock.available(state, *kind, now)), default=0.0)
        now += 60.0
    return now / HOUR


def main() -> None:
    """Prints the hours to the last step of both policies on the same stocks, and the bound."""
    seeds = range(int(sys.argv[1]))
    best = statistics.median(bound(seed) for seed in seeds)
    one = [Week(seed, follows=False, kills=False, trace=False).play().hours for seed in seeds]
    many = [Week(seed, follows=True, kills=False, trace=False).play().hours for seed in seeds]
    print(f"{len(seeds)} stocks: one type {statistics.median(one):.1f} h, candidates {statistics.median(many):.1f} h")
    print(f"ratio of medians {statistics.median(many) / statistics.median(one):.2f}; limit ${_PRICE_LIMIT} an hour")
    print(f"bound {best:.1f} h, ratio {best / statistics.median(one):.2f}: the fastest slice of the stock, at no loss")
    print({str(item): per_hour(item.accelerator_type, item.zone, "spot") for item in make_config(True).candidates})


if __name__ == "__main__":
    main()
