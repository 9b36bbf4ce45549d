"""One simulated run of the launcher: what users do, in which world, and what holds at its end. A seed decides all."""

import contextlib
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from unittest import mock

from launcher.config import Config, load
from launcher.emulator.api.catalogue import ApiError
from launcher.errors import Exit
from launcher.home import write_whole
from launcher.run import ledger
from launcher.run.events import RunEvent
from launcher.run.ledger import Ledger
from launcher.run.session import list_runs
from launcher.tpu_vm import requests
from launcher.tpu_vm.commands import create_command, create_request_command, node_command
from launcher.tpu_vm.host_scripts import LOG_BYTES
from launcher.tpu_vm.requests import create_only
from launcher.tpu_vm.slices import make_labels
from launcher.workstation import Owner, hash_account
from tests import gcloud_commands
from tests.simulation.launcher import claims, faults, promises, records, scenarios, slice_promises
from tests.simulation.launcher.bucket import TRAINER, CloudStorage
from tests.simulation.launcher.cluster import Cluster
from tests.simulation.launcher.commands import Command
from tests.simulation.launcher.faults import FullDisk
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SECRET, SUPERVISORS
from tests.simulation.launcher.scenarios import Action, Candidates, Setting
from tests.simulation.launcher.speed import observe_every, read_pages, remember_yaml
from tests.simulation.launcher.world import Laptop, World
from tests.simulation.scheduler import Scheduler, Stuck

LONGEST_RUN = 20 * 3600.0  # virtual seconds: every wait ends long before
LONGEST_LOOK = 900.0  # seconds for which a user watches logs: longer than any program runs
_STEPS = 80_000
_REFUSED = 0.08  # of all runs: hosts refuse the ssh connections of ann's workstation, but those of gcloud
_KILLED_AT_WRITE = 0.1  # of all runs
_WITH_ENV_FILE = 0.3  # of all runs
_WITH_OVERLAY = 0.15
_NAME = "bert"
_CANDIDATES = (
    {"accelerator_type": "v4-8", "capacity": ["spot", "on-demand"]},
    {"accelerator_type": "v3-8", "zones": ["us-central1-a"]},
    {"accelerator_type": "v2-8", "zones": ["us-central1-b"]},
)
_KEYS_OF_RUN = ("preemption_retries", "failure_retries", "host_lost_seconds", "unreachable_minutes", "recovery_minutes",
                "budget", "replace_after", "stall_minutes")  # fmt: skip


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]  # promises, and what was seen
    trace: list[str]


@functools.cache
def _folder() -> Path:
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="tpu-launch-simulation-", dir=parent))


@functools.cache
def make_config(setting: Setting, candidates: Candidates | None = None, *, in_bucket: bool = False) -> Config:
    """Returns the configuration of a setting. Cached: reading YAML takes as long as much of a simulated run."""
    slice_ = {
        "name": _NAME,
        "accelerator_type": setting.accelerator,
        "create_minutes": 60,
        "stockout_minutes": setting.stockout_minutes,
        "queued": {"valid_until_hours": 2} if setting.queued else None,
        "zones": [*setting.zones] if len(setting.zones) > 1 else None,
        "expires_hours": setting.expires_hours,
        "candidates": _CANDIDATES if candidates is not None else None,
        "price_limit": candidates.price_limit if candidates is not None else None,
    }
    run = {"secrets": ["HF_TOKEN"], "environment": {"A": "b"}, "command": None if in_bucket else ["train"]}
    run |= {key: getattr(setting, key) for key in _KEYS_OF_RUN}
    document = {
        "project": "p",
        "zone": setting.zones[0],
        "slice": {key: value for key, value in slice_.items() if value is not None},
        "image": {"reference": f"r/i@sha256:{'0' * 64}"},
        "run": {key: value for key, value in run.items() if value is not None},
    } | (TRAINER if in_bucket else {})
    path = _folder() / "run.yaml"
    path.write_text(json.dumps(document | ({"gke": {"secrets": {"HF_TOKEN": "hf/token"}}} if setting.gke else {})))
    return replace(load(path), provider="gke") if setting.gke else load(path)


