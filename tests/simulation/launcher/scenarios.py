"""The scenario of a simulated run: what its users do and which faults occur, drawn from one seed before it begins.

Some scenarios are drawn from everything. The others have a *theme*: they concentrate on one kind of trouble at one
moment, so that interleavings that are rare among all simulated runs become common in some.
"""

import functools
import math
import random
from dataclasses import dataclass, replace

from tests.simulation.launcher import faults, hangs
from tests.simulation.launcher.faults import Fault
from tests.simulation.launcher.hangs import Hang, Slow
from tests.simulation.launcher.jobs import Plan

SLICES = (("v4-8", 1), ("v4-16", 2), ("v4-16", 2), ("v4-32", 4))
_PLACES = (
    ("v3-8", 1, ("us-central1-a", "europe-west4-a")),
    ("v2-32", 4, ("us-central1-a", "europe-west4-a")),
    ("v2-8", 1, ("us-central1-b", "us-central1-c", "europe-west4-a")),
)  # type, hosts, zones
_ZONE = "us-central2-b"
_SETTINGS = 160  # configuration files: reading one takes as long as simulating a run
_WITHOUT_THEME = 0.35  # of all scenarios
_ACTIONS = ("kill", "kill", "kill", "ctrl-c", "ctrl-c", "stop", "asleep", "stop", "logs", "second run", "bob down",
          "bob up", "gc", "bob gc", "status", "status")  # fmt: skip
_OF_ADDED_THEMES = 0.5  # of all scenarios
_OF_HANGS = 0.1
_OF_GKE = 0.12
_OF_EXPLAINED = (0.04, 0.8)  # of other scenarios, and of those of hangs
_WITH_EXEC = 0.05
_WITH_CANDIDATES = 0.2  # of all scenarios of one workstation
_IN_BUCKET = 0.15  # of those
_RIVAL_ACTIONS = ("watch", "watch", "supervise", "stop", "logs")
_RIVAL_TIMES = ("run", "start", "start", "recovery", "restart", "end")
RETRIES, HOSTS = "preemption_retries", "many_hosts"  # needs of themes
_LEFTOVERS = ("", "", "", "", "bob's", "a stranger's", "preempted", "stopped", "deleting")


@dataclass(frozen=True)
class Setting:
    accelerator: str
    queued: bool
    preemption_retries: int
    failure_retries: int
    replace_after: int | None
    stall_minutes: float | None
    host_lost_seconds: float
    hosts: int
    zones: tuple[str, ...]  # in which the slice may be, in the order of preference
    unreachable_minutes: float
    expires_hours: float | None
    recovery_minutes: float
    stockout_minutes: float
    budget: float | None  # dollars
    gke: bool = False  # whether it runs on a cluster instead of TPU VMs

    @property
    def many_hosts(self) -> bool:
        return self.hosts > 1

    @property
    def many_zones(self) -> bool:
        return len(self.zones) > 1


@dataclass(frozen=True)
class Candidates:
    """The file's slice.candidates, beside its own slice."""

    price_limit: float | None  # dollars an hour: room for all candidates, for two, or for one at a time
    kill_at: int  # the number of the write to the record of requests at which its command is killed; 0: none


@dataclass(frozen=True)
class Action:
    kind: str
    after: float  # seconds after `anchor`
    anchor: str = "run"
    """A moment of the run: "up" and "run", the first such commands; those of `Fault.anchor`; "prepare", of the first
    host; "request", when one is in the queue; "hang", when a program does; "end", when one ends by itself."""


@dataclass(frozen=True)
class Scenario:
    setting: Setting
    leftover: str
    plans: tuple[Plan, ...]
    actions: tuple[Action, ...]
    theme: str = ""
    candidates: Candidates | None = None
    in_bucket: bool = False  # whether the ledger is in a bucket, from which another workstation can go on


@dataclass(frozen=True)
class Theme:
    """One kind of trouble. Empty fields are drawn as in other scenarios."""

    name: str
    faults: tuple[str, ...] = ()  # kinds, each with "@" and an anchor of its own or without
    count: tuple[int, int] = (1, 3)  # the least and the greatest number of faults
    anchors: tuple[str, ...] = ("start",)  # the moments that faults are anchored at
    spread: float = 20.0  # seconds after the anchor within which they happen
    actions: tuple[str, ...] = ()  # one action of each group, separated by "|", is done
    moments: tuple[str, ...] = ("start",)  # the moment of all actions is one of these
    together: float = 30.0  # seconds after the moment within which they happen
    plans: tuple[str, ...] = ()  # kinds of programs of the first attempts
    leftovers: tuple[str, ...] = ("",)
    needs: tuple[str, ...] = ()
    """Fields that its settings have, other than 0, False and None; "many_hosts" and "many_zones": more than one."""
    seconds: tuple[float, float] | None = None  # the least and the greatest time of a program


