"""The scenario of a simulated run: what its users do and which faults occur, drawn from one seed before it begins.

Most scenarios have a *theme*: they concentrate on one kind of trouble at one moment, so that interleavings that are
rare among all simulated runs become common in some. "anything" is the theme of the others.
"""

import copy
import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.tpu_vm.host_scripts import LOG_BYTES
from tests.simulation.launcher import hangs
from tests.simulation.launcher.bucket import TRAINER
from tests.simulation.launcher.faults import Fault
from tests.simulation.launcher.hangs import Hang, Slow
from tests.simulation.launcher.jobs import Plan
from training.accelerators import accelerator

_ZONE = "us-central2-b"
_SLICES = (("v4-8", _ZONE), ("v4-16", _ZONE), ("v4-16", _ZONE), ("v4-32", _ZONE))
_PLACES = (
    ("v3-8", "us-central1-a", "europe-west4-a"),
    ("v2-32", "us-central1-a", "europe-west4-a"),
    ("v2-8", "us-central1-b", "us-central1-c", "europe-west4-a"),
)  # type, zones
_FILES = 160  # configuration files: reading one takes as long as simulating a run
_CANDIDATES = (
    {"accelerator_type": "v4-8", "capacity": ["spot", "on-demand"]},
    {"accelerator_type": "v3-8", "zones": ["us-central1-a"]},
    {"accelerator_type": "v2-8", "zones": ["us-central1-b"]},
)
_ACTIONS = ("kill|kill|kill|ctrl-c|ctrl-c|stop|asleep|stop|logs|second run|bob down|bob up|gc|bob gc|status|status"
            "|||||||||||||")  # fmt: skip
_RIVAL_ACTIONS = ("watch", "watch", "supervise", "stop", "logs")
_RIVAL_TIMES = ("run", "start", "start", "recovery", "restart", "end")
RETRIES, HOSTS = "preemption_retries", "hosts"  # needs of themes


@dataclass(frozen=True)
class Action:
    kind: str
    after: float  # seconds after `anchor`
    anchor: str = "run"
    """A moment of the run: "up" and "run", the first such commands; those of `Fault.anchor`; "prepare", of the first
    host; "request", when one is in the queue; "hang", when a program does; "end", when one ends by itself."""


@dataclass(frozen=True)
class Scenario:
    theme: str
    file: Mapping[str, Any]  # the content of the configuration file
    leftover: str
    plans: tuple[Plan, ...]
    actions: tuple[Action, ...]
    faults: tuple[Fault, ...]
    observe_every: float  # seconds: 1 of the launcher for up to 16 hosts, 4 for 64
    page: tuple[int, int]  # how many bytes and last records of a log one observation holds
    gke: bool = False  # whether it runs on a cluster instead of TPU VMs
    in_bucket: bool = False  # whether the ledger is in a bucket, from which another workstation can go on
    kill_at: int = 0  # the number of the write to a ledger or to the record of requests that kills its command
    half_written: float = 0.0  # the part of that write that is done
    refused_from: float = math.inf  # the first host that refuses the ssh connections of ann's workstation, not gcloud's
    env_file: bool = False
    overlay: bool = False


@dataclass(frozen=True)
class Theme:
    """One kind of trouble."""

    name: str
    faults: tuple[str, ...] = ()  # kinds, each with "@" and an anchor of its own or without
    count: tuple[int, int] = (1, 3)  # the least and the greatest number of faults
    anchors: tuple[str, ...] = ("start",)  # the moments that faults are anchored at
    spread: float = 20.0  # seconds after the anchor within which they happen
    actions: tuple[str, ...] = ()  # one action of each group, separated by "|", is done; "": none
    moments: tuple[str, ...] = ("start",)  # the moment of all actions is one of these
    together: float = 30.0  # seconds after the moment within which they happen
    plans: tuple[str, ...] = ()  # kinds of programs of the first attempts
    leftovers: tuple[str, ...] = ("",)
    needs: tuple[str, ...] = ()  # keys that its configuration files have, but 0; HOSTS: more than one host
    seconds: tuple[float, float] | None = None  # the least and the greatest time of a program
    weight: float = 1.0


