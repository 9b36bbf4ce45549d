"""Creating a slice through a queued resource: a request that waits for capacity until its valid-until, and is deleted
when nobody wants it any more.

The request has the slice's name, and its one node too. Waiting is resumable: it is Google that waits, and every look
starts from what the API says. A request that is SUSPENDED or FAILED never comes back by itself and keeps its quota: it
is deleted, with force, and made again while there is time.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher import costs
from launcher.clock import parse_time
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.provider import SliceState
from launcher.tpu_vm import gcloud

_SECONDS = 120.0  # for one question; creating and deleting a request is quick, providing it is not
_POLL_SECONDS = 2.0
_TELL_SECONDS = 60.0
_DELETE_SECONDS = 900.0
_LATE_SECONDS = 60.0  # the API may be this late in failing a request whose time is over
_DEAD = ("SUSPENDED", "FAILED")


@dataclass(frozen=True)
class Request:
    """A queued resource as the API describes it."""

    name: str
    state: str  # CREATING ACCEPTED WAITING_FOR_RESOURCES PROVISIONING ACTIVE SUSPENDING SUSPENDED FAILED DELETING
    initiator: str  # who suspended it: USER or SERVICE
    error: str  # what the API says about a failure
    created: float | None  # Unix seconds

    @property
    def lost(self) -> bool:
        """Its node was taken away."""
        return self.state in ("SUSPENDING", "SUSPENDED")


def _base(config: Config, verb: str, name: str | None = None) -> list[str]:
    # --zone always: without it `create --reserved` asks for a reservation in "locations/None" (SDK 528).
    ends = [f"--project={config.project}", f"--zone={gcloud.zone(config)}", "--quiet"]
    return ["gcloud", "compute", "tpus", "queued-resources", verb, name or config.slice.name, *ends]


def create_command(config: Config, labels: dict[str, str], seconds: float) -> list[str]:
    """Asks for the slice; not granted any more after `seconds`. Always the GA track: alpha's --spot sends a
    contradiction (SDK 528)."""
    flags = [
        f"--node-id={config.slice.name}",
        f"--runtime-version={config.runtime_version}",
        f"--valid-until-duration={round(seconds)}s",
    ]
    return [*_base(config, "create"), *flags, *gcloud.node_flags(config, labels)]


def describe_command(config: Config, name: str | None = None) -> list[str]:
    return [*_base(config, "describe", name), "--format=json"]


def delete_command(config: Config, name: str | None = None) -> list[str]:
    """With force: the node goes too."""
    return [*_base(config, "delete", name), "--force"]


def parse(text: str) -> Request:
    """What `describe --format=json` printed."""
    resource: dict[str, Any] = json.loads(text)
    state: dict[str, Any] = resource.get("state", {})
    error = state.get("failedData", {}).get("error", {})
    return Request(
        name=resource["name"].rsplit("/", 1)[-1],
        state=state.get("state", "STATE_UNSPECIFIED"),
        initiator=state.get("stateInitiator", ""),
        error=error.get("message", ""),
        created=parse_time(resource.get("createTime", "")),
    )


def describe(config: Config, name: str | None = None) -> Request | None:
    """The request, or None when there is none."""
    try:
        return parse(gcloud.call(describe_command(config, name), timeout=_SECONDS))
    except gcloud.NotFound:
        return None


def obtain(
    config: Config,
    labels: dict[str, str],
    node: Callable[[], SliceState | None],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Returns when the request is ACTIVE and its node READY; asks when nothing was asked for, and goes on waiting for
    what was.

    Raises Stockout when the time is over (the request is deleted then), and what Google says about quota, permission or
    the request itself.
    """
    assert config.slice.queued is not None
    hours = config.slice.queued.valid_until_hours
    asked = describe(config)
    begun = clock()
    age = 0.0 if asked is None or asked.created is None or asked.state in _DEAD else time.time() - asked.created
    until = begun + hours * 3600 - age
    tell = _Progress(say, config, begun - age, until)
    pause = 0.0
    try:
        while True:
            if asked is None:
                say(
                    f"asking for a {config.slice.accelerator_type} in {config.zone}, for {costs.duration(until - clock())} at most"
                )
                try:
                    gcloud.call(create_command(config, labels, max(1.0, until - clock())), timeout=_SECONDS)
                except gcloud.Conflict:
                    if (
                        describe(config) is None
                    ):  # not an earlier try of ours that arrived after all: a node has the name
                        raise
                tell.reset()
            elif asked.state == "ACTIVE":
                found = node()
                if found is not None and found.ready:
                    return
                if found is None or found.gone_for_good:
                    say(
                        f"the node of request {asked.name} is {found.state if found else 'gone'}: deleting the request, asking again"
                    )
                    remove(config, clock=clock, sleep=sleep)
                    asked = None
                    continue
            elif asked.state in _DEAD:
                _judge_dead(config, asked, until - clock(), clock, sleep)
                wait = min(pause * (0.5 + random.random()), max(0.0, until - clock()))
                say(
                    f"request {asked.name} was {asked.state} ({asked.error or f'by {asked.initiator}'}): deleted it, asking again in {wait:.0f} s"
                )
                sleep(wait)
                pause = min(max(10.0, pause * 2), 300.0)
                asked = None
                continue
            grace = (
                config.slice.create_minutes * 60
                if asked is not None and asked.state in ("PROVISIONING", "ACTIVE")
                else _LATE_SECONDS
            )
            if clock() > until + grace:
                remove(config, clock=clock, sleep=sleep)
                raise gcloud.Stockout(_too_late(config, asked))
            sleep(_POLL_SECONDS)
            before, asked = asked, describe(config)
            if asked is None and before is not None:
                raise LaunchError(
                    f"request {config.slice.name} was deleted while it was waited for; `tpu-launch up` asks again"
                )
            tell(asked, clock())
    except KeyboardInterrupt:
        say("the request goes on waiting: `tpu-launch up` goes on with it, `tpu-launch down` deletes it")
        raise


