"""Optional features and endings of a share of the simulated runs: skipped steps (`train.on_nonfinite: skip`), export of
the model, uploads to the Hub, storage as slow as it may be, and repeated requests to stop. They have random numbers of
their own, so that no other run changes.

Simulates the Hub and the uploading processes, and has the promises about these features.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.trainer.bucket import Request, Stored
from tests.simulation.trainer.evaluations import BrokenPromises
from tests.simulation.trainer.plan import RUN, Fault, Plan
from training.checkpoint.format import Manifest
from training.checkpoint.reader import checkpoint_name
from training.checkpoint.tensors import decode
from training.models.export import PREFIX
from training.models.hub import PushEnd
from training.models.hugging_face import CONFIG, WEIGHTS

TOKENIZER = "gs://data/t"
_MODEL = f"{RUN}/model"
TOKENIZER_FILES = {f"{TOKENIZER}/tokenizer.json": b'{"model": {}}', f"{TOKENIZER}/vocab.txt": b"[PAD]\n"}
HUB_SECONDS = 20.0  # hub.wait_seconds
_SKIPPED: tuple[frozenset[int], ...] = tuple(map(frozenset, ((), (1,), (3,), (0, 1, 2), (0, 2, 4, 6), (2, 5, 9))))
_LONGEST_WRITE = 115.0  # seconds; storage itself gives up after 120
_SLOW = (("write", "part-"), ("write", "part-"), ("write", "manifest.json"), ("write", WEIGHTS), ("read", "part-"))
_HUB_FAULTS = ("", "", "", "refuses", "hangs", "noise", "raises", "slow")


def add_features(plan: Plan) -> Plan:
    """Returns the plan with features, each for a share of the seeds."""
    rng = random.Random(f"ends {plan.seed}")
    kinds = [rng.random() < share for share in (0.2, 0.15, 0.15, 0.08, 0.06, 0.1, 0.05, 0.03)]
    changes = (_skip, _export, _push, _slow_storage, _stop_twice, _strangers, _drift, _block)
    for is_so, change in zip(kinds, changes, strict=True):
        plan = change(rng, plan) if is_so else plan
    return plan


def _skip(rng: random.Random, plan: Plan) -> Plan:
    """Skips steps that are not finite: only a save notices such a state, and each checkpoint stays usable."""
    faults = tuple(replace(fault, kind="nan") if fault.kind == "poison" else fault for fault in plan.faults)
    if rng.random() < 0.5:
        nan = Fault("nan", rng.uniform(0.5, 4.0), worker=0)
        faults = (nan,) if rng.random() < 0.7 else (*faults, nan)
        plan = replace(plan, every_steps=rng.randint(1, 3), hosts=max(2, plan.hosts), background=True)
    return replace(plan, skip=True, skipped=rng.choice(_SKIPPED), faults=faults)


def _export(rng: random.Random, plan: Plan) -> Plan:
    if rng.random() < 0.5:
        kind, number = rng.choice(("kill", "freeze", "sigterm", "storm", "second start")), rng.randint(1, 2)
        name, moment = rng.choice((CONFIG, WEIGHTS, "vocab.txt")), rng.choice(("before", "after"))
        request, seconds = ("write", name, number), rng.uniform(2, 30)
        plan = plan.also(Fault(kind, request=request, moment=moment, seconds=seconds, rate=0.3))
    elif rng.random() < 0.6:  # it takes minutes, and hosts are asked to stop meanwhile
        plan = replace(plan, hosts=rng.randint(2, 4), faults=(), keep_last=2, export=True)
        slow = [_slow_request(rng, ("write", name, 1), 30.0, 80.0) for name in (CONFIG, WEIGHTS)]
        kind = rng.choice(("sigterm", "sigterm all"))
        stop = Fault(kind, request=("write", CONFIG, 1), worker=rng.randrange(4))
        plan = plan.also(*slow, *([stop] if rng.random() < 0.8 else []))
    return replace(plan, export=True)


def _slow_request(rng: random.Random, request: tuple[str, str, int], least: float, most: float) -> Fault:
    moment = rng.choice(("before", "after"))
    return Fault("slow request", request=request, moment=moment, seconds=rng.uniform(least, most))


def _strangers(rng: random.Random, plan: Plan) -> Plan:
    """Another program has trained in the run's folder, and no step of it was finite."""
    return replace(plan, strangers=True)


