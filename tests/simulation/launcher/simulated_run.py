"""One simulated run of the launcher: what users do, in which world, and what holds at its end. A seed decides all."""

import contextlib
import errno
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TypeVar
from unittest import mock

from launcher.config import Config, load
from launcher.emulator.api.catalogue import ApiError
from launcher.errors import Exit
from launcher.home import write_whole
from launcher.run import ledger, logs, supervise
from launcher.run.events import RunEvent
from launcher.run.ledger import Ledger
from launcher.run.session import list_runs
from launcher.tpu_vm import host_scripts, provider, requests
from launcher.tpu_vm.commands import create_command, create_request_command, node_command
from launcher.tpu_vm.requests import create_only
from launcher.tpu_vm.slices import make_labels
from launcher.workstation import Owner, hash_account
from tests import gcloud_commands
from tests.simulation.launcher import claims, promises, records, scenarios, slice_promises
from tests.simulation.launcher.bucket import CloudStorage
from tests.simulation.launcher.cluster import Cluster
from tests.simulation.launcher.commands import Command
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SECRET, SUPERVISORS
from tests.simulation.launcher.scenarios import Action
from tests.simulation.launcher.world import Laptop, World, slices_of
from tests.simulation.scheduler import Scheduler, Stuck
from training.accelerators import accelerator

T = TypeVar("T")

LONGEST_RUN = 20 * 3600.0  # virtual seconds: every wait ends long before
LONGEST_LOOK = 900.0  # seconds for which a user watches logs: longer than any program runs
_STEPS = 80_000


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]  # promises, and what was seen
    trace: list[str]


@functools.cache
def folder() -> Path:
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="tpu-launch-simulation-", dir=parent))


@functools.cache
def make_config(text: str, provider: str = "tpu-vm") -> Config:
    """Returns the configuration in a file. Cached: reading YAML takes as long as much of a simulated run."""
    path = folder() / "run.yaml"
    path.write_text(text)
    return replace(load(path), provider=provider)