THEMES = (
    Theme("anything", weight=9.0, count=(0, 8), spread=45.0, actions=(_ACTIONS,) * 3, moments=("run",), together=80.0,
          faults=("reboot", "reboot", "hang", "cut", "cut", "die", "engine", "disk", "clock", "preempt", "preempt",
                  "preempt", "maintenance", "unavailable", "unavailable", "rate", "permission", "lost", "busy", "slow",
                  "stockout", "stale", "stale", "dead ssh", "ssh loses answers", "offline"),
          anchors=("beginning", "start", "start", "start", "restart", "recovery", "recovery", "down"),
          plans=("finish", "finish", "finish", "fail", "fail", "save", "bad input", "stall"),
          leftovers=("", "", "", "", "bob's", "a stranger's", "preempted", "stopped", "deleting")),
    Theme("hangs", weight=6.0, faults=("hang", "cut", "offline", "dead ssh", "die", "die", "die"), count=(0, 1),
          plans=("stall", "stall", "finish"), spread=60.0, actions=("logs|logs|logs|asleep|status",), together=200.0,
          needs=("stall_minutes", HOSTS)),
    Theme("a cluster", weight=7.0, count=(0, 3), spread=25.0,
          anchors=("beginning", "prepare", "start", "start", "recovery", "end"),
          faults=("preempt", "preempt", "maintenance", "delete", "unavailable", "slow", "lost", "offline", "rate",
                  "permission"),
          moments=("run", "prepare", "start", "recovery", "end"), together=40.0,
          actions=("kill|ctrl-c|stop|down|second run|new run|asleep|logs|status",
                   "kill|ctrl-c|stop|second attach|second run|logs"),
          plans=("finish", "finish", "fail", "save", "bad input"), needs=(RETRIES,)),
    Theme("two terminals", actions=("second run|second attach", "stop|kill|ctrl-c"), together=7.0, weight=2.0,
          moments=("run", "start", "prepare", "recovery"), faults=("reboot", "preempt", "die"), count=(0, 2),
          needs=(RETRIES,)),
    Theme("the end of a recovery", faults=("preempt", "reboot", "die"), actions=("stop|stop|ctrl-c|kill|asleep",),
          moments=("recovery",), together=50.0, needs=(RETRIES,)),
    Theme("standstills", faults=("hang", "cut", "offline", "dead ssh", "ssh loses answers", "full"),
          plans=("stall", "finish"), spread=40.0, seconds=(5.0, 150.0), needs=("stall_minutes",)),
    Theme("memory", faults=("offline", "cut", "reboot", "hang", "dead ssh"), plans=("memory",), count=(0, 2),
          needs=("failure_retries",)),
    Theme("a queue in bad api_fault", faults=("unavailable", "rate", "lost", "slow", "stockout", "busy", "offline"),
          anchors=("beginning", "request", "up again"), actions=("kill|ctrl-c",), moments=("request", "up"),
          needs=("queued",)),
    Theme("a queue that takes back", faults=("preempt", "unavailable", "lost", "stockout"),
          anchors=("start", "recovery"), count=(2, 4), needs=(RETRIES, "queued")),
    Theme("no capacity", faults=("stockout", "stockout", "lost", "preempt"), anchors=("beginning", "recovery", "start"),
          count=(2, 4), needs=(RETRIES,)),
    Theme("reboots", faults=("reboot", "reboot", "maintenance", "preempt"), plans=("finish", "fail", "save"),
          needs=(RETRIES,)),
    Theme("asleep", actions=("asleep", "logs|kill|"), moments=("start", "recovery", "prepare"), weight=2.0,
          faults=("reboot", "preempt", "cut@awake", "dead ssh@awake"), count=(0, 2), spread=5.0, needs=(RETRIES,)),
    Theme("crashes", actions=("kill", "kill", "kill|ctrl-c"), moments=("prepare", "start", "run", "recovery"),
          faults=("cut", "reboot", "preempt"), count=(0, 1), needs=(RETRIES,)),
    Theme("lost answers", faults=("lost", "ssh loses answers", "dead ssh"), count=(2, 4),
          anchors=("beginning", "start", "recovery", "down"), needs=(RETRIES,)),
    Theme("old lists", faults=("stale",), actions=("gc|bob gc", "bob up|bob down|second run"),
          moments=("run", "up", "start"), anchors=("beginning",), spread=60.0,
          leftovers=("", "preempted", "bob's", "deleting", "a stranger's")),
    Theme("what was left", faults=("unavailable", "busy", "lost", "slow"), anchors=("beginning",), spread=140.0,
          leftovers=("preempted", "stopped", "deleting", "bob's", "a stranger's", "ready", "creating")),
    Theme("a hard farewell", faults=("busy", "unavailable", "lost", "slow", "preempt", "offline"), anchors=("down",),
          count=(1, 4), spread=6.0),
    Theme("stops", faults=("hang", "cut", "dead ssh", "ssh loses answers", "offline"), count=(0, 2),
          actions=("stop",), moments=("run", "prepare", "start", "restart"), together=20.0, spread=25.0),
    Theme("clearing up", faults=("stale", "slow", "preempt@start"), count=(1, 2), anchors=("up",), spread=10.0,
          actions=("gc", "gc|"), moments=("up", "start"), together=90.0, leftovers=("preempted", "preempted", "")),
    Theme("a farewell to the dead", actions=("kill", "down"), moments=("up", "up", "request", "recovery"), together=7.0,
          faults=("slow", "slow", "preempt@start"), anchors=("up",), count=(2, 3), spread=0.5, needs=(RETRIES,)),
    Theme("ends that prove themselves", faults=("reboot", "reboot", "offline"), count=(1, 3), anchors=("end",),
          spread=6.0, plans=("save", "bad input", "memory", "finish"), needs=(RETRIES,)),
    Theme("any deed", actions=("down|down|stop|second run|new run|gc", "down|stop|second run|new run|second attach"),
          moments=("up", "run", "prepare", "start", "recovery", "restart", "end", "up again", "down"), together=40.0,
          faults=("reboot", "preempt", "die", "unavailable", "lost"), count=(0, 2), anchors=("start", "recovery"),
          plans=("finish", "fail"), needs=(RETRIES,)),
    Theme("two workstations",
          actions=("other run|other up|other down", "other run|other down|other stop|other gc|kill"),
          moments=("up", "run", "prepare", "start", "recovery", "restart", "end"), together=40.0,
          faults=("reboot", "preempt", "die", "unavailable", "lost"), count=(0, 2), anchors=("start", "recovery"),
          plans=("finish", "fail"), needs=(RETRIES,)),
    Theme("a colleague", faults=("delete", "delete", "halt", "replace", "old describe", "disk", "engine",
          "delete@round", "reboot@start"), count=(1, 6), spread=12.0, weight=2.0,
          anchors=("up", "start", "start", "recovery", "recovery", "made again", "down"), plans=("finish", "fail"),
          needs=(RETRIES,)),
    Theme("partitions", faults=("filter", "filter", "connection", "cut", "cut", "hang"), weight=2.0,
          plans=("finish", "fail", "save"), anchors=("start", "start", "recovery"), spread=25.0,
          needs=(RETRIES, HOSTS)),
    Theme("hosts that end apart", faults=("reboot", "cut", "filter", "hang", "die", "offline"), count=(0, 2),
          anchors=("end",), spread=140.0, plans=("finish",), needs=(RETRIES, HOSTS)),
    Theme("refusals", faults=("signed out", "signed out", "quota", "preempt", "reboot", "lost"), count=(1, 3),
          spread=20.0, anchors=("beginning", "start", "recovery", "recovery", "down"), plans=("finish", "fail"),
          needs=(RETRIES,)),
    Theme("a date that jumps", faults=("date", "date", "clock", "clock", "cut", "reboot", "preempt"),
          anchors=("up", "start", "recovery", "end"), spread=25.0, plans=("finish", "fail", "save"),
          actions=("kill|other run|stop|gc|logs",), needs=(RETRIES,)),
    Theme("zones", faults=("stockout", "stockout", "preempt", "lost", "stale"), count=(1, 4),
          anchors=("beginning", "up", "start", "recovery", "down"), spread=30.0, plans=("finish", "fail"),
          actions=("kill|ctrl-c|stop|gc|second run|bob up|bob down",), moments=("up", "up", "start", "recovery"),
          leftovers=("", "ready", "creating", "preempted", "preempted", "deleting", "bob's", "stopped"),
          needs=(RETRIES, "zones")),
    Theme("expiry", actions=("gc", "gc|bob gc|other gc|logs"), moments=("run", "start", "end"), together=400.0,
          faults=("date", "stale", "reboot", "preempt"), count=(0, 2), plans=("finish", "fail"),
          leftovers=("", "", "preempted", "bob's"), needs=(RETRIES, "expires_hours")),
    Theme("ssh is closed", faults=("no ssh", "no ssh", "offline", "reboot", "cut"), count=(1, 3), plans=("finish",),
          anchors=("start", "start", "recovery", "end", "up"), spread=60.0, seconds=(60.0, 500.0),
          actions=("asleep|kill|stop|logs",), together=200.0, needs=(RETRIES,)),
    Theme("a start that fails", faults=("disk", "engine", "old describe", "old describe", "cut", "dead ssh", "delete"),
          anchors=("beginning", "prepare", "prepare", "recovery"), count=(2, 4), spread=8.0, plans=("finish",),
          actions=("stop|kill|logs|status",), moments=("prepare",), together=20.0, needs=(RETRIES,), weight=2.0),
    Theme("a bad host", faults=("die@start", "die@start", "reboot@start", "stockout", "lost", "slow", "old describe"),
          count=(2, 5), anchors=("recovery", "recovery", "round"), spread=10.0, plans=("finish",),
          needs=(RETRIES, "replace_after", HOSTS)),
    Theme("hosts that boot", faults=("outage", "outage", "signed out", "permission", "no ssh", "offline"),
          anchors=("contact",), spread=3.0, count=(1, 3), actions=("kill|ctrl-c|status|bob gc",), moments=("contact",),
          together=400.0),
    Theme("a drought", faults=("drought", "drought", "lost", "slow", "preempt"), count=(1, 2), spread=30.0,
          anchors=("beginning", "beginning", "recovery"), actions=("kill|ctrl-c|stop|status",),
          moments=("request", "up"), together=900.0, needs=(RETRIES, "queued")),
)  # fmt: skip


