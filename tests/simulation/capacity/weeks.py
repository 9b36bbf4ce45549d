"""Weeks of capacity: a run that follows the stock of several zones, or waits for one type in its zones in turn.

Google is the launcher's simulation of it, with a stock that a seed draws and spot slices that are taken when it falls.
The launcher's own `candidates.create` asks, waits and withdraws; training is a number of steps that a slice does in its
time, and loses since its last checkpoint. With kills, two people have a run each, and each run has two supervisors on
machines of their own, which share lease, ledger and requests in a bucket; they are killed at writes, and started again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from unittest import mock

from launcher.config import Config
from launcher.emulator.api import stock
from launcher.errors import LaunchError
from launcher.gcloud import Stockout
from launcher.run import bucket, session, supervisor
from launcher.run.events import AttemptBegan
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.session import begin_run, import_run
from launcher.run.specification import Specification
from launcher.tpu_vm import candidates, deletion, requests
from launcher.tpu_vm.requests import RequestRecord, create_only
from launcher.workstation import CheckedClock, Workstation
from tests.simulation.launcher import simulated_run
from tests.simulation.launcher.bucket import CloudStorage
from tests.simulation.launcher.machine import make_machine
from tests.simulation.launcher.world import Actor, Laptop, World
from tests.simulation.scheduler import Event, Process, Scheduler, Stuck
from training.accelerators import accelerator
from training.storage import Stat

T = TypeVar("T")

HOUR, WEEK = 3600.0, 7 * 24 * 3600.0
_PRICE_LIMIT = 25.0  # dollars an hour: room for all but one
WORK = 12.0  # hours on a v4-16
_WORK_WITH_KILLS = 3.0
_START, _CHECKPOINT = 120.0, 600.0  # seconds from READY to the first step; between two checkpoints
_LOOK = 30.0  # seconds between two looks at the slice
_SLICE = "accelerator_type: v4-16, capacity: spot, stockout_minutes: 20000, create_minutes: 60"
_FOLLOW = (
    ", candidates: [{accelerator_type: v5litepod-8, zones: [us-central1-a, us-west4-a]}, {accelerator_type: v4-8}, "
    f"{{accelerator_type: v3-8, zones: [us-central1-a, europe-west4-a]}}], price_limit: {_PRICE_LIMIT}"
)


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]
    hours: float  # to the last step; infinite if it was not reached within four weeks


def make_config(follows: bool, name: str = "bert") -> Config:
    """Returns the configuration of a policy, for a slice of a name: with candidates, or with one type."""
    slice_ = f"{{name: {name}, {_SLICE}{_FOLLOW if follows else ''}}}"
    return simulated_run.make_config(f"project: p\nzone: us-central2-b\nslice: {slice_}\nrun: {{command: [train]}}\n")


def draw_stock(seed: int) -> dict[str, object]:
    """Draws how many slices of each candidate there are: none or one, for hours at a time."""
    rng = random.Random(f"stock {seed}")
    entries = []
    for candidate in make_config(True).candidates:
        place = {"zone": candidate.zone, "accelerator_type": candidate.accelerator_type, "capacity": "spot"}
        entries.append({**place, "random": {"every": rng.uniform(1.0, 10.0) * HOUR, "most": 1}})
    return {"seed": seed, "speed": 1.0, "stock": entries}


class Storage(CloudStorage):
    """Answers at once, because a week has thousands of requests; `written` makes a write, and may kill its process."""

    def __init__(self, world: World, written: Callable[[str, Callable[[], Stat]], Stat]) -> None:
        super().__init__(world, 0, lambda: None)
        self._written = written

    def _request(self, effect: Callable[[], T]) -> T:
        return effect()

    def write(self, url: str, data: bytes | memoryview, generation: int | None) -> Stat:
        return self._written(url, functools.partial(super().write, url, data, generation))


class Person:
    """One user's run: its machines, and what is left to train."""

    def __init__(self, week: Week, user: str, machines: int) -> None:
        self.user, self.config = user, make_config(week.follows, week.name_of(user))
        self.laptops = [
            Laptop(f"{user} {number}", user, simulated_run.folder() / f"{user}-{number}") for number in range(machines)
        ]
        self.acting: Process | None = None  # of the supervisor that has the lease
        self.left = (_WORK_WITH_KILLS if week.kills else WORK) * HOUR * speed("v4-16")
        self.deleted, self.hours = False, float("inf")
        self.run_id = f"run-of-{user}"
        self.url = f"gs://bucket/runs/{self.run_id}" if machines > 1 else ""
        for laptop in self.laptops:
            laptop.at_work = lambda: self.acting is not None and self.acting.alive