def _judge_dead(
    config: Config, asked: Request, left: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Deletes a SUSPENDED or FAILED request. Raises what its failure means, unless asking again may help and there is
    time."""
    remove(config, clock=clock, sleep=sleep)
    if asked.state == "FAILED" and asked.error:
        meaning = gcloud.explain(asked.error, describe_command(config))
        if isinstance(meaning, gcloud.QuotaExceeded | gcloud.PermissionDenied | gcloud.Refused):
            raise meaning
    if left <= _LATE_SECONDS / 2 and asked.state == "FAILED":
        raise gcloud.Stockout(_too_late(config, asked))


def _too_late(config: Config, asked: Request | None) -> str:
    assert config.slice.queued is not None
    said = f"\n  Google said: {asked.error}" if asked is not None and asked.error else ""
    hours = config.slice.queued.valid_until_hours
    return (
        f"no capacity for a {config.slice.accelerator_type} in {config.zone} within {hours:g} h (slice.queued.valid_until_hours); "
        f"the request was deleted{said}\n  ask for longer, in another zone, or for another accelerator type"
    )


def remove(
    config: Config, name: str | None = None, *, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Deletes the request, with its node if it has one, and waits until the API says that it is gone. None is fine."""
    deadline = clock() + _DELETE_SECONDS
    while (found := describe(config, name)) is not None:
        if clock() > deadline:
            raise CommandTimeout(
                f"request {found.name} is {found.state} and not gone after {_DELETE_SECONDS / 60:.0f} minutes; try again"
            )
        # A request that is being suspended must get there first; the API sometimes forgets a deletion, so it is asked
        # for again.
        if found.state not in ("DELETING", "SUSPENDING"):
            try:
                gcloud.call(delete_command(config, name), timeout=_DELETE_SECONDS)
                continue
            except (gcloud.NotFound, gcloud.Conflict):
                pass  # gone meanwhile, or another operation is on it
        sleep(2.0)


class _Progress:
    """Says the state when it changes, and once a minute how long it has been."""

    def __init__(self, say: Callable[[str], None], config: Config, begun: float, until: float) -> None:
        self.say, self.name, self.begun, self.until = say, config.slice.name, begun, until
        self.reset()

    def reset(self) -> None:
        self.shown, self.told = "", float("-inf")

    def __call__(self, asked: Request | None, now: float) -> None:
        if asked is None or (asked.state == self.shown and now - self.told < _TELL_SECONDS):
            return
        left = (
            f", asked {costs.duration(now - self.begun)} ago, valid for {costs.duration(self.until - now)} more"
            if now < self.until
            else ""
        )
        self.say(f"request {self.name} is {asked.state}{left}")
        self.shown, self.told = asked.state, now