def _drift(rng: random.Random, plan: Plan) -> Plan:
    """The weights of a host differ after the last save."""
    drift = Fault("drift", rng.uniform(0.0, 9.0), worker=rng.randint(1, 3))
    return replace(plan, hosts=max(2, plan.hosts)).also(drift)


def _block(rng: random.Random, plan: Plan) -> Plan:
    """The collectives of the first attempt never return, from its first step on."""
    return replace(plan, faults=(Fault("block", 0.1, worker=0),), step_seconds=0.5)


def _push(rng: random.Random, plan: Plan) -> Plan:
    return replace(plan, hub=rng.choice(("end", "checkpoint", "checkpoint")), hub_fault=rng.choice(_HUB_FAULTS))


def _slow_storage(rng: random.Random, plan: Plan) -> Plan:
    """Makes a request nearly as slow as storage may be, which must not make hosts lose each other."""
    request = (*rng.choice(_SLOW), rng.randint(1, 3))
    fault = _slow_request(rng, request, 0.4 * _LONGEST_WRITE, _LONGEST_WRITE)
    others = () if rng.random() < 0.8 else plan.faults
    export = plan.export or request[1] == WEIGHTS
    return replace(plan, faults=(*others, fault), hosts=max(2, plan.hosts), jitter=0.2, export=export)


def _stop_twice(rng: random.Random, plan: Plan) -> Plan:
    """Requests a stop twice: the engines of all hosts and the launcher do, or the user presses Ctrl-C again."""
    kind = rng.choice(("sigterm all twice", "sigterm all twice", "interrupt twice"))
    return plan.also(Fault(kind, rng.uniform(1.0, 25.0), worker=0, seconds=rng.uniform(0.1, 13.0)))


class Upload:
    """An upload of the simulated Hub, as `training.models.hub.Push`."""

    def __init__(self, hub: SimulatedHub, host, step: int, seconds: float) -> None:
        self.host, self._hub, self._step = host, hub, step
        self._done_at = host.machine.clock.monotonic() + seconds

    def poll(self) -> PushEnd | None:
        if self.host.machine.clock.monotonic() < self._done_at:
            return None
        self.kill()
        return self._hub.end(self._step)

    def kill(self) -> None:
        if self in self._hub.uploads:
            self._hub.uploads.remove(self)


class SimulatedHub:
    """The Hub, which starts the uploads of each host; checks promises about them."""

    def __init__(self, world) -> None:
        self._world, self._fault = world, world.plan.hub_fault
        self.steps: list[int] = []  # uploaded
        self.uploads: list[Upload] = []

    def push(self, host, arguments: Sequence[str]) -> Upload:
        world, step = self._world, int(arguments[arguments.index("--step") + 1])
        world.scheduler.note(f"uploads step {step}")
        if world.generation_of(step) == 0 and step >= world.promises.newest_whole and not world.rotten:
            world.promises.broken("what is uploaded is committed", f"{host.name} uploads step {step}, which is not")
        self.uploads = [upload for upload in self.uploads if upload.host.code is None]
        if any(upload.host is host for upload in self.uploads):
            world.promises.broken("one upload at a time", f"{host.name} uploads step {step} beside another one")
        if self._fault == "raises":
            raise FileNotFoundError("python")
        seconds = {"hangs": math.inf, "slow": 15.0}.get(self._fault, 3.0) * (0.5 + world.random.random())
        self.uploads.append(Upload(self, host, step, seconds))
        return self.uploads[-1]

    def end(self, step: int) -> PushEnd:
        if self._fault == "refuses":
            return PushEnd(1, (), ("tpu-train: error: a/b was not pushed to the Hub: 503",))
        if self._fault == "noise":
            return PushEnd(0, ('{"step": "none"}', "Segmentation fault"), ())
        if self._world.generation_of(step) == 0:
            return PushEnd(2, (), (f"tpu-train: error: no committed step {step}",))
        self.steps.append(step)
        return PushEnd(0, (json.dumps({"step": step, "commit": f"https://hub/{step}"}), "warning: [1]"), ("bye",))