def draw(seed: int) -> Scenario:
    """Draws the scenario of a simulated run."""
    rng = random.Random(f"scenario {seed}")
    (theme,) = rng.choices(THEMES, [each.weight for each in THEMES])
    gke, of_hangs, drought = theme.name == "a cluster", theme.name == "hangs", theme.name == "a drought"
    file = copy.deepcopy(rng.choice(_files_of(theme)))
    plans = _draw_plans(theme, file, rng)
    at, kinds = rng.choice(theme.moments), [rng.choice(group.split("|")) for group in theme.actions]
    actions = tuple(Action(kind, rng.uniform(0.0, theme.together), at) for kind in kinds if kind)
    faults = _draw_faults(theme, rng)
    if of_hangs:
        plans, faults = _draw_hangs(plans, _hosts_of(file), rng), faults if rng.random() < 0.5 else ()
    if rng.random() < (0.8 if of_hangs else 0.04):
        actions += (Action("explain", rng.uniform(0.0, 25.0), rng.choice(("start", "hang")) if of_hangs else "start"),)
    if gke:
        for section, keys in (("slice", ("queued", "expires_hours")), ("run", ("budget", "replace_after"))):
            file[section] = {key: value for key, value in file[section].items() if key not in keys}
        file["gke"] = {"secrets": {"HF_TOKEN": "hf/token"}}
    elif rng.random() < 0.05:
        kind, moment = rng.choice(("exec", "refused exec")), rng.choice(("start", "restart"))
        actions += (Action(kind, rng.uniform(0.0, 25.0), moment),)
    if rng.random() < 0.04:
        moment = rng.choice(("run", "prepare", "start", "start", "recovery", "down"))
        faults += (Fault("full", moment, rng.uniform(0.0, 30.0), rng.choice((1.0, 10.0, 100.0)), 0),)
    one_workstation = not gke and not any(action.kind.startswith("other") for action in actions)
    races = one_workstation and "zones" not in file["slice"] and rng.random() < (0.8 if drought else 0.2)
    if races:
        limit = rng.choice((4.0, 10.0, 40.0) if drought else (None, None, 10.0, 40.0))
        file["slice"] |= {"candidates": _CANDIDATES} | ({"price_limit": limit} if limit is not None else {})
    if in_bucket := one_workstation and rng.random() < 0.15:
        file |= TRAINER
        del file["run"]["command"]
        actions += _draw_rivals(rng)
        faults += tuple(
            Fault("bucket", rng.choice(_RIVAL_TIMES), rng.uniform(0, 20), rng.uniform(1, 90), 0)
            for _ in range(rng.choice((0, 0, 1, 2)))
        )
    return Scenario(
        theme.name, file, rng.choice(theme.leftovers), plans, actions, faults, gke=gke, in_bucket=in_bucket,
        observe_every=rng.choice((1.0, 2.0, 3.0, 4.0)),
        page=(rng.choice((LOG_BYTES, LOG_BYTES, 20_000)), rng.choice((5000, 5000, 20))),
        kill_at=rng.randrange(1, 20) if rng.random() < (0.5 if races else 0.1) else 0,
        half_written=rng.choice((0.0, 0.5, 1.0)),
        refused_from=rng.choice((0, 1)) if rng.random() < 0.08 else math.inf,
        env_file=not gke and rng.random() < 0.3,
        overlay=not gke and rng.random() < 0.15,
    )  # fmt: skip