THEMES = (
    Theme("two terminals", actions=("second run|second attach", "stop"), moments=("run", "start", "recovery"),
          together=7.0, faults=("reboot", "preempt"), count=(0, 1), needs=(RETRIES,)),
    Theme("two terminals and a death", actions=("second run", "kill|ctrl-c"), moments=("start", "prepare", "recovery"),
          together=7.0, faults=("reboot", "preempt", "die"), count=(0, 2), needs=(RETRIES,)),
    Theme("a stop of a recovery", faults=("preempt", "reboot", "die"), actions=("stop",), moments=("recovery",),
          together=50.0, needs=(RETRIES,)),
    Theme("leaving a recovery", faults=("preempt", "reboot", "die"), actions=("ctrl-c|kill|asleep",),
          moments=("recovery",), together=50.0, needs=(RETRIES,)),
    Theme("standstills", faults=("hang", "cut", "offline", "dead ssh", "ssh loses answers"),
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
    Theme("reboots", faults=("reboot",), count=(1, 3), plans=("finish", "fail"), needs=(RETRIES, HOSTS)),
    Theme("out of reach", faults=("cut", "hang"), count=(1, 3), spread=12.0, needs=(RETRIES, HOSTS)),
    Theme("asleep", actions=("asleep", "logs|kill"), moments=("start", "recovery", "prepare"),
          faults=("reboot", "preempt"), count=(0, 1), needs=(RETRIES,)),
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
    Theme("maintenance", faults=("maintenance", "preempt"), count=(1, 2), plans=("finish", "save"), needs=(RETRIES,)),
    Theme("wrong clocks", faults=("clock",), actions=("logs|kill",), count=(1, 3)),
    Theme("full disks", faults=("disk", "engine"), anchors=("beginning", "start", "recovery"), count=(1, 3),
          needs=(RETRIES,)),
    Theme("stops", faults=("hang", "cut", "dead ssh", "ssh loses answers", "offline"), count=(0, 2),
          actions=("stop",), moments=("run", "prepare", "start", "restart"), together=20.0, spread=25.0),
)  # fmt: skip


ADDED_THEMES = (
    Theme("clearing up", faults=("stale", "slow"), count=(1, 2), anchors=("up",), spread=5.0, actions=("gc",),
          moments=("up",), together=60.0, leftovers=("preempted",)),
    Theme("clearing up a queue", faults=("slow", "preempt@start"), count=(1, 2), anchors=("up",), actions=("gc", "gc"),
          moments=("up", "start"), together=90.0, leftovers=("preempted", "preempted", ""), needs=("queued",)),
    Theme("a farewell to the dead", actions=("kill", "down"), moments=("up", "up", "request", "recovery"), together=7.0,
          faults=("slow", "slow", "preempt@start"), anchors=("up",), count=(2, 3), spread=0.5, needs=(RETRIES,)),
    Theme("ends that prove themselves", faults=("reboot", "reboot", "offline"), count=(1, 3), anchors=("end",),
          spread=6.0, plans=("save", "bad input", "memory", "finish"), needs=(RETRIES,)),
    Theme("two terminals at the end", actions=("second run",), moments=("end",), together=8.0, count=(0, 0)),
    Theme("any deed", actions=("down|down|stop|second run|new run|gc", "down|stop|second run|new run|second attach"),
          moments=("up", "run", "prepare", "start", "recovery", "restart", "end", "up again", "down"), together=40.0,
          faults=("reboot", "preempt", "die", "unavailable", "lost"), count=(0, 2), anchors=("start", "recovery"),
          plans=("finish", "fail"), needs=(RETRIES,)),
    Theme("two workstations",
          actions=("other run|other up|other down", "other run|other down|other stop|other gc|kill"),
          moments=("up", "run", "prepare", "start", "recovery", "restart", "end"), together=40.0,
          faults=("reboot", "preempt", "die", "unavailable", "lost"), count=(0, 2), anchors=("start", "recovery"),
          plans=("finish", "fail"), needs=(RETRIES,)),
    Theme("a colleague", faults=("delete", "delete", "halt", "replace", "old describe"), count=(1, 2), spread=15.0,
          anchors=("up", "start", "start", "recovery", "recovery", "made again", "down"), plans=("finish", "fail"),
          needs=(RETRIES,)),
    Theme("a colleague in a recovery", faults=("reboot@start", "preempt@start", "disk", "engine", "delete@round",
          "delete@round", "delete", "dead ssh", "old describe"), count=(4, 7), spread=8.0,
          anchors=("recovery", "recovery", "made again"), needs=(RETRIES,)),
    Theme("partitions", faults=("filter", "filter", "connection", "cut"), count=(1, 3),
          plans=("finish", "fail", "save"), anchors=("start", "recovery"), spread=25.0, needs=(RETRIES, HOSTS)),
    Theme("hosts that end apart", faults=("reboot", "cut", "filter", "hang", "die", "offline"), count=(0, 2),
          anchors=("end",), spread=140.0, plans=("finish",), needs=(RETRIES, HOSTS)),
    Theme("refusals", faults=("signed out", "signed out", "quota", "preempt", "reboot", "lost"), count=(1, 3),
          spread=20.0, anchors=("beginning", "start", "recovery", "recovery", "down"), plans=("finish", "fail"),
          needs=(RETRIES,)),
    Theme("a date that jumps", faults=("date", "date", "cut", "reboot", "preempt"), count=(1, 3),
          anchors=("up", "start", "recovery", "end"), spread=25.0, plans=("finish", "fail", "save"),
          actions=("kill|other run|stop|gc",), needs=(RETRIES, HOSTS)),
    Theme("zones", faults=("stockout", "stockout", "preempt", "lost", "stale"), count=(1, 4),
          anchors=("beginning", "up", "start", "recovery", "down"), spread=30.0, plans=("finish", "fail"),
          actions=("kill|ctrl-c|stop|gc|second run|bob up|bob down",), moments=("up", "up", "start", "recovery"),
          leftovers=("", "ready", "creating", "preempted", "preempted", "deleting", "bob's", "stopped"),
          needs=(RETRIES, "many_zones")),
    Theme("expiry", actions=("gc", "gc|bob gc|other gc|logs"), moments=("run", "start", "end"), together=400.0,
          faults=("date", "stale", "reboot", "preempt"), count=(0, 2), plans=("finish", "fail"),
          leftovers=("", "", "preempted", "bob's"), needs=(RETRIES, "expires_hours")),
    Theme("ssh is closed", faults=("no ssh", "no ssh", "offline", "reboot", "cut"), count=(1, 3), plans=("finish",),
          anchors=("start", "start", "recovery", "end", "up"), spread=60.0, seconds=(60.0, 500.0),
          actions=("asleep|kill|stop|logs",), together=200.0, needs=(RETRIES,)),
    Theme("a start that fails", faults=("disk", "engine", "old describe", "old describe", "cut", "dead ssh", "delete"),
          anchors=("prepare", "prepare", "recovery"), count=(2, 4), spread=6.0, plans=("finish",),
          actions=("stop|kill|logs|status",), moments=("prepare",), together=20.0, needs=(RETRIES,)),
    Theme("a bad host", faults=("die@start", "die@start", "reboot@start", "stockout", "lost", "slow", "old describe"),
          count=(2, 5), anchors=("recovery", "recovery", "round"), spread=10.0, plans=("finish",),
          needs=(RETRIES, "replace_after", HOSTS)),
    Theme("hosts that boot", faults=("outage", "outage", "signed out", "permission", "no ssh", "offline"),
          anchors=("contact",), spread=3.0, count=(1, 3), actions=("kill|ctrl-c|status|bob gc",), moments=("contact",),
          together=400.0),
    Theme("a drought", faults=("drought", "drought", "lost", "slow", "preempt"), count=(1, 2), spread=30.0,
          anchors=("beginning", "beginning", "recovery"), actions=("kill|ctrl-c|stop|status",),
          moments=("request", "up"), together=900.0, needs=(RETRIES, "queued")),
    Theme("awake", faults=("cut", "dead ssh"), anchors=("awake",), spread=2.0, count=(0, 2), actions=("asleep",),
          needs=(RETRIES, HOSTS)),
)  # fmt: skip


HANGS = Theme("hangs", faults=("hang", "cut", "offline", "dead ssh", "die", "die", "die"), count=(0, 1),
              plans=("stall", "stall", "finish"), spread=60.0, actions=("logs|logs|logs|asleep|status",),
              together=200.0, needs=("stall_minutes", HOSTS))  # fmt: skip


GKE = Theme("a cluster", count=(0, 3), spread=25.0,
            anchors=("beginning", "prepare", "start", "start", "recovery", "end"),
            faults=("preempt", "preempt", "maintenance", "delete", "unavailable", "slow", "lost", "offline", "rate",
                    "permission"),
            moments=("run", "prepare", "start", "recovery", "end"), together=40.0,
            actions=("kill|ctrl-c|stop|down|second run|new run|asleep|logs|status",
                     "kill|ctrl-c|stop|second attach|second run|logs"),
            plans=("finish", "finish", "fail", "save", "bad input"), needs=(RETRIES,))  # fmt: skip


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Draws the contents of configuration files."""
    return tuple(_draw_setting(random.Random(f"setting {number}")) for number in range(_SETTINGS))


def draw(seed: int) -> tuple[Scenario, list[Fault]]:
    """Draws the scenario and the faults of a simulated run."""
    scenario, drawn = _draw_one(seed)
    rng = random.Random(f"explain {seed}")
    if rng.random() < _OF_EXPLAINED[scenario.theme == HANGS.name]:
        at = rng.choice(("start", "hang", "hang")) if scenario.theme == HANGS.name else "start"
        action = Action("explain", rng.uniform(0.0, 25.0), at)
        scenario = replace(scenario, actions=(*scenario.actions, action))
    rng = random.Random(f"exec {seed}")
    if rng.random() < _WITH_EXEC and not scenario.setting.gke:
        action = Action(rng.choice(("exec", "refused exec")), rng.uniform(0.0, 25.0), rng.choice(("start", "restart")))
        scenario = replace(scenario, actions=(*scenario.actions, action))
    rng = random.Random(f"candidates {seed}")
    elsewhere = any(action.kind.startswith("other") for action in scenario.actions)
    setting, drought = scenario.setting, scenario.theme == "a drought"
    is_drawn = rng.random() < (0.8 if drought else _WITH_CANDIDATES)
    if is_drawn and not elsewhere and not setting.many_zones and not setting.gke:
        kill_at = rng.choice((0, rng.randrange(1, 12)))
        limit = rng.choice((4.0, 10.0, 40.0) if drought else (None, None, 10.0, 40.0))
        scenario = replace(scenario, candidates=Candidates(limit, kill_at))
    rng = random.Random(f"ledger in a bucket {seed}")
    if rng.random() < _IN_BUCKET and not elsewhere and not setting.gke:
        return _draw_rival(scenario, rng), [*drawn, *_draw_outages(rng)]
    return scenario, drawn


def _draw_rival(scenario: Scenario, rng: random.Random) -> Scenario:
    """Puts the ledger into a bucket. Another workstation takes over the run of a dead one, or stops or shows it."""
    moment, at = rng.choice(_RIVAL_TIMES), rng.uniform(0.0, 30.0)
    actions = [Action(rng.choice(("kill", "kill", "asleep", "status")), at, moment)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        actions.append(Action(f"rival {rng.choice(_RIVAL_ACTIONS)}", at + rng.uniform(0.0, 90.0), moment))
    return replace(scenario, in_bucket=True, actions=(*scenario.actions, *actions))


def _draw_outages(rng: random.Random) -> list[Fault]:
    count = rng.choice((0, 0, 1, 2))
    return [Fault("bucket", rng.choice(_RIVAL_TIMES), rng.uniform(0, 20), rng.uniform(1, 90), 0) for _ in range(count)]


def _draw_one(seed: int) -> tuple[Scenario, list[Fault]]:
    """Draws a scenario without candidates, and its faults."""
    rng, added = random.Random(f"scenario {seed}"), random.Random(f"added {seed}")
    if random.Random(f"hangs {seed}").random() < _OF_HANGS:
        return _draw_hangs(random.Random(f"scenario of hangs {seed}"))
    if random.Random(f"cluster {seed}").random() < _OF_GKE:
        scenario = _draw_scenario(GKE, rng)
        setting = replace(scenario.setting, gke=True, queued=False, budget=None, expires_hours=None, replace_after=None)
        return replace(scenario, setting=setting), _draw_faults(GKE, random.Random(f"faults {seed}"))
    if added.random() < _OF_ADDED_THEMES:
        theme = added.choice(ADDED_THEMES)
    elif rng.random() < _WITHOUT_THEME:
        return _draw_anything(rng), faults.draw(random.Random(f"faults {seed}"))
    else:
        theme = rng.choice(THEMES)
    return _draw_scenario(theme, rng), _draw_faults(theme, random.Random(f"faults {seed}"))


def _draw_hangs(rng: random.Random) -> tuple[Scenario, list[Fault]]:
    """Draws programs that tell their progress: some hang in a phase, others are slow in all."""
    scenario = _draw_scenario(HANGS, rng)

    def tell(plan: Plan) -> Plan:
        host = rng.randrange(scenario.setting.hosts)
        hang = Hang(rng.choice(hangs.PHASES), rng.choice(hangs.KINDS), host) if plan.kind == "stall" else None
        slow = Slow(host, rng.choice((math.inf, 40.0))) if rng.random() < 0.5 else None
        seconds, period = rng.uniform(5.0, 400.0), rng.choice((3.0, 3e3))
        return replace(plan, tells=True, hang=hang, slow=slow, seconds=seconds, period=period)

    drawn = _draw_faults(HANGS, rng) if rng.random() < 0.5 else []
    return replace(scenario, plans=tuple(map(tell, scenario.plans))), drawn


def _draw_anything(rng: random.Random) -> Scenario:
    setting = rng.choice(settings())
    kinds = [rng.choice(("fail", "fail", "save", "bad input", "stall")) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    actions = [Action(rng.choice(_ACTIONS), rng.uniform(0.0, 80.0)) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    return Scenario(setting, rng.choice(_LEFTOVERS), _draw_plans(rng, kinds, setting), tuple(actions))


def _draw_scenario(theme: Theme, rng: random.Random) -> Scenario:
    setting = rng.choice(_settings_of(theme))
    kinds = [rng.choice(theme.plans) for _ in range(rng.choice((1, 1, 2)))] if theme.plans else []
    at = rng.choice(theme.moments)
    actions = [Action(rng.choice(group.split("|")), rng.uniform(0.0, theme.together), at) for group in theme.actions]
    plans = _draw_plans(rng, kinds, setting)
    if theme.seconds is not None:
        plans = tuple(replace(plan, seconds=rng.uniform(*theme.seconds), period=3.0) for plan in plans)
    return Scenario(setting, rng.choice(theme.leftovers), plans, tuple(actions), theme.name)


@functools.cache
def _settings_of(theme: Theme) -> tuple[Setting, ...]:
    fitting = [each for each in settings() if all(getattr(each, need) for need in theme.needs)]
    return tuple(each for each in fitting if not (each.many_zones and theme is GKE))


def _draw_faults(theme: Theme, rng: random.Random) -> list[Fault]:
    drawn = []
    anchor = rng.choice(theme.anchors)
    for _ in range(rng.randint(*theme.count)):
        if rng.random() < 0.3:
            anchor = rng.choice(theme.anchors)
        seconds = rng.choice((rng.uniform(1.0, 12.0), rng.uniform(10.0, 60.0), rng.uniform(30.0, 200.0)))
        kind, _, own_anchor = rng.choice(theme.faults).partition("@")
        drawn.append(Fault(kind, own_anchor or anchor, rng.uniform(0.0, theme.spread), seconds, rng.randrange(64)))
    return drawn


def _draw_setting(rng: random.Random) -> Setting:
    accelerator, hosts = rng.choice(SLICES)
    zones: tuple[str, ...] = (_ZONE,)
    if (added := random.Random(rng.random())).random() < 0.15:
        accelerator, hosts, zones = added.choice(_PLACES)
    return Setting(
        accelerator,
        queued=rng.random() < 0.2,
        preemption_retries=rng.choice((0, 1, 3, 8, 8)),
        failure_retries=rng.choice((0, 0, 1, 2)),
        replace_after=rng.choice((None, None, 1, 2)),
        stall_minutes=rng.choice((None, None, 0.5)),
        host_lost_seconds=rng.choice((20.0, 60.0)),
        hosts=hosts,
        zones=zones,
        unreachable_minutes=added.choice((30.0, 30.0, 2.0)),
        recovery_minutes=added.choice((60.0, 60.0, 2.0)),
        stockout_minutes=added.choice((30.0, 30.0, 0.0)),
        expires_hours=added.choice((None, None, None, 0.05)),
        budget=added.choice((None,) * 9 + (0.2, 0.5, 1.0)),
    )


def _draw_plans(rng: random.Random, kinds: list[str], setting: Setting) -> tuple[Plan, ...]:
    """Draws the programs of the first attempts; the programs of all later attempts finish."""
    allowed = ["fail" if kind == "stall" and setting.stall_minutes is None else kind for kind in kinds]
    return tuple(_draw_plan(rng, kind, setting.hosts) for kind in (*allowed, "finish"))


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
