"""The world of one simulated run: Google, hosts, networks and laptops; everything but the launcher's own code."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from launcher.config import Config
from launcher.emulator.api.catalogue import ApiError
from launcher.images import overlays
from launcher.workstation import hash_account
from tests.gcloud_commands import Command
from tests.simulation.launcher import scripts
from tests.simulation.launcher.bucket import CloudStorage
from tests.simulation.launcher.cluster import Cluster
from tests.simulation.launcher.faults import API_FAULTS, MEDDLING, Fault
from tests.simulation.launcher.google import Google, Request, Slice
from tests.simulation.launcher.hosts import EPOCH, Container, Execution, Host, begin
from tests.simulation.launcher.jobs import SUPERVISORS, Cause, Job, Plan
from tests.simulation.scheduler import Process, Scheduler, Task

if TYPE_CHECKING:
    from tests.simulation.launcher.commands import Command as TypedCommand
    from tests.simulation.launcher.machine import Link

BROKEN_SECONDS = 10.0  # until a connection whose packets are lost breaks
_REFUSALS = 2  # in a row, at least, before a host counts as lost
_FORGOTTEN_SECONDS = 300.0  # of silence, after which a firewall may forget a connection
COLLEAGUE = "a colleague"
_RACE_SECONDS = 45.0  # between a look at a slice and its creation: a description may go unanswered for 30 s
_TWO_SECONDS, _TWO_POLL_SECONDS = 60.0, 2.0
_LASTING, _LASTS = {"drought": "stockout", "outage": "unavailable"}, 20.0  # faults that last so many times longer
_IN_USE = ("CREATING", "READY", "STARTING", "REPAIRING")
_BETWEEN_LOOKS = 5.0  # seconds between two observations, at most
_pack = functools.cache(overlays.pack)  # all simulated runs of a process have the same


@dataclass(eq=False)
class Laptop:
    """One user's terminals, folder, network and clock."""

    name: str
    user: str
    home: Path
    offline: bool = False
    wall: float = 0.0
    asleep: float = 0.0  # seconds in which its monotonic clock stood still
    refused_from: float = math.inf  # the first host that refuses its own ssh connections, but gcloud's
    at_work: Callable[[], int] = lambda: 0  # returns how many commands that may withdraw requests run on it


