"""The world of a simulated run: bucket, network, hosts, launchers and faults, without which the run must finish."""

import math
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Process, Scheduler, Task
from tests.simulation.trainer.bucket import WRITE, Bucket, Request, Stored, Treatment
from tests.simulation.trainer.connections import Wire
from tests.simulation.trainer.features import HUB_SECONDS, SimulatedHub, is_export, put_strange_records, put_tokenizer
from tests.simulation.trainer.hosts import Group, Host
from tests.simulation.trainer.model import Curriculum
from tests.simulation.trainer.plan import HOSTILE_SECONDS, REQUESTER, RUN, Fault, Plan
from tests.simulation.trainer.promises import CHECKPOINTS, Promises
from training.checkpoint.format import MANIFEST
from training.config import TrainerConfig
from training.trainer import FIRST_STEP_SECONDS

ATTEMPTS = 8  # of one launcher
SETTLING = 12.0  # seconds that a launcher gives the other hosts after the first end
SAVING = 45.0  # the same, if the first host ended in good order
FINAL_ATTEMPTS = 4  # in which the run must finish without faults
LONGEST = 20_000.0  # seconds of a simulated run


def config_of(plan: Plan) -> TrainerConfig:
    names = ("every_steps", "keep_last", "keep_every", "background", "stop_seconds")
    checkpoint = {name: getattr(plan, name) for name in names}
    if plan.best and plan.evaluate_every:
        checkpoint["best"] = {"metric": "loss", "mode": "min"}
    every = "checkpoint" if plan.hub == "checkpoint" else None
    upload = {"hub": {"repository": "a/b", "every": every, "wait_seconds": HUB_SECONDS}} if plan.hub else {}
    train = {"steps": plan.steps, "global_batch_size": plan.batch, "learning_rate": 0.1, "log_every": 2}
    return TrainerConfig.model_validate(
        {
            **upload,
            "model": {"name": "bert-tiny"},
            "data": {"train": "gs://data/train", "evaluation": "gs://data/evaluation", "tokenizer": "gs://data/t"},
            "train": {**train, "on_nonfinite": "skip" if plan.skip else "stop"},
            "evaluation": {"every": plan.evaluate_every},
            "checkpoint": checkpoint,
            "rendezvous": {"start_seconds": 60.0, "seconds": 30.0, "lost_seconds": 4.0},
            "export": {"at_end": plan.export},
            "output": "gs://bucket/runs",
        }
    )