class SimulatedRun:
    def __init__(self, seed: int, *, trace: bool = False, without: Collection[int] = ()) -> None:
        """`trace`: whether to write down what happens; `without`: indices of faults, then actions, to leave out."""
        self.seed = seed
        self.scenario, drawn = scenarios.draw(seed)
        self.faults = [fault for number, fault in enumerate(drawn) if number not in without]
        self.actions = [each for number, each in enumerate(self.scenario.actions, len(drawn)) if number not in without]
        self.scheduler = Scheduler(random.Random(f"tasks {seed}"), preempt=0.03)
        self.scheduler.trace = [] if trace else None
        self.world = World(self.scheduler, random.Random(f"world {seed}"), self.faults, self.scenario.plans)
        self.break_promise = self.world.break_promise
        self.world.slice_name = _NAME
        self.world.on_creation = functools.partial(slice_promises.creation_is_due, self)
        self.world.on_deletion = functools.partial(slice_promises.deletion_follows_a_stop, self)
        self.config = make_config(self.scenario.setting, self.scenario.candidates, in_bucket=self.scenario.in_bucket)
        self.world.storage = CloudStorage(self.world, seed, lambda: getattr(self.running_command(), "laptop", None))
        stall = self.scenario.setting.stall_minutes
        self.world.stall_seconds = stall * 60.0 if stall is not None else None
        self.world.host_lost_seconds = self.scenario.setting.host_lost_seconds
        self.world.unreachable_seconds = self.scenario.setting.unreachable_minutes * 60.0
        self.world.zones = [*self.scenario.setting.zones]
        if not self.scenario.setting.gke and random.Random(f"env file {seed}").random() < _WITH_ENV_FILE:
            self.world.env_file = _folder() / "secrets.env"
            self.world.env_file.write_text(f"HF_TOKEN={SECRET}\nexport OF_FILE='a b'\n")
        if not self.scenario.setting.gke and random.Random(f"overlay {seed}").random() < _WITH_OVERLAY:
            (_folder() / "code").mkdir(exist_ok=True)
            (_folder() / "code" / "main.py").write_text("print()\n")
            self.world.overlay = f"{_folder() / 'code'}=/opt/code"
        if self.scenario.setting.gke:
            self.world.cluster = Cluster(self.world, self.scenario.setting.hosts)
        self.rng = random.Random(f"people {seed}")
        observe_every(self.rng.choice((1.0, 2.0, 3.0, 4.0)))
        pages = random.Random(f"pages {seed}")
        read_pages(pages.choice((LOG_BYTES, LOG_BYTES, 20_000)), pages.choice((5000, 5000, 20)))
        self.full_disk = faults.draw_full_disk(seed, stalls=self.scenario.theme == "standstills")
        self.commands: list[Command] = []
        self.world.command, self.world.finish = self.command, self.finish
        homes = _folder()
        self.ann = Laptop("ann", "ann", homes / "ann")
        if (ssh := random.Random(f"ssh {seed}")).random() < _REFUSED:
            self.ann.refused_from = ssh.choice((0, 1))
        self.bob = Laptop("bob", "bob", homes / "bob")
        self.second = Laptop("ann-2", "ann", homes / "ann-2")  # another workstation of ann's
        self.world.laptops = [self.ann, self.bob, self.second]
        for laptop in self.world.laptops:
            laptop.at_work = functools.partial(self._is_at_work, laptop)
        self.world.has_candidates = self.scenario.candidates is not None
        self.world.in_bucket = self.scenario.in_bucket
        self.world.price_limit = self.scenario.candidates.price_limit if self.scenario.candidates else None
        self.homes = [self.ann.home, self.second.home]
        kill = random.Random(f"write {seed}")
        self.kill_at = kill.randrange(1, 20) if kill.random() < _KILLED_AT_WRITE else 0  # number of the event
        self.half_written = kill.choice((0.0, 0.5, 1.0))  # the part of that event's line that is written
        self.writes = self.requests = 0  # of events, and to the record of requests
        self.leftover_zone = self.scenario.setting.zones[0]  # of the slice that exists before ann begins
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
        asks = mock.patch.object(requests, "create_only", self._write_request)
        append = Ledger.append

        def check_and_append(found: Ledger, event: RunEvent, **options: float) -> None:
            records.check_event(self, found, event)
            append(found, event, **options)

        try:
            with writes, asks, mock.patch.object(Ledger, "append", check_and_append), self.world.storage.install():
                self.scheduler.spawn(self._live, name="ann's plan", process=self.scheduler.world)
                self.scheduler.run(lambda: self.main_over, seconds=LONGEST_RUN, steps=_STEPS)
                promises.check_end(self)
        except Stuck as stuck:
            self.world.break_promise("every wait ends", str(stuck)[:2000])
        finally:
            faults.fill_disk(False)
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

    @property
    def loses_by_its_disk(self) -> bool:
        """Returns whether the laptop's disk is full for longer than the launcher waits to write lines and events."""
        return self.full_disk is not None and self.full_disk.long

    def is_undisturbed(self, until: float) -> bool:
        """Returns whether, until a moment, users only looked at runs, and nothing failed."""
        disturbs = any(action.kind.split()[-1] not in ("logs", "status", "explain", "exec") for action in self.actions)
        disturbs |= any(stop.at < until for stop in self.world.record.stops)
        return not (disturbs or self.faults or self.kill_at or self.full_disk)

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
        command.actor.is_refused = refused
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
        if self.full_disk is not None:
            self.scheduler.spawn(self._fill_disk, self.full_disk, name="full disk", process=self.scheduler.world)
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
        zone = self.leftover_zone = self.rng.choice(self.scenario.setting.zones)
        placed = self.config.placed(replace(self.config.candidates[0], zone=zone))
        queues = kind == "preempted" and self.scenario.setting.queued
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
            if up.code == Exit.BAD_INPUT or self._is_name_taken():
                return False
            self.scheduler.sleep(self.rng.uniform(20.0, 200.0))
        return False

    def _is_name_taken(self) -> bool:
        return any(node.name.startswith(_NAME) and node.creator != "ann" for node in self.world.google.slices.values())

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
                if self.rng.random() < 0.5:
                    self._tear_last_line()
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
        self.world.awake(run.actor, seconds)

    def _fill_disk(self, full: FullDisk) -> None:
        self.world.wait_until(full.anchor)
        self.scheduler.sleep(full.after)
        self.world.struck = True
        self.world.note(f"the laptop's disk is full for {full.seconds:.0f} s")
        faults.fill_disk(True)
        self.scheduler.sleep(full.seconds)
        faults.fill_disk(False)

    def _write_event(self, file: FileIO, data: bytes) -> None:
        """Writes an event to a ledger; kills its command at the write that was drawn."""
        self.writes += 1
        command = self.running_command()
        if self.writes != self.kill_at or command is None:
            write_whole(file, data)
            return
        write_whole(file, data[: int(len(data) * self.half_written)])
        self.world.note(f"event {self.writes} is written by {self.half_written:.0%}: {data[:80]!r}")
        command.kill()

    def _write_request(self, path: Path, text: str) -> bool:
        """Writes to the record of requests; kills its command before or after the write that was drawn."""
        self.requests += 1
        candidates, command = self.scenario.candidates, self.running_command()
        kills = candidates is not None and self.requests == candidates.kill_at and command is not None
        if kills and self.half_written < 1.0:
            self.world.note(f"killed before {path.name}")
            command.kill()
        written = create_only(path, text)
        self.world.note(f"the record has {path.name}")
        if kills:
            command.kill()
        return written

    def running_command(self) -> Command | None:
        return next((item for item in self.commands if item.process is self.scheduler.current.process), None)

    def _tear_last_line(self) -> None:
        """Leaves half a line, as a process that was killed while it wrote."""
        for path in self.ann.home.glob("runs/*/events.jsonl"):
            with open(path, "a") as file:
                file.write('{"time": "2027-01-15T08:0')

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
            if down.code in (0, Exit.CONFLICT, Exit.BAD_INPUT) and not (promises.slices_of(self.world, "ann") or left):
                break
            self.scheduler.sleep(0.0 if down.code == 0 else 300.0)


def simulate(seed: int, *, trace: bool = False, without: Collection[int] = ()) -> Result:
    remember_yaml()
    return SimulatedRun(seed, trace=trace, without=without).play()