def _draw_rivals(rng: random.Random) -> tuple[Action, ...]:
    """Draws how another workstation takes over the run of a dead one, or stops or shows it."""
    moment, at = rng.choice(_RIVAL_TIMES), rng.uniform(0.0, 30.0)
    actions = [Action(rng.choice(("kill", "kill", "asleep", "status")), at, moment)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        actions.append(Action(f"rival {rng.choice(_RIVAL_ACTIONS)}", at + rng.uniform(0.0, 90.0), moment))
    return tuple(actions)


def _draw_hangs(plans: tuple[Plan, ...], hosts: int, rng: random.Random) -> tuple[Plan, ...]:
    """Makes programs tell their progress: some hang in a phase, others are slow in all."""

    def tell(plan: Plan) -> Plan:
        host = rng.randrange(hosts)
        hang = Hang(rng.choice(hangs.PHASES), rng.choice(hangs.KINDS), host) if plan.kind == "stall" else None
        slow = Slow(host, rng.choice((math.inf, 40.0))) if rng.random() < 0.5 else None
        seconds, period = rng.uniform(5.0, 400.0), rng.choice((3.0, 3e3))
        return replace(plan, tells=True, hang=hang, slow=slow, seconds=seconds, period=period)

    return tuple(map(tell, plans))


def _draw_faults(theme: Theme, rng: random.Random) -> tuple[Fault, ...]:
    drawn, anchor = [], rng.choice(theme.anchors)
    for _ in range(rng.randint(*theme.count)):
        if rng.random() < 0.3:
            anchor = rng.choice(theme.anchors)
        seconds = rng.choice((rng.uniform(1.0, 12.0), rng.uniform(10.0, 60.0), rng.uniform(30.0, 200.0)))
        kind, _, own_anchor = rng.choice(theme.faults).partition("@")
        drawn.append(Fault(kind, own_anchor or anchor, rng.uniform(0.0, theme.spread), seconds, rng.randrange(64)))
    return tuple(drawn)


@functools.cache
def _files_of(theme: Theme) -> tuple[dict[str, Any], ...]:
    """Returns the configuration files that have what a theme needs; a cluster has one zone."""
    files = [_draw_file(random.Random(f"file {number}")) for number in range(_FILES)]
    of = [{HOSTS: _hosts_of(each) > 1} | each["run"] | each["slice"] for each in files]
    return tuple(
        file for file, has in zip(files, of, strict=True)
        if all(has.get(need) for need in theme.needs) and not (theme.name == "a cluster" and "zones" in has)
    )  # fmt: skip


def _hosts_of(file: Mapping[str, Any]) -> int:
    return accelerator(file["slice"]["accelerator_type"]).hosts


def _draw_file(rng: random.Random) -> dict[str, Any]:
    """Draws the content of a configuration file; None: a key that is left out."""
    accelerator_type, zone, *others = rng.choice(_PLACES if rng.random() < 0.15 else _SLICES)
    slice_ = {
        "name": "bert",
        "accelerator_type": accelerator_type,
        "zones": [zone, *others] if others else None,
        "create_minutes": 60,
        "stockout_minutes": rng.choice((30.0, 30.0, 0.0)),
        "queued": rng.choice(({"valid_until_hours": 2}, None, None, None, None)),
        "expires_hours": rng.choice((None, None, None, 0.05)),
    }
    run = {
        "secrets": ["HF_TOKEN"],
        "environment": {"A": "b"},
        "command": ["train"],
        "preemption_retries": rng.choice((0, 1, 3, 8, 8)),
        "failure_retries": rng.choice((0, 0, 1, 2)),
        "replace_after": rng.choice((None, None, 1, 2)),
        "stall_minutes": rng.choice((None, None, 0.5)),
        "host_lost_seconds": rng.choice((20.0, 60.0)),
        "unreachable_minutes": rng.choice((30.0, 30.0, 2.0)),
        "recovery_minutes": rng.choice((60.0, 60.0, 2.0)),
        "budget": rng.choice((None,) * 9 + (0.2, 0.5, 1.0)),
    }
    sections = {"slice": slice_, "run": run, "image": {"reference": f"r/i@sha256:{'0' * 64}"}}
    given = {name: {key: value for key, value in each.items() if value is not None} for name, each in sections.items()}
    return {"project": "p", "zone": zone, **given}


def _draw_plans(theme: Theme, file: Mapping[str, Any], rng: random.Random) -> tuple[Plan, ...]:
    """Draws the programs of the first attempts; the programs of all later attempts finish."""
    kinds = [rng.choice(theme.plans) for _ in range(rng.choice((1, 1, 2)))] if theme.plans else []
    allowed = ["fail" if kind == "stall" and "stall_minutes" not in file["run"] else kind for kind in kinds]
    plans = tuple(_draw_plan(rng, kind, _hosts_of(file)) for kind in (*allowed, "finish"))
    if theme.seconds is not None:
        plans = tuple(replace(plan, seconds=rng.uniform(*theme.seconds), period=3.0) for plan in plans)
    return plans


def _draw_plan(rng: random.Random, kind: str, hosts: int) -> Plan:
    return Plan(
        "fail" if kind == "memory" else kind,
        seconds=rng.choice((rng.uniform(0.2, 5.0), rng.uniform(5.0, 30.0), rng.uniform(5.0, 60.0))),
        host=rng.randrange(hosts),
        code=137 if kind == "memory" else rng.choice((1, 1, 3, 137, 139)),
        others_hang=rng.random() < 0.3,
        saves=rng.random() < 0.85,
        save_seconds=rng.uniform(0.5, 12.0),
        period=rng.choice((0.5, 1.0, 3.0)),
        apart=rng.choice((0.0, 0.0, 0.0, 30.0, 150.0)) if kind == "finish" else 0.0,
        second=rng.randrange(hosts) if kind == "fail" and rng.random() < 0.5 else None,
    )