class World:
    """Everything in a simulated run but the trainer."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan = plan
        self.random = random.Random(f"world {plan.seed}")
        self.scheduler = Scheduler(random.Random(f"order {plan.seed}"))
        if trace:
            self.scheduler.trace = []
        self.config = config_of(plan)
        self.curriculum = Curriculum(plan.records, plan.batch, plan.steps, 0, plan.skipped)
        self.promises = Promises(self)
        self.hub = SimulatedHub(self)
        self.differences: dict[tuple[int, ...], str | None] = {}  # by the generations of manifest and parts
        self.manifests: dict[int, object] = {}
        told = (self.promises.object_changed, self.promises.write_refused)
        self.bucket = Bucket(self.scheduler, self.random, self.treat, *told)
        if plan.export:
            put_tokenizer(self)
        if plan.strangers:
            put_strange_records(self)
        self.wire = Wire(self.scheduler, self.random)
        self.groups: list[Group] = []
        self.disturbed = False  # storage had faults
        self.jitter = plan.jitter
        self.rotten = False  # a checkpoint was damaged
        self.rotten_at = 0.0  # time of the last damage
        # Unnoticed damage: generation of the damaged object -> its step, and the object before.
        self.hidden_rot: dict[int, tuple[int, Stored]] = {}
        self.damaged = False  # or unusable, because the next step is not finite
        self.poisoned: int | None = None  # a step that is not finite if it is the first after a restore
        self.poisoned_generation = -1  # of that checkpoint's manifest, once noticed
        self._hidden_poison = -1  # the same, before it is noticed
        self.poison_noticed = math.inf  # when
        # Checkpoints after which the first step was not finite once, by their manifests' generations -> step; and those
        # of them that a restore has passed over for that.
        self.suspects: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.finished = self._done = False
        self._hosts: dict[Process, Host] = {}
        self._waiting: dict[Task, None] = {}  # launchers that wait for a change
        self._launchers = 0
        self._slices = 0
        self._late = 0.0
        self._flips_next = False  # for the next part written
        self._misreads = False  # the read that is treated
        self._active: list[tuple[float, Fault]] = []  # (end, fault) of lasting faults of storage
        self._awaited = [
            [fault, fault.request[2]] for fault in plan.faults if fault.request
        ]  # matches until it strikes

    # --- the run

    def live(self) -> None:
        """Simulates from the first start to the last end."""
        scheduler = self.scheduler
        for fault in self.plan.faults:
            scheduler.note(f"fault: {fault}")
            if fault.request is None:
                scheduler.call_at(fault.at, lambda fault=fault: self.strike(fault))
        scheduler.spawn(self._run, name="life", process=scheduler.world)
        scheduler.run(until=lambda: self._done, seconds=LONGEST)

    def _run(self) -> None:
        self._launch()
        self.wait_until(lambda: self._launchers == 0)
        if self.scheduler.now < HOSTILE_SECONDS and not self._is_quiet:
            self.scheduler.sleep(HOSTILE_SECONDS - self.scheduler.now)
        self.wait_until(lambda: self._launchers == 0)
        for group in self.groups:
            for host in group.hosts:
                host.thaw()
                self.restore_network(host)
        self.wait_until(lambda: all(group.is_over for group in self.groups))
        if not self.finished:
            self._finish_without_faults()
        if self.promises.newest_whole != self.plan.steps and not self.rotten:
            self.promises.broken("the end", f"the newest whole checkpoint is of step {self.promises.newest_whole}")
        self._done = True

    @property
    def _is_quiet(self) -> bool:
        """Returns whether no fault can strike any more."""
        later = any(fault.request is None and fault.at > self.scheduler.now for fault in self.plan.faults)
        return self.finished and not later

    def _finish_without_faults(self) -> None:
        """Starts the run once more, without faults: it must finish."""
        self._active.clear()
        self.jitter = min(self.jitter, 0.2)
        self._flips_next = False
        self._awaited.clear()
        self.disturbed = False
        self.scheduler.note("there are no more faults")
        self._launch(FINAL_ATTEMPTS)
        self.wait_until(lambda: self._launchers == 0)
        if not self.finished and not self.rotten:
            last = self.groups[-1]
            lines = [line for host in last.hosts for line in host.lines[-2:]]
            why = f"exit codes {last.codes} after {FINAL_ATTEMPTS} attempts: {lines}"
            self.promises.broken("without faults, the run finishes", why)
        self.wait_until(lambda: all(group.is_over for group in self.groups))

    def changed(self) -> None:
        self.scheduler.wake_all(self._waiting)

    def wait_until(self, is_so: Callable[[], bool], timeout: float | None = None) -> None:
        """Waits until a condition holds, at most `timeout` seconds."""
        self.scheduler.wait_until(is_so, self._waiting, timeout, "a change")

    def group(self, label: str) -> Group:
        return next(group for group in self.groups if group.label == label)

    def host_of(self, process: Process) -> Host | None:
        return self._hosts.get(process)

    # --- launchers

    def _launch(self, attempts: int = ATTEMPTS) -> None:
        self._launchers += 1
        self.scheduler.spawn(self._launcher, attempts, self._launchers, name="launcher")

    def _launcher(self, attempts: int, number: int) -> None:
        """Starts attempt after attempt, until the run has finished or must not be retried."""
        self.scheduler.sleep(0.0)
        self._slices += 1
        slice_number = self._slices
        for attempt in range(attempts):
            label = f"{chr(ord('a') + len(self.groups) % 26)}{len(self.groups) // 26 or ''}"
            hosts = self.plan.later_hosts[attempt % len(self.plan.later_hosts)] if attempt else self.plan.hosts
            group = Group(self, label, attempt, slice_number, hosts)
            self.groups.append(group)
            late, self._late = self._late, 0.0
            for host in group.hosts:
                self._hosts[host.process] = host
                host.start(3 * self.random.random() + (late if host.worker == group.size - 1 else 0.0))
            self._watch(group)
            codes = group.codes
            self.scheduler.note(f"launcher {number}: attempt {group.label} ended with {codes}")
            if all(code == 0 for code in codes):
                self.finished = True
                break
            if 2 in codes:
                break
            if any(host.code is None for host in group.hosts):  # its processes live on, on an abandoned slice
                self._slices += 1
                slice_number = self._slices
            self.scheduler.sleep(1 + 4 * self.random.random())
        self._launchers -= 1
        self.changed()

    def _watch(self, group: Group) -> None:
        """Waits until the attempt is over, or its hosts can't be reached; then kills the rest."""
        first_end: float | None = None
        silent_since: float | None = None
        while not group.is_over:
            self.wait_until(lambda: group.is_over, timeout=1.0 if first_end or silent_since else 5.0)
            now = self.scheduler.now
            ended = [host for host in group.hosts if host.code is not None]
            if ended and first_end is None:
                first_end = now
            silent = any(host.code is None and (host.frozen or host.cut) for host in group.hosts)
            silent_since = (silent_since or now) if silent else None
            in_good_order = all(host.code in (0, 75) for host in ended)
            limit = SAVING if in_good_order else SETTLING
            if (first_end is not None and now - first_end > limit) or (
                silent_since is not None and now - silent_since > self.plan.launcher_patience
            ):
                # One that is killed while its network is cut tells no other host.
                bad = [host for host in ended if host.code not in (0, 75)]
                failed = [host for host in bad if host.ended > max(group.claimed, host.cut_until)]
                for host in group.hosts:
                    if failed and now - min(host.ended for host in failed) > SETTLING:
                        self.promises.a_process_that_lost_a_peer_ends(host)
                    if not host.frozen and not host.cut:
                        host.kill()
                return

    # --- faults

    def strike(self, fault: Fault, requester: Host | None = None) -> None:
        """Applies a fault."""
        scheduler = self.scheduler
        if scheduler.now > HOSTILE_SECONDS or not self.groups:
            return
        group = requester.group if requester and fault.worker == REQUESTER else self.groups[-1]
        host = requester if requester and fault.worker == REQUESTER else group.hosts[fault.worker % group.size]
        until = min(scheduler.now + fault.seconds, HOSTILE_SECONDS)
        scheduler.note(f"strikes: {fault.kind}")
        if fault.kind in ("kill", "power", "freeze", "hang", "cut", "part", "nan", "drift", "block"):
            group.disturbed = True
        if fault.kind in ("storm", "slow", "full", "forbidden", "quota"):
            self.disturbed = True
        match fault.kind:
            case "bad write":
                self.disturbed = self._flips_next = True
            case "storm" | "slow" | "full" | "telemetry" | "forbidden" | "quota":
                self._active.append((until, fault))
            case "kill":
                host.kill()
            case "power":
                for each in group.hosts:
                    each.kill()
            case "freeze" | "hang":
                (host.freeze if fault.kind == "freeze" else host.hang)()
                scheduler.call_at(until, host.thaw)
            case "cut":
                host.hurt, host.cut_until = True, until
                self.wire.cut(host.address)
                scheduler.call_at(until, lambda: self.restore_network(host))
            case "part" if group.size > 1:
                self._part(host, group.hosts[host.worker - 1], until)
            case "sigterm" | "sigterm twice" | "sigterm all" | "sigterm all twice":
                for each in group.hosts if "all" in fault.kind else [host]:
                    each.sigterm()
                    if "twice" in fault.kind:
                        again = fault.seconds if "all" in fault.kind else self.random.choice((0.2, 2.0, 12.0))
                        scheduler.call_at(scheduler.now + again, each.sigterm)
            case "interrupt twice":
                host.interrupt()
                scheduler.call_at(scheduler.now + fault.seconds, host.interrupt)
                check = self.promises.a_second_interrupt_ends_at_once
                scheduler.call_at(scheduler.now + fault.seconds + 1, lambda: check(host))
            case "second start":
                self._launch()
            case "late host":
                self._late = min(fault.seconds, 40.0)
            case "nan":
                number, tells = self.random.randrange(self.plan.steps), self.random.random() < 0.5
                if not group.has_glitched:
                    group.glitch = (number, tells and not self.plan.skip)
            case "drift":
                host.drifts = True
            case "block":
                self._block(group)
            case "poison":
                self._poison()
            case "clock":
                host.clock.wall += self.random.choice((-1e6, 1e6))
            case "rot":
                self._rot()
            case "cut line":
                self._cut_line()
        self.changed()

    def _block(self, group: Group) -> None:
        """Lets no collective of a group return, and checks that its processes end."""
        group.is_blocked = True
        for host in group.hosts:
            when = self.scheduler.now + FIRST_STEP_SECONDS + 60
            self.scheduler.call_at(when, lambda host=host: self.promises.a_first_step_that_blocks_is_ended(host))

    def _part(self, host: Host, other: Host, until: float) -> None:
        """Cuts two hosts of a group from each other: its collectives wait, too."""

        def end() -> None:
            self.wire.restore(host.address, other.address)
            for group in self.groups:  # a later one may be on these hosts
                self.scheduler.wake_all(group.collective)

        host.hurt = other.hurt = True
        self.wire.part(host.address, other.address)
        self.scheduler.call_at(until, end)

    def restore_network(self, host: Host) -> None:
        if host.cut and not host.frozen:
            self.wire.restore(host.address)
            self.changed()

    def _rot(self) -> None:
        newest = self.promises.newest_whole
        folder = f"{CHECKPOINTS}step-{newest:08d}/"
        urls = sorted(url for url in self.bucket.objects if url.startswith(folder))
        if newest and urls:
            url = self.random.choice(urls)
            before = self.bucket.objects[url]
            data = bytearray(before.data)
            data[self.random.randrange(len(data))] ^= 0x40
            self.rotten = self.damaged = True
            self.rotten_at = self.scheduler.now
            self.scheduler.note(f"{url} rots")
            whole = self.hidden_rot.get(before.generation, (0, before))[1]
            self.hidden_rot[self.bucket.generations + 1] = (newest, whole)
            self.bucket.put(url, bytes(data), "world")

    def _cut_line(self) -> None:
        urls = sorted(url for url in self.bucket.objects if url.startswith(f"{RUN}/metrics/"))
        if urls:
            data = self.bucket.objects[urls[-1]].data
            self.bucket.put(urls[-1], data[: max(1, len(data) - 9)], "world")

    def _poison(self) -> None:
        """Makes the newest checkpoint unusable, if an older whole one exists that retention keeps."""
        newest, generation = self.promises.newest_whole, self.generation_of(self.promises.newest_whole)
        has_older = self.plan.keep_last > 1 and self.promises.find_whole()[1:-1]
        if self.poisoned is None and generation and has_older and newest < self.plan.steps:
            self.poisoned, self._hidden_poison = newest, generation
            self.disturbed = self.damaged = True

    def is_poisoned(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is the unusable one."""
        return self.generation_of(step) == self._hidden_poison > 0

    def generation_of(self, step: int) -> int:
        """Returns the generation of a step's manifest; 0 if there is none."""
        manifest = self.bucket.objects.get(f"{CHECKPOINTS}step-{step:08d}/{MANIFEST}")
        return manifest.generation if manifest else 0

    def notice_poison(self) -> None:
        """Counts the poisoned checkpoint as damaged, because a step after it was not finite."""
        self.poisoned_generation = self._hidden_poison
        self.poison_noticed = min(self.poison_noticed, self.scheduler.now)
        self.promises.newest_whole = self.promises.find_whole()[0]

    def refuses(self, group: Group) -> bool:
        """Returns whether a group may exit for good: two, or one after the poisoned checkpoint, were not finite."""
        glitches = [each.glitch[0] for each in self.groups if each.glitch is not None]
        poisoned = self.poisoned if self.poisoned_generation > 0 else None
        return len(glitches) > 1 or (poisoned is not None and not {poisoned - 1, poisoned}.isdisjoint(glitches))

    def treat(self, request: Request) -> Treatment:
        """Returns the outcome of a request to storage."""
        rand, now = self.random.random, self.scheduler.now
        before, after, fails = rand() * self.jitter, rand() * 0.1, ""
        host = self._hosts.get(self.scheduler.current.process) if self.scheduler.current else None
        if host is not None and host.cut:
            return Treatment(30.0, 1.0, "before")
        self._active = [(until, fault) for until, fault in self._active if until > now]
        for _, fault in self._active:
            is_checkpoint = request.url.startswith(CHECKPOINTS.rstrip("/"))
            if fault.kind == "storm" and rand() < fault.rate:
                fails, after = self.random.choice(("before", "after")), after + 10 * rand()
            elif fault.kind == "slow":
                before += fault.seconds * rand()
            elif fault.kind == "forbidden" and host is not None and host.worker in (0, fault.worker):
                before, after, fails = 0.1, 0.0, "before"  # a 403 is not tried again
            elif fault.kind == "quota" and rand() < fault.rate:
                before, fails = 120 * rand(), "before" if rand() < 0.3 else ""  # a 429 is
            elif fault.kind == "full" and request.kind == WRITE and request.size > 64:
                fails = "before"
            elif fault.kind == "telemetry" and not is_checkpoint and not _is_claim(request) and not is_export(request):
                fails, after = "before", after + 20 * rand()
        lates = [self._count(waiting, request, host, now + before, after) for waiting in list(self._awaited)]
        late = max(lates, key=sum, default=(0.0, 0.0))  # one request is not late twice: storage gives up after 120 s
        before, after = before + late[0], after + late[1]
        flips = self._flips_next and request.kind == WRITE and request.name.startswith("part-")
        self._flips_next = self._flips_next and not flips
        flips, self._misreads = flips or self._misreads, False
        return Treatment(before, after, fails, flips)

    def _count(
        self, waiting: list[Any], request: Request, host: Host | None, effect: float, after: float
    ) -> tuple[float, float]:
        """Applies a fault at the request that triggers it. Returns additional seconds until its effect and answer."""
        fault, left = waiting
        kind, name, _ = fault.request
        if request.kind != kind or name not in request.url:
            return 0.0, 0.0
        waiting[1] = left - 1
        if left > 1:
            return 0.0, 0.0
        self._awaited.remove(waiting)
        if fault.kind == "wrong read":
            self.scheduler.note("strikes: a wrong read")
            self._misreads = True
            return 0.0, 0.0
        if fault.kind in ("late", "slow request") and host is not None:
            self.scheduler.note(f"strikes: late by {fault.seconds:.1f} s")
            host.group.delayed = True
            host.group.disturbed |= fault.kind == "late" and fault.seconds > 10  # time-outs may count it
            return (fault.seconds, 0.0) if fault.moment == "before" else (0.0, fault.seconds)
        when = self.scheduler.now if fault.moment == "before" else effect + after / 2
        self.scheduler.call_at(when, lambda: self.strike(fault, host))
        return 0.0, 0.0


def _is_claim(request: Request) -> bool:
    """Returns whether a request is about the claims of starts or about the run's result."""
    is_claim = request.name.startswith("attempt-") and request.name.endswith(".json") and ".end." not in request.name
    return is_claim or request.name in ("attempts", "summary.json")