class SimulatedRun:
    def __init__(self, seed: int, *, trace: bool = False, without: Collection[int] = ()) -> None:
        """`trace`: whether to write down what happens; `without`: indices of faults, then actions, to leave out."""
        self.seed, self.scenario = seed, (drawn := scenarios.draw(seed))
        self.faults = [fault for number, fault in enumerate(drawn.faults) if number not in without]
        first = len(drawn.faults)
        self.actions = [each for number, each in enumerate(drawn.actions, first) if number not in without]
        self.full_disk = any(fault.kind == "full" for fault in self.faults)
        # Longer than the launcher waits to write lines and events.
        self.loses_by_its_disk = any(fault.kind == "full" and fault.seconds > 40.0 for fault in self.faults)
        self.kill_at = drawn.kill_at
        self.config = make_config(json.dumps(drawn.file), "gke" if drawn.gke else "tpu-vm")
        self.races = bool(self.config.slice.candidates)
        self.scheduler = Scheduler(random.Random(f"tasks {seed}"), preempt=0.03)
        self.scheduler.trace = [] if trace else None
        self.world = World(self.scheduler, random.Random(f"world {seed}"), self.config, self.faults, drawn.plans)
        self.world.in_bucket = drawn.in_bucket
        self.break_promise = self.world.break_promise
        self.world.on_creation = functools.partial(slice_promises.creation_is_due, self)
        self.world.on_deletion = functools.partial(slice_promises.deletion_follows_a_stop, self)
        self.world.storage = CloudStorage(self.world, seed, lambda: getattr(self.running_command(), "laptop", None))
        if drawn.env_file:
            self.world.env_file = folder() / "secrets.env"
            self.world.env_file.write_text(f"HF_TOKEN={SECRET}\nexport OF_FILE='a b'\n")
        if drawn.overlay:
            (folder() / "code").mkdir(exist_ok=True)
            (folder() / "code" / "main.py").write_text("print()\n")
            self.world.overlay = f"{folder() / 'code'}=/opt/code"
        if drawn.gke:
            self.world.cluster = Cluster(self.world, accelerator(self.config.slice.accelerator_type).hosts)
        self.rng = random.Random(f"people {seed}")
        supervise.OBSERVE_EVERY = drawn.observe_every
        supervise._INBOX_SECONDS, supervise._LONG_TURN_SECONDS = drawn.observe_every / 2, 1.0 + drawn.observe_every / 2
        host_scripts.LOG_BYTES, provider._TAIL = drawn.page
        self.commands: list[Command] = []
        self.world.command, self.world.finish = self.command, self.finish
        self.ann = Laptop("ann", "ann", folder() / "ann", refused_from=drawn.refused_from)
        self.bob = Laptop("bob", "bob", folder() / "bob")
        self.second = Laptop("ann-2", "ann", folder() / "ann-2")  # another workstation of ann's
        self.world.laptops = [self.ann, self.bob, self.second]
        for laptop in self.world.laptops:
            laptop.at_work = functools.partial(self._is_at_work, laptop)
        self.homes = [self.ann.home, self.second.home]
        self.writes = 0  # to ledgers and to the record of requests
        self.leftover_zone = self.config.zone  # of the slice that exists before ann begins
        self.main: Command | None = None  # the newest command of ann's first terminal
        self.main_over = False

    @mock.patch.dict(os.environ)
    def play(self) -> Result:
        for laptop in self.world.laptops:
            shutil.rmtree(laptop.home, ignore_errors=True)
            laptop.home.mkdir(parents=True)
        uninstall = self.world.cluster.install() if self.world.cluster is not None else lambda: None
        self.scheduler.note(f"{self.scenario}")
        self.scheduler.note(f"faults: {'; '.join(map(str, self.faults)) or 'none'}")
        writes = mock.patch.object(ledger, "write_whole", self._write_event)
        lines = mock.patch.object(logs, "write_whole", self._write_lines)
        write_request = lambda path, text: self._write(lambda: create_only(path, text), lambda: None)  # noqa: E731
        asks = mock.patch.object(requests, "create_only", write_request)
        append = Ledger.append

        def check_and_append(found: Ledger, event: RunEvent, **options: float) -> None:
            records.check_event(self, found, event)
            append(found, event, **options)

        checks = mock.patch.object(Ledger, "append", check_and_append)
        try:
            with writes, lines, asks, checks, self.world.storage.install():
                self.scheduler.spawn(self._live, name="ann's plan", process=self.scheduler.world)
                self.scheduler.run(lambda: self.main_over, seconds=LONGEST_RUN, steps=_STEPS)
                promises.check_end(self)
        except Stuck as stuck:
            self.world.break_promise("every wait ends", str(stuck)[:2000])
        finally:
            uninstall()
            self.scheduler.close()
        for task in self.scheduler.crashed:
            self.world.break_promise("every ending has a documented code", f"{task} raised {task.error!r}")
        return Result(self.world.record.broken, self.scheduler.trace or [])

    def _is_at_work(self, laptop: Laptop) -> int:
        here = [each for each in self.commands if each.laptop is laptop and each.name in ("up", *SUPERVISORS, "down")]
        return sum(each.code is None and not each.killed and not each.process.frozen for each in here)

    def ledgers(self) -> list[Ledger]:
        if not self.commands:
            return []
        found = [ledger for home in self.homes for ledger in list_runs(home, self.commands[0].machine)]
        found.sort(key=lambda ledger: len(ledger.entries()))  # the copy that was pulled last counts
        return [*{ledger.run_id: ledger for ledger in found}.values()]

    def is_undisturbed(self, until: float) -> bool:
        """Returns whether, until a moment, users only looked at runs, and nothing failed."""
        disturbs = any(action.kind.split()[-1] not in ("logs", "status", "explain", "exec") for action in self.actions)
        disturbs |= any(stop.at < until for stop in self.world.record.stops)
        return not (disturbs or self.faults or self.kill_at)

    # -- what users do -----------------------------------------------------------------------------------------------

    def command(self, name: str, laptop: Laptop | None = None, *, new: bool = False) -> Command:
        # Every command has random numbers of its own, so that a shrunk run changes nothing for the others.
        rng = random.Random(f"command {self.seed} {len(self.commands)}")
        command = Command(self.world, laptop or self.ann, name, self.config, rng, new=new)
        self.commands.append(command)
        if name == "down" and command.laptop is self.ann:
            self.world.reached("down")
        elif name in ("run", "attach") and any(other.name == "run" for other in self.commands[:-1]):
            self.world.reached("restart")
        return command

    def do(self, name: str, laptop: Laptop | None = None, *, new: bool = False, refused: bool = False) -> Command:
        command = self.command(name, laptop, new=new)
        command.is_refused = refused
        return self.finish(command)

    def finish(self, command: Command) -> Command:
        if command.name == "logs":  # never ends while a program hangs without a supervisor
            command.over.wait(LONGEST_LOOK)
            command.interrupt()
        command.over.wait()
        promises.check_command(self, command)
        if command.status is not None:
            claims.status_shows_what_is(self, command.status)
        return command

    def _live(self) -> None:
        for action in self.actions:
            self.scheduler.spawn(self._act, action, name=action.kind, process=self.scheduler.world)
        self._leave_something()
        if self._get_slice():
            self._train()
        self._clean_up()
        self.main_over = True

    def _leave_something(self) -> None:
        """Creates the slice that exists before ann begins."""
        kind, google = self.scenario.leftover, self.world.google
        if not kind or self.world.cluster is not None:
            return
        creator = "bob" if kind == "bob's" else "stranger" if kind == "a stranger's" else "ann"
        maker = Owner(creator, hash_account(creator))
        labels = make_labels(self.config, maker, self.scheduler.now + EPOCH) if creator != "stranger" else {}
        zone = self.leftover_zone = self.rng.choice(self.config.zones)
        placed = self.config.placed(replace(self.config.candidates[0], zone=zone))
        queues = kind == "preempted" and self.config.slice.queued
        command = create_request_command(placed, labels, 7200.0) if queues else create_command(placed, labels)
        google.call(gcloud_commands.parse(command), creator)
        self.scheduler.sleep(0.0 if kind == "creating" else 100.0)
        slice_ = google.slice_of(gcloud_commands.parse(command))
        if slice_ is None or slice_.state != "READY":
            return
        for host in slice_.hosts:
            host.key_known = creator == "ann"
        if kind == "preempted":
            google.preempt(slice_, 0.0)
            self.scheduler.sleep(self.rng.choice((1.0, 10.0, 3 * 3600.0)))  # its request may be older than its time
        if kind == "stopped" and len(slice_.hosts) == 1:  # Google stops no other slices
            slice_.hosts[0].die(for_good=False)
            slice_.node.resource["state"] = "STOPPED"
        if kind == "deleting":
            with contextlib.suppress(ApiError):  # the API may be busy
                google.call(gcloud_commands.parse([*node_command(self.config, "delete"), f"--zone={zone}"]), "ann")

    def _get_slice(self) -> bool:
        for round_ in range(6):
            up = self.main = self.command("up")
            self.world.reached("up again" if round_ else "up")
            self.finish(up)
            if up.code == 0:
                return True
            named = [each for each in self.world.google.slices.values() if each.name.startswith(self.config.slice.name)]
            if up.code == Exit.BAD_INPUT or any(node.creator != "ann" for node in named):
                return False
            self.scheduler.sleep(self.rng.uniform(20.0, 200.0))
        return False

    def _train(self) -> None:
        next_command = "run"
        for _ in range(8):
            run = self.main = self.command(next_command)
            self.world.reached("run")
            run.over.wait()
            promises.check_command(self, run)
            if run.code in (0, Exit.BAD_INPUT) or (self.world.record.stops and self.rng.random() < 0.6):
                return
            if self.scenario.in_bucket:
                self.scheduler.sleep(self.rng.choice((0.0, 100.0, 500.0)))  # while another workstation goes on
            if not run.killed and run.code != Exit.DETACHED:
                self.scheduler.sleep(self.rng.uniform(1.0, 60.0))
            lost = run.code in (Exit.HOST_LOST, Exit.PREEMPTED, Exit.CLOUD_ERROR, Exit.CONFLICT, Exit.STOCKOUT)
            if (lost or run.error is not None) and self.rng.random() > 0.2:
                self.do("up")
            detached = run.killed or run.code == Exit.DETACHED
            if detached and (self.ann.home / "runs").exists() and self.rng.random() < 0.25:
                self.do("logs")
            next_command = "attach" if detached and self.rng.random() < 0.5 else "run"

    def _act(self, action: Action) -> None:
        """Carries out an action of ann or bob."""
        self.world.wait_until(action.anchor)
        self.scheduler.sleep(action.after)
        run = self.main
        if run is None:
            return
        match action.kind:
            case "kill":
                run.kill()
            case "ctrl-c":
                run.interrupt()
            case "asleep":
                self._sleep(run, self.rng.uniform(20.0, 4000.0))
            case kind:
                who, _, name = kind.rpartition(" ")
                laptop = {"bob": self.bob, "other": self.second, "rival": self.second}.get(who, self.ann)
                self.world.struck = self.world.struck or laptop is self.second or name == "down"
                of_runs = name in ("stop", "logs", "attach", "explain", "exec")
                if who == "rival" or not of_runs or (laptop.home / "runs").exists():
                    self.do(name, laptop, new=who == "new", refused=who == "refused")

    def _sleep(self, run: Command, seconds: float) -> None:
        """Closes the laptop for so many seconds."""
        if run.code is not None or run.killed or run.process.frozen:
            return
        self.world.note(f"the laptop sleeps for {seconds:.0f} s")
        self.scheduler.freeze(run.process)
        begin = self.scheduler.now
        self.scheduler.sleep(seconds)
        if self.rng.random() < 0.5:  # else its clock ran on, as for a stopped process
            self.ann.asleep += self.scheduler.now - begin
        self.scheduler.thaw(run.process)
        self.world.awake(run, seconds)

    def _write_lines(self, file: FileIO, data: bytes) -> None:
        """Writes to a file of a run's folder. Raises OSError after half of the data while ann's disk is full."""
        write_whole(file, data[: len(data) // 2] if self.world.disk_is_full else data)
        if self.world.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_event(self, file: FileIO, data: bytes) -> None:
        half = data[: int(len(data) * self.scenario.half_written)]
        self._write(lambda: self._write_lines(file, data), lambda: write_whole(file, half))

    def _write(self, write: Callable[[], T], begin: Callable[[], object]) -> T:
        """Writes an event or a request; kills its command before, amid or after the write that was drawn."""
        self.writes += 1
        command = self.running_command() if self.writes == self.kill_at else None
        if command is not None and self.scenario.half_written < 1.0:
            begin()
            self.world.note(f"write {self.writes} kills")
            command.kill()
        written = write()
        if command is not None:
            command.kill()
        return written

    def running_command(self) -> Command | None:
        return next((item for item in self.commands if item.process is self.scheduler.current.process), None)

    def _clean_up(self) -> None:
        """Deletes ann's slice, and again what other commands, which are waited for, ask for meanwhile."""
        for command in [each for each in self.commands if each.name == "watch"]:
            command.interrupt()
        for _ in range(12):
            down = self.do("down")
            for command in self.commands:
                if command.code is None and not command.killed:
                    command.over.wait(4 * 3600.0)
            left = self.world.cluster is not None and self.world.cluster.jobsets_of("ann")
            if down.code in (0, Exit.CONFLICT, Exit.BAD_INPUT) and not (slices_of(self.world, "ann") or left):
                break
            self.scheduler.sleep(0.0 if down.code == 0 else 300.0)


def simulate(seed: int, *, trace: bool = False, without: Collection[int] = ()) -> Result:
    return SimulatedRun(seed, trace=trace, without=without).play()