class Week:
    """One run, from its first request to its last step; with kills the runs of two people, two supervisors each."""

    def __init__(self, seed: int, *, follows: bool, kills: bool, trace: bool) -> None:
        self.follows = follows
        self.scheduler = Scheduler(random.Random(f"tasks {seed}"), preempt=0.03)
        self.scheduler.trace = [] if trace else None
        self.world = World(self.scheduler, random.Random(f"world {seed}"), make_config(follows))
        self.world.google.state.stock = draw_stock(seed)
        self.world.google.state.stock_since = self.world.google._now
        self.rng = random.Random(f"kills {seed}")
        self.kills = kills
        self.same_name = kills and self.rng.random() < 0.2
        self.people = [Person(self, user, 1 + kills) for user in ("ann", "bob")[: 1 + kills]]
        self.world.laptops = [laptop for person in self.people for laptop in person.laptops]
        self.storage = Storage(self.world, self._write_object)

    def name_of(self, user: str) -> str:
        """Returns the name of a user's slice."""
        return "bert" if user == "ann" or self.same_name else user

    @mock.patch.dict(os.environ)
    def play(self) -> Result:
        with (
            mock.patch.object(requests, "create_only", self._write),
            mock.patch.object(bucket, "RENEW_SECONDS", 14.0 if self.kills else bucket.RENEW_SECONDS),
            mock.patch.object(candidates, "_POLL_SECONDS", 4.0 if self.kills else candidates._POLL_SECONDS),
            self.storage.install(),
        ):
            try:
                for person in self.people:
                    self._begin(person)
                self.scheduler.spawn(self._take_what_falls, name="stock", process=self.scheduler.world)
                self.scheduler.run(lambda: all(map(self._is_over, self.people)), seconds=6 * WEEK, steps=20_000_000)
                for person in self.people:
                    self._check_end(person)
            except Stuck as stuck:
                self.world.break_promise("every wait ends", str(stuck)[:1000])
            finally:
                self.scheduler.close()
        for task in self.scheduler.crashed:
            self.world.break_promise("every ending has a documented code", f"{task} raised {task.error!r}")
        return Result(self.world.record.broken, self.people[0].hours)

    def _is_over(self, person: Person) -> bool:
        return person.deleted or self.scheduler.now > 4 * WEEK

    def _begin(self, person: Person) -> None:
        """Makes the person's folders, the run in the first one and in the bucket, and starts its supervisors."""
        for laptop in person.laptops:
            shutil.rmtree(laptop.home, ignore_errors=True)
            laptop.home.mkdir(parents=True)
        if person.url:
            machine = make_machine(self.world, Actor(person.laptops[0], "run", Process("run")), self.rng)
            config, place = person.config, f"{person.url}/{bucket.FOLDER}"
            name = config.slice.name
            record = RunRecord(person.run_id, "p", config.zone, name, "", 0.0, "tpu-vm", place, person.user)
            spec = Specification(run="", provider="tpu-vm", file="f.yaml", configuration=config.document.value)
            begin_run(person.laptops[0].home, machine, record, config.document.dump(), spec, None).publish()
        for laptop in person.laptops:
            self.scheduler.spawn(self._supervise, person, laptop, name="again", process=self.scheduler.world)

    def _take_what_falls(self) -> None:
        google = self.world.google
        while True:
            self.scheduler.sleep(60.0)
            for node in stock.taken(google.state, google._now):
                google.preempt(google.slices[node.name], 0.0)

    def _supervise(self, person: Person, laptop: Laptop) -> None:
        """Starts the launcher whenever no machine has the run's lease, and rarely, as a user may, although one has."""
        while not self._is_over(person):
            found = bucket.RunBucket.of_run(person.url).read_lease() if person.url else None
            if found is None or not found.is_live or self.rng.random() < 0.01:
                process, ended = Process("tpu-launch"), Event(self.scheduler, "the launcher's end")
                process.enter = lambda: os.environ.update(TPU_LAUNCH_HOME=str(laptop.home))
                self.scheduler.spawn(self._launcher, person, laptop, ended, name="main", process=process)
                while process.alive and not ended.wait(60.0):
                    pass
                self.scheduler.sleep(self.rng.uniform(5.0, 120.0))
            else:
                self.scheduler.sleep(supervisor.POLL_SECONDS)

    def _launcher(self, person: Person, laptop: Laptop, ended: Event) -> None:
        """Gets a slice, trains on it until it is taken away, and again; deletes it after the last step."""
        process, say = self.scheduler.current.process, self.scheduler.note
        machine = make_machine(self.world, Actor(laptop, "up", process), random.Random(self.rng.random()))
        machine = replace(machine, exit=lambda code: self.scheduler.kill(process))
        try:
            with contextlib.ExitStack() as stack:
                patient, ledger = machine, None
                if person.url:
                    ledger = import_run(laptop.home, machine, person.url)
                    stack.enter_context(session.supervising(ledger, machine, say))
                    machine = replace(machine, clock=CheckedClock(machine.clock, ledger.confirm))
                person.acting = process
                if ledger is not None:
                    candidates.withdraw_unused(person.config, say, patient)
                while person.left > 0:
                    self._attempt(person, machine, patient, ledger)
                person.hours = min(person.hours, self.scheduler.now / HOUR)
                deletion.delete(person.config, say, patient)
                person.deleted = True
        except LaunchError as error:
            say(f"error: {error}")
        ended.set()

    def _attempt(self, person: Person, machine: Workstation, patient: Workstation, ledger: Ledger | None) -> None:
        try:
            state = candidates.create(person.config, self.scheduler.note, machine, patient)
            if ledger is not None:
                ledger.append(AttemptBegan(ledger.state.attempt + 1))
            self._train(person, state.accelerator_type)
        except Stockout:
            pass
        except LaunchError as error:
            self.scheduler.note(f"error: {error}")
            machine.clock.sleep(60.0)

    def _train(self, person: Person, name: str) -> None:
        """Does steps until the slice is taken away or all are done; what follows the last checkpoint is lost."""
        self.scheduler.sleep(_START)
        done, kept = 0.0, _CHECKPOINT * speed(name)
        while person.left > done:
            ours = [node for node in self.world.google.slices.values() if node.creator == person.user]
            types = [node.node.resource["acceleratorType"] for node in ours if node.state == "READY"]
            if name not in types:
                return
            self.scheduler.sleep(_LOOK)
            done += _LOOK * speed(name)
            if done >= kept:
                person.left, done = person.left - kept, done - kept
        person.left = 0.0

    def _write(self, path: Path, text: str) -> bool:
        """Writes to the record of a machine, where its process may be killed."""
        return self._written(lambda: create_only(path, text), 0.04)

    def _write_object(self, url: str, write: Callable[[], Stat]) -> Stat:
        """Writes to the bucket; a lease is written thousands of times."""
        if self.scheduler.current is not None:
            self.scheduler.sleep(self.rng.uniform(0.02, 0.2))
        return self._written(write, 0.001 if url.endswith("lease.json") else 0.04)

    def _written(self, write: Callable[[], T], probability: float) -> T:
        """Calls a write; now and then the process is killed before or after it."""
        kills = self.kills and self.scheduler.current is not None and self.rng.random() < probability
        if kills and self.rng.random() < 0.5:
            self._kill()
        written = write()
        if kills:
            self._kill()
        return written

    def _kill(self) -> None:
        process = self.scheduler.current.process
        if process is not self.scheduler.world:
            self.world.note("the launcher is killed")
            self.scheduler.kill(process)

    def _check_end(self, person: Person) -> None:
        if person.left > 0:
            if self.kills and not self.same_name:
                self.world.break_promise("the run finishes when there is stock", f"{person.left} is left")
            return
        for node in self.world.google.slices.values():
            if node.creator == person.user and node.state != "DELETING":
                self.world.break_promise("nothing is left at the end", f"{node}")
        os.environ["TPU_LAUNCH_HOME"] = str(person.laptops[0].home)
        record = RequestRecord(person.config)
        record.pull()
        for request in record.open():
            self.world.break_promise("every request is withdrawn or used", f"{request}")


def speed(name: str) -> float:
    """Returns how fast a slice trains: its peak."""
    size = accelerator(name)
    return size.generation.bf16_flops_per_chip * size.chips


def simulate(seed: int) -> Result:
    """Simulates two runs that follow capacity, with kills."""
    return Week(seed, follows=True, kills=True, trace=False).play()