class FeaturePromises(BrokenPromises):
    def other_object_written(self, url: str, stored: Stored, by: str) -> None:
        """Checks a written object that is not part of a checkpoint."""
        if url == f"{_MODEL}/{WEIGHTS}":
            self.weights_come_last(by)
            self.what_is_exported_is_the_last_state(stored, by)
        elif url.endswith("/summary.json"):
            self.the_summary_is_true(json.loads(stored.data), by)
            self.the_summary_has_the_last_and_the_best(json.loads(stored.data), by)

    def a_checkpoint_counts_what_was_skipped(self, url: str, step: int, state: object, by: str) -> None:
        """A checkpoint has the number of skipped steps and the last finite loss, over all attempts."""
        plan, losses = self._plan, self._world.curriculum.losses
        done = [number for number in range(step) if number not in plan.skipped]
        expected = (step - len(done), losses[done[0]] if done else None, losses[done[-1]] if done else None)
        assert isinstance(state, dict)
        seen = (state["skipped_steps"], state["first_loss"], state["last_loss"])
        if seen != expected:
            self.broken("skipped steps are counted", f"{by} committed {url} with {seen} instead of {expected}")

    def weights_come_last(self, by: str) -> None:
        """When the weights are written, all other files of the model folder are there."""
        names = (CONFIG, *(url.rpartition("/")[2] for url in TOKENIZER_FILES))
        missing = [name for name in names if f"{_MODEL}/{name}" not in self._world.bucket.objects]
        if missing:
            self.broken("the weights of an export come last", f"{by} wrote them before {', '.join(missing)}")

    def what_is_exported_is_the_last_state(self, stored: Stored, by: str) -> None:
        """The exported weights are those after the last step, without other state."""
        state = self._world.curriculum.states[self._plan.steps]
        expected = {name: state[name].tobytes() for name in state if name.startswith(PREFIX)}
        seen = {PREFIX + name: bytes(view) for name, (_, view) in decode(stored.data).items()}
        if seen != expected:
            self.broken("what is exported is the last state", f"{by} exported other weights")

    def the_summary_is_true(self, summary: dict[str, object], by: str) -> None:
        """The summary has the number of skipped steps, and a step that is on the Hub."""
        plan, hub = self._plan, summary["hub"]
        skipped = len([number for number in plan.skipped if number < plan.steps])
        if summary["skipped_steps"] != skipped:
            self.broken("skipped steps are counted", f"{by}: {summary['skipped_steps']} instead of {skipped}")
        if isinstance(hub, dict) and hub["step"] not in (None, *self._world.hub.steps):
            self.broken("the summary says what is on the Hub", f"{by}: {hub}, and there is {self._world.hub.steps}")
        stopped = self._world.group(by.partition(".")[0]).asked_to_stop  # another attempt may have uploaded it
        well = plan.steps in self._world.hub.steps and not plan.hub_fault and not self._world.rotten and not stopped
        if isinstance(hub, dict) and hub["step"] != plan.steps and (well or hub["error"] is None):
            self.broken("the summary says what is on the Hub", f"{by}: {hub}, and there is {self._world.hub.steps}")

    def finished_means_exported(self, host) -> None:
        """A process that exits with 0 has exported the model, and uploaded it if the Hub had no fault."""
        plan, world = self._plan, self._world
        if host.group.drifted:
            self.broken("hosts with different weights do not finish", f"{host.name} exits with 0")
        if plan.export and f"{_MODEL}/{WEIGHTS}" not in world.bucket.objects:
            self.broken("0 means exported", f"{host.name} exits with 0, and there is no model")
        # An upload that is under way when its host is asked to stop is given up, with a warning.
        stopped = host.group.asked_to_stop and any("hub: not done when" in line for line in host.lines)
        excused = plan.hub_fault or world.disturbed or world.rotten or host.hurt or stopped
        if plan.hub and host.worker == 0 and not excused and plan.steps not in world.hub.steps:
            self.broken("0 means uploaded", f"{host.name} exits with 0, and the Hub has {world.hub.steps}")

    def a_second_interrupt_ends_at_once(self, host) -> None:
        if host.code is None and not host.hurt:
            self.broken("a second Ctrl-C ends a process", f"{host.name} still runs")


def is_export(request: Request) -> bool:
    """Returns whether a request is part of the model's export, without which a run does not finish."""
    return request.url.startswith(TOKENIZER) or "/run/model/" in request.url


def put_strange_records(world, manifest: Manifest | None = None) -> None:
    """Puts another program's records of steps that were not finite: of all, or of the first after a checkpoint."""
    name, step = (checkpoint_name(manifest), manifest.step) if manifest else (None, 0)
    for number in [step] if manifest else range(world.plan.steps):
        record = {"step": number, "restored": step, "checkpoint": name, "program": "another"}
        url = f"{RUN}/attempts/attempt-0000.{step}-{number}.nonfinite.json"
        world.bucket.put(url, json.dumps(record).encode(), "world")


def put_tokenizer(world) -> None:
    for url, data in TOKENIZER_FILES.items():
        world.bucket.put(url, data, "world")