@dataclass(eq=False)
class Actor:
    """One command of a user, as Google and hosts see it."""

    laptop: Laptop
    name: str
    process: Process
    saw_slice: bool = False  # whether Google has described a slice or a request of its user to it
    refusals: set[str] = field(default_factory=set)  # kinds of faults for which Google has refused its calls
    out_of_stock: bool = False  # whether its last creation failed for lack of capacity
    shown: dict[str, str] = field(default_factory=dict)  # the last state but DELETING of each node that it saw, by id
    looked: dict[str, float] = field(default_factory=dict)  # when that was
    is_refused: bool = False  # whether hosts refuse its own connections, but gcloud's
    deletes_for: str = ""  # the run whose slice it deletes, as its budget is spent, or to replace it
    asked_to_delete: float = math.inf  # when it began its last command that deletes a slice, which Google gets later
    deleted: set[str] = field(default_factory=set)  # ids of nodes that it asked Google to delete
    heard: dict[Host, float] = field(default_factory=dict)  # when each host last told it the state of a container
    seen: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    """When and in which states Google has described each node and request to it, by full name; "": there was none."""
    states: Counter[tuple[str, str]] = field(default_factory=Counter)  # how often it saw each node (id) in each state
    calls: dict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(list))  # when it made each
    scripts: dict[tuple[Host, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """When it ran each script on each host over its connections; "progress": an observation with lines of progress."""

    @property
    def user(self) -> str:
        return self.laptop.user


@dataclass(eq=False)
class Stop:
    """A `stop` of a run."""

    run: str
    at: float
    done: float | None = None
    by: object = None  # the command
    typed: float = math.inf  # when its user gave it: it reads a run's bucket first


@dataclass
class Record:
    """Observations that promises are checked against."""

    broken: list[tuple[str, str]] = field(default_factory=list)
    jobs: dict[tuple[str, int], Job] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    requested_runs: list[tuple[Laptop, float]] = field(default_factory=list)  # where and when users typed `run`
    # Ids of nodes in use: whose they were, by whom and when.
    deleted: dict[str, tuple[str, object, float]] = field(default_factory=dict)
    removed_logs: dict[tuple[str, int, int], list[tuple[str, str]]] = field(default_factory=dict)
    permanent: set[str] = field(default_factory=set)  # kinds of API faults that no retry outlasts
    deletions: list[float] = field(default_factory=list)  # when users deleted a node or a request
    billed: list[Slice] = field(default_factory=list)  # all nodes of ann that were READY


class World:
    def __init__(
        self,
        scheduler: Scheduler,
        rng: Random,
        config: Config,
        faults: Sequence[Fault] = (),
        plans: Sequence[Plan] = (),
    ) -> None:
        self.scheduler, self.rng, self.config, self.faults, self.plans = scheduler, rng, config, faults, plans
        self.google = Google(self)
        self.cluster: Cluster | None = None
        self.storage: CloudStorage
        self.command: Callable[[str, Laptop], TypedCommand]  # types a command
        self.finish: Callable[[TypedCommand], object]  # waits for its end
        self.hosts: list[Host] = []  # all that ever were
        self.addresses: dict[str, Host] = {}  # of the hosts that have them now
        self.links: list[Link] = []  # of all workstations
        self.record = Record()
        self._reached: set[str] = set()
        self._awaiting: dict[str, dict[Task, None]] = {}  # tasks, by the moment
        self.struck = False  # whether any fault has occurred
        self.calm_from = -math.inf  # when the last of them is over; hosts know their own
        self.pull_seconds = rng.choice((0.5, 5.0, 40.0))
        self.laptops: list[Laptop] = []
        self.in_bucket = False  # whether the ledger is there
        self.disk_is_full = False  # ann's
        self.env_file: Path | None = None  # of each `run`
        self.overlay: str | None = None  # of each `run`, FOLDER=TARGET
        self._answers: dict[tuple[Actor, Host], float] = {}  # when a command last heard of a host, or first did not
        self._refusals: dict[tuple[Actor, Host], list[float]] = {}  # since a command last heard of a host
        self._api_faults: dict[str, list[tuple[float, float, Fault]]] = {}
        self.downs: list[str] = []  # users, one entry for each `down` that works now
        self.on_creation: Callable[[Slice, Any], None] = lambda node, by: None  # called when a command makes a node
        self.on_deletion: Callable[[Slice, Any], None] = lambda node, by: None  # called when a command deletes one
        for fault in faults:
            if fault.anchor == "beginning":
                self._arrange(fault, fault.at)

    # -- the trace ----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self.scheduler.trace is not None:
            self.scheduler.note(text)

    def break_promise(self, promise: str, what: str) -> None:
        self.record.broken.append((promise, what))
        self.note(f"BROKEN: {promise}: {what}")

    def newest_job(self, run: str | None = None) -> Job | None:
        """Returns the newest attempt that was started, of one run or of any."""
        jobs = [job for (name, _), job in self.record.jobs.items() if run in (None, name)]
        return jobs[-1] if jobs else None

    # -- faults --------------------------------------------------------------------------------------------------------

    def _arrange(self, fault: Fault, at: float) -> None:
        if (kind := _LASTING.get(fault.kind)) is not None:
            fault = replace(fault, kind=kind, seconds=fault.seconds * _LASTS)
        if fault.kind in API_FAULTS and fault.kind != "offline":
            self._api_faults.setdefault(fault.kind, []).append((at, at + fault.seconds, fault))
        self.scheduler.call_at(at, lambda: self._strike(fault))

    def reached(self, anchor: str) -> None:
        """Schedules the faults that are anchored at a moment, and wakes tasks that wait for it, the first time."""
        if anchor in self._reached:
            return
        self._reached.add(anchor)
        self.scheduler.wake_all(self._awaiting.get(anchor, {}))
        for fault in self.faults:
            if fault.anchor == anchor:
                self._arrange(fault, self.scheduler.now + fault.at)

    def wait_until(self, anchor: str) -> None:
        """Waits until the run reaches a moment, which it may never do."""
        while anchor not in self._reached:
            self.scheduler.wait(self._awaiting.setdefault(anchor, {}), None, f"the moment {anchor!r}")

    def api_fault(self, kind: str) -> Fault | None:
        """Returns the fault of a kind that hits a call now, None without one. Draws a random number."""
        for first, end, fault in self._api_faults.get(kind, ()):
            if first <= self.scheduler.now < end and self.rng.random() < API_FAULTS[kind]:
                if kind in ("permission", "signed out", "quota"):
                    self.record.permanent.add(kind)
                return fault
        return None

    def ssh_fault(self) -> Fault | None:
        """Returns the fault of the way to port 22 of all hosts that hits a connection now; None without one."""
        return self.api_fault("dead ssh") or self.api_fault("no ssh")

    def refused(self, actor: Actor, host: Host) -> None:
        """Records that the network failed a command on a healthy host."""
        self._refusals.setdefault((actor, host), []).append(self.scheduler.now)
        self._answers.setdefault((actor, host), self.scheduler.now)

    def answered(self, actor: Actor, host: Host) -> None:
        """Records that a host answered a command."""
        self._refusals.pop((actor, host), None)
        self._answers[actor, host] = self.scheduler.now

    def is_lost(self, actor: Actor, host: Host, job: Job) -> bool:
        """Returns whether a host of an attempt has not answered for as long as the file lets it be silent, and its
        answers have failed for half of that: for longer if no other host has answered since."""
        refusals = self._refusals.get((actor, host), [])
        others = [item.host for item in job.containers.values() if item.host is not host]
        answered = any(self._answers.get((actor, other), 0.0) > refusals[0] for other in others if refusals)
        longest = self.config.run.host_lost_seconds if answered else self.config.run.unreachable_minutes * 60
        silent = self.scheduler.now - self._answers.get((actor, host), job.began or 0.0) > longest - _BETWEEN_LOOKS
        return silent and len(refusals) >= _REFUSALS and self.scheduler.now - refusals[0] > longest / 2 - _BETWEEN_LOOKS

    def awake(self, actor: Actor, seconds: float) -> None:
        """Wakes a laptop after so many seconds of sleep: firewalls may have forgotten its connections."""
        for link in self.links:
            if link.actor is actor and seconds > _FORGOTTEN_SECONDS and self.rng.random() < 0.5:
                link.forgotten = True
        self.reached("awake")

    def add_host(self, host: Host) -> None:
        """Adds a host; its address may have belonged to another one."""
        self.hosts.append(host)
        self.addresses[host.address] = host

    def _our_slice(self) -> Slice | None:
        named = [node for node in self.google.slices.values() if node.name.startswith(self.config.slice.name)]
        return next((node for node in reversed(named) if node.creator == "ann"), None)

    def _strike(self, fault: Fault) -> None:
        """Makes a fault occur. Does not block."""
        self.struck = True
        self.note(f"FAULT: {fault}")
        later = self.scheduler.now + fault.seconds
        self.calm_from = max(self.calm_from, later)
        if fault.kind == "offline":
            laptop = self.laptops[0]
            laptop.offline = True
            self.scheduler.call_at(later, lambda: setattr(laptop, "offline", False))
        elif fault.kind == "full":
            self.disk_is_full = True
            self.scheduler.call_at(later, lambda: setattr(self, "disk_is_full", False))
        elif fault.kind == "date":
            self.laptops[0].wall += (-7200.0, 5400.0, -40.0, 86400.0)[fault.number % 4]
        elif fault.kind not in API_FAULTS and self.cluster is not None:
            self.cluster.strike(fault)
        elif fault.kind not in API_FAULTS and (node := self._our_slice()) is not None and node.hosts:
            self._strike_slice(node, fault, later)

    def _strike_slice(self, node: Slice, fault: Fault, later: float) -> None:
        if fault.kind == "preempt":
            self.google.preempt(node, fault.seconds / 4 if fault.number % 2 else 0.0)
        elif fault.kind in MEDDLING:
            self.scheduler.spawn(self._meddle, node, fault, name=fault.kind, process=self.scheduler.world)
        elif fault.kind == "maintenance":
            self._maintain(node, fault)
        else:
            self._strike_host(node.hosts[fault.number % len(node.hosts)], fault, later)

    def _strike_host(self, host: Host, fault: Fault, later: float) -> None:
        call_at, now = self.scheduler.call_at, self.scheduler.now
        exit_code = (255, 137, 0, 143)[fault.number // 4 % 4]
        match fault.kind:
            case "reboot":
                host.die(for_good=False)
                call_at(min(later, now + 90.0), lambda: host.boot_up(exit_code, writes_time=fault.number % 3 != 0))
            case "die":
                host.die(for_good=False)
                call_at(later + 60.0, lambda: host.boot_up(exit_code, writes_time=True))
            case "hang":
                host.hang()
                if fault.number % 8 != 7:  # the others hang until they are rebooted or deleted
                    call_at(later, host.recover)
            case "cut":
                host.cut_off()
                call_at(later, host.recover)
            case "filter":
                host.filtered = True
                host.troubled.append(now)
                self._disturb(host, "ssh is filtered")
                host.changed()
                call_at(later, host.recover)
            case "connection":
                for container in list(host.containers.values()):
                    if container.job is not None and container.running:
                        container.job.lose_connection(host)
            case "engine":
                host.engine_up = False
                self._disturb(host, "its engine is down")
                call_at(later, lambda: setattr(host, "engine_up", True))
            case "disk":
                host.disk_full = True
                call_at(later, lambda: setattr(host, "disk_full", False))
            case "clock":
                # No multiple of a program's period: an open line shares its time with no later line.
                host.wall += (-40.013, 35.017, -3.007, 3600.011)[fault.number % 4]
                host.clock_jumped = True

    def _maintain(self, node: Slice, fault: Fault) -> None:
        """Asks the hosts to shut down: programs save, then Google takes the slice or reboots its hosts."""
        self.note(f"maintenance of {node.name}")
        for host in node.hosts:
            for container in host.containers.values():
                if container.running and container.job is not None:
                    container.job.disturb("host", host.worker, "maintenance")
                    container.job.terminate(container)

        def take() -> None:
            if fault.number % 2:
                self.google.preempt(node, fault.seconds / 4)
                return
            for host in node.hosts:
                host.die(for_good=False)
                self.scheduler.call_at(
                    self.scheduler.now + 20.0 + host.worker, lambda host=host: host.boot_up(137, writes_time=True)
                )

        self.scheduler.call_at(self.scheduler.now + 12.0, take)

    def _meddle(self, node: Slice, fault: Fault) -> None:
        """Deletes, stops or replaces a slice in Google's console, with its request or without."""
        kind, keeps_request = fault.kind, fault.number % 3 == 0
        google, flags = self.google, {"project": "p", "zone": node.node.zone, "force": ""}
        queued = "queuedResource" in node.node.resource and not keeps_request
        group = "queued-resources" if kind != "halt" and queued else "tpu-vm"
        with contextlib.suppress(ApiError):  # another change is under way
            answer = google.call(Command(group, "stop" if kind == "halt" else "delete", node.name, flags), COLLEAGUE)
            google.wait(answer["name"], 600.0)
            if kind == "replace":
                labels = f"tpu-launch=1,tpu-launch-owner=bob,tpu-launch-account={hash_account('bob')}"
                wanted = {"accelerator-type": node.node.resource["acceleratorType"], "version": "v", "labels": labels}
                google.call(Command("tpu-vm", "create", node.name, {**flags, **wanted}), "bob")

    def _disturb(self, host: Host, what: str) -> None:
        for container in host.containers.values():
            if container.job is not None and container.running:
                container.job.disturb("host", host.worker, what)

    # -- containers ---------------------------------------------------------------------------------------------------

    def start_container(self, container: Container, actor: Actor) -> None:
        """Does `docker start`."""
        now = self.scheduler.now
        key = (container.run, container.attempt)
        job = self.record.jobs.get(key)
        if job is not None and job.containers.get(container.host.worker, container) is not container:
            self.break_promise("a number is one attempt's", f"{container.name} starts on {container.host!r}, again")
            job = None
        if job is None:
            plan = self.plans[min(container.attempt, len(self.plans) - 1)]
            job = Job(self.scheduler, container.run, container.attempt, self._hosts_of(container.host), plan, self.rng)
            minutes = self.config.run.stall_minutes
            job.stall_seconds = minutes * 60 if minutes is not None else None
            job.on_end, job.on_hang = lambda: self.reached("end"), lambda: self.reached("hang")
            self.record.jobs[key] = job
        self._check_may_start(container, actor)
        container.status, container.started = "running", now
        container.started_at = container.finished_at = ""
        container.job = job
        job.starts.add(container.host.worker)
        self.note(f"{container.name} starts on {container.host!r} ({job.plan.kind})")
        if container.awaits_secrets:
            self.scheduler.call_at(now + container.secrets_seconds, lambda: self._give_up_secrets(container))
        else:
            self._begin_program(container, job)

    def _begin_program(self, container: Container, job: Job) -> None:
        self._check_alone(container)
        job.started(container)
        if job.began is not None:
            self.reached("start")

    def give_secrets(self, container: Container) -> None:
        """Begins the command of a container; a second delivery changes nothing."""
        if container.awaits_secrets and container.job is not None:
            wanted = _pack(self.overlay) if self.overlay is not None else None
            if container.overlay != wanted:
                self.break_promise("a program begins with its overlay", f"{container.name}: {container.overlay}")
            container.awaits_secrets, container.started = False, self.scheduler.now
            self._begin_program(container, container.job)

    def _give_up_secrets(self, container: Container) -> None:
        if container.awaits_secrets and container.running and container.job is not None:
            self.note(f"{container.name} on {container.host!r} got no secrets")
            container.job.causes.append(Cause("no secrets", container.host.worker))
            container.end(1)

    def _hosts_of(self, host: Host) -> int:
        if self.cluster is not None:
            return self.cluster.size
        return next((len(node.hosts) for node in self.google.slices.values() if host in node.hosts), 1)

    def _check_alone(self, container: Container) -> None:
        for other in [other for host in self.hosts if host.up for other in host.containers.values() if other.running]:
            if not other.awaits_secrets and other.run == container.run and other.attempt != container.attempt:
                self.break_promise("never two attempts of a run at once", f"{other.name} on {other.host!r}")

    def _check_may_start(self, container: Container, actor: Actor) -> None:
        """Checks that the run has neither finished nor been stopped for good."""
        for (run, attempt), job in self.record.jobs.items():
            if run == container.run and attempt < container.attempt and job.seen_finished:
                self.break_promise("a run that has finished is over", f"{container.name} starts after {attempt}")
        for stop in self.record.stops:
            asked_since = any(  # another workstation goes on with a run of the bucket as it was asked for on this one
                at > min(stop.at, stop.typed) and (laptop is actor.laptop or self.in_bucket)
                for laptop, at in self.record.requested_runs
            )
            if self.cluster is not None and stop.done is not None:  # the JobSet may come during the stop: it ends later
                created = self.cluster.created[container.name.removeprefix("tpu-launch-")]
                asked_since = asked_since or stop.at < created <= stop.done + 1.0
            if stop.run == container.run and stop.done is not None and not asked_since:
                self.break_promise("stop is final", f"{container.name} starts after the stop at {stop.at:.1f}")

    def stop_container(self, container: Container, actor: Actor, *, first: bool) -> None:
        """Sends SIGTERM, the first time."""
        self._check_end(container, actor)
        self.note(f"{container.name} on {container.host!r} gets SIGTERM from {actor.name} of {actor.user}")
        if first and container.job is not None:
            container.job.terminate(container)

    def kill_container(self, container: Container, actor: Actor) -> None:
        self._check_end(container, actor)
        if container.job is not None:
            container.job.kill(container)

    def remove_container(self, container: Container, actor: Actor, by: str) -> None:
        """Does `docker rm --force`."""
        if container.running:
            self._check_end(container, actor)
            if container.job is not None:
                container.job.kill(container)
        if container.job is not None:
            container.job.left.add(container.host.worker)
            self.record.removed_logs[container.run, container.attempt, container.host.worker] = container.log
        container.host.containers.pop(container.name, None)
        self.scheduler.wake_all(container.waiters)
        self.note(f"{container.name} is removed from {container.host!r} by {by} of {actor.user}")

    def _check_end(self, container: Container, actor: Actor) -> None:
        job = container.job
        if job is None or not job.healthy or job.began is None or not job.confirmed or job.told_lost:
            return
        if any(self.is_lost(actor, item.host, job) for item in job.containers.values()):
            return
        if job.plan.kind != "stall" and not any(stop.run == container.run for stop in self.record.stops):
            what = f"{actor.name} of {actor.user} ends {container.name}, which is well"
            self.break_promise("a live attempt ends only by a stop", what)

    # -- slices -------------------------------------------------------------------------------------------------------

    def node_created(self, made: Slice, by: object) -> None:
        """Checks that no run makes a slice again that it knew, and that another user has deleted."""
        if isinstance(by, Actor):
            self.on_creation(made, by)
        if isinstance(by, Actor) and by.name in SUPERVISORS:
            for node, (creator, deleter, at) in self.record.deleted.items():
                raced = node in by.deleted or by.deletes_for or at - by.looked.get(node, at) < _RACE_SECONDS
                if creator == by.user and deleter is not by and not raced and by.shown[node] in _IN_USE:
                    self.break_promise("what a user deleted stays deleted", f"{by.name} of {by.user} makes it again")

    def watch_two(self, second: Slice) -> None:
        """Checks that a user keeps two slices for _TWO_SECONDS at most, in which a command works and Google answers."""
        attended = 0.0
        while attended < _TWO_SECONDS:
            kept = [node for node in self.google.slices.values() if node.creator == second.creator]
            if sum(node.state == "READY" for node in kept) < 2 or second.state != "READY":
                return
            self.scheduler.sleep(_TWO_POLL_SECONDS)
            at_work = any(laptop.user == second.creator and laptop.at_work() > 0 for laptop in self.laptops)
            answers = not self.struck or not any(fault.kind in API_FAULTS for fault in self.faults)
            attended += _TWO_POLL_SECONDS if at_work and answers else 0.0
        self.break_promise("never two slices for longer than a minute", f"{kept}")

    def has_expired(self, node: Slice, actor: Actor) -> bool:
        """Returns whether a `gc` may delete a slice that is in use: it expires before the date of its laptop."""
        date = self.scheduler.now + EPOCH + actor.laptop.wall
        return actor.name == "gc" and node.expires is not None and node.expires < date

    def node_deleted(self, node: Slice, who: str, by: object) -> None:
        """Records that a user deletes a node, and checks that this user's command may."""
        self.note(f"{who} deletes node {node.name} of {node.creator}, which is {node.state}")
        containers = [item for host in node.hosts for item in host.containers.values() if item.job is not None]
        well = [item for item in containers if item.running and item.job.healthy and item.job.began]
        for container in containers:
            container.job.causes.append(Cause("deleted", container.host.worker))
        self.record.deletions.append(self.scheduler.now)
        if isinstance(by, Actor):
            self.on_deletion(node, by)
        if node.used_as in _IN_USE:
            self.record.deleted[node.node.resource["id"]] = (node.creator, by, self.scheduler.now)
        if who == COLLEAGUE:
            return
        if node.creator != who:
            self.break_promise("nothing of others is touched", f"{who} deletes node {node.name} of {node.creator}")
        wanted = who in self.downs or (isinstance(by, Actor) and self.has_expired(node, by))
        if isinstance(by, Actor) and by.deletes_for:  # only hosts know of other machines' runs (docs/limits.md)
            own, can_save = by.laptop.home / "runs", not any(fault.kind == "no ssh" for fault in self.faults)
            well = [item for item in well if can_save and (item.run == by.deletes_for or (own / item.run).exists())]
        unseen = isinstance(by, Actor) and node.ready_at > by.asked_to_delete  # gcloud was slow (docs/limits.md)
        if well and not wanted and not unseen:
            self.break_promise("a live attempt ends only by a stop", f"{who} deletes {node} under {well[0].name}")

    def request_deleted(self, request: Request, who: str) -> None:
        """Records that a user's command deletes a queued resource, and checks that it may."""
        self.note(f"{who} deletes request {request.name} of {request.creator}, which is {request.state}")
        self.record.deletions.append(self.scheduler.now)
        if request.creator != who != COLLEAGUE:
            self.break_promise("nothing of others is touched", f"{who} deletes {request} of {request.creator}")

    # -- commands on hosts --------------------------------------------------------------------------------------------

    def execute(self, host: Host, script: str, stdin: str | None, actor: Actor) -> Execution:
        """Runs a script on a host as gcloud's ssh, which is tried three times. The result is 255 when all fail."""

        def work() -> tuple[int, str]:
            for number in range(3):
                self.scheduler.sleep(2.0 if number else 0.0)
                code, output = self._execute_once(host, script, stdin, actor)
                if code != 255:
                    break
            host.executions.pop(execution, None)
            return code, output

        execution = begin(self.scheduler, work, f"ssh to {host!r}", self.scheduler.current.process)
        host.executions[execution] = None
        return execution

    def _execute_once(self, host: Host, script: str, stdin: str | None, actor: Actor) -> tuple[int, str]:
        """Runs ssh once: 255 when the host can't be reached, or the connection broke, maybe after the script ran."""
        self.scheduler.sleep(self.rng.uniform(0.05, 0.4))
        if not host.reachable or actor.laptop.offline or self.ssh_fault() is not None:
            self.scheduler.sleep(10.0)
            return 255, ""
        inner = host.begin(functools.partial(scripts.Shell(self, host, actor).run, script, stdin))
        while inner.result is None:
            self.scheduler.wait(inner.waiters, None if host.reachable else BROKEN_SECONDS, f"a script on {host!r}")
            if inner.result is None and not host.reachable:
                self.scheduler.sleep(BROKEN_SECONDS)
                if not host.reachable or (inner.result is None and host.process.tasks == {}):
                    break
        host.executions.pop(inner, None)
        if inner.result is None or self.api_fault("ssh loses answers") is not None:
            return 255, ""
        code, output = inner.result
        return code, output


def slices_of(world: World, user: str) -> list[Slice]:
    """Returns the slices that a user pays for."""
    return [node for node in world.google.slices.values() if node.creator == user]


def containers_of(world: World, run: str) -> list[Container]:
    """Returns the containers of a run on the hosts of existing slices, or on the nodes of the cluster."""
    hosts = [host for node in world.google.slices.values() for host in node.hosts]
    hosts += world.cluster.nodes if world.cluster is not None else []
    return [item for host in hosts for item in host.containers.values() if item.run == run]
