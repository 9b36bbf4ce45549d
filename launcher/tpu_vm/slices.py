"""The life of a slice: created, described, deleted, through gcloud.

`create` is idempotent: it finds what exists and goes on from there. A node that was preempted must be deleted before
its name can be used again, as the API demands. A slice may come from a request in the queue (queued.py), and may be in
one of several zones (placement.py).
"""

from __future__ import annotations

import getpass
import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.provider import SliceState
from launcher.tpu_vm import gcloud, placement, queued

_SECONDS = 60.0  # for one question to the API
_DELETE_MINUTES = 15.0
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, between rounds through zones without capacity


def owner() -> str:
    """Who makes slices here, as a label's value."""
    return re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63]


def owner_labels(config: Config, now: float | None = None) -> dict[str, str]:
    """What marks a slice as ours: who made it, for which run, and (slice.expires_hours) when it should be gone, in Unix
    seconds."""
    labels = {"tpu-launch": "1", "tpu-launch-owner": owner(), "tpu-launch-run": config.run_name}
    if config.slice.expires_hours is not None:
        labels["tpu-launch-expires"] = str(
            round((time.time() if now is None else now) + config.slice.expires_hours * 3600)
        )
    return labels


def parse_state(text: str) -> SliceState:
    """What `describe --format=json` printed."""
    node: dict[str, Any] = json.loads(text)
    symptoms = [
        f"{each.get('symptomType')} on host {each.get('workerId')}: {each.get('details', '')}"
        for each in node.get("symptoms", [])
    ]
    return SliceState(
        name=node["name"].rsplit("/", 1)[-1],
        state=node.get("state", "STATE_UNSPECIFIED"),
        health=node.get("health", "HEALTH_UNSPECIFIED"),
        accelerator_type=node.get("acceleratorType", ""),
        hosts=tuple(endpoint.get("ipAddress", "") for endpoint in node.get("networkEndpoints", [])),
        detail="; ".join(filter(None, [node.get("healthDescription", ""), *symptoms])),
        created=node.get("createTime", ""),
    )


def describe(config: Config) -> SliceState | None:
    """The slice, or None when it doesn't exist. A request that waits in the queue counts, in its own state and without
    hosts."""
    here = placement.zone(config)
    found = _look(placement.at(config, here))
    if found is not None or len(config.zones) == 1:
        return found
    others = [each for each in placement.in_order(config) if each.zone != here]
    with ThreadPoolExecutor(len(others)) as pool:
        for other, found in zip(others, pool.map(_look, others), strict=True):
            if found is not None:
                placement.remember(config, other.zone)
                return found
    return None


def _look(config: Config) -> SliceState | None:
    """In one zone."""
    found = _node(config)
    if found is not None or config.slice.queued is None:
        return found
    asked = queued.describe(config)
    if asked is None:
        return None
    # A suspended request lost its node, which is what PREEMPTED says of a node.
    state = "PREEMPTED" if asked.lost else asked.state
    return SliceState(
        asked.name, state, "HEALTH_UNSPECIFIED", config.slice.accelerator_type, (), asked.error or "queued resource"
    )


def _node(config: Config) -> SliceState | None:
    try:
        return parse_state(gcloud.call(gcloud.describe_command(config), timeout=_SECONDS))
    except gcloud.NotFound:
        return None


def _request(config: Config) -> queued.Request | None:
    """The request in the queue. An account that may not look there has none of ours there, unless the file says so."""
    try:
        return queued.describe(config)
    except gcloud.PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None


def create(
    config: Config,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SliceState:
    """Returns the slice when it is READY; creates it when it is missing, waits when it is on its way.

    Zones without capacity are passed over; after the last one all are tried again for slice.stockout_minutes, with
    growing pauses. Raises Conflict when the name is taken by a slice of another type, Stockout, QuotaExceeded,
    PermissionDenied, Refused as Google says; only a stock-out is tried again.
    """
    begun, pause = clock(), _FIRST_PAUSE
    order = placement.in_order(config)
    if len(order) > 1 and describe(config) is not None:  # what is there, or on its way, is gone on with
        order.sort(key=lambda each: each.zone != placement.zone(config))
    while True:
        for here in order:
            placement.remember(config, here.zone)
            try:
                return _create_in(here, say, clock, sleep)
            except gcloud.Stockout as error:
                last = error
                if len(order) > 1:
                    say(str(error).splitlines()[0])
        wait = pause * (0.5 + random.random())  # jitter: others wait for the same capacity
        left = config.slice.stockout_minutes * 60 - (clock() - begun)
        if wait > left:
            placement.forget(config)
            raise last
        say(
            f"no capacity in {', '.join(config.zones)}: trying again in {wait:.0f} s, for {costs.duration(left)} more (slice.stockout_minutes)"
        )
        sleep(wait)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _create_in(
    config: Config, say: Callable[[str], None], clock: Callable[[], float], sleep: Callable[[float], None]
) -> SliceState:
    """As `create`, in one zone and once."""
    found = _node(config)
    if found is not None and found.gone_for_good:
        say(f"slice {found.name} is {found.state}: deleting it, as its name can't be used before")
        _delete_in(config, _request(config), found, say, clock, sleep)
        found = None
    if found is None:
        costs.check(config)
        say(
            f"creating {config.slice.accelerator_type} slice {config.slice.name} in {config.zone} ({config.accelerator.hosts} hosts, {config.slice.capacity})"
        )
        say(costs.line(config))
        if config.slice.queued is not None:
            queued.obtain(config, owner_labels(config), lambda: _node(config), say, clock=clock, sleep=sleep)
        else:
            gcloud.call_with_progress(
                gcloud.create_command(config, owner_labels(config)), timeout=config.slice.create_minutes * 60
            )
        found = _node(config)
    deadline = clock() + config.slice.create_minutes * 60
    shown = ""
    while found is None or not found.ready:
        if found is None:
            raise LaunchError(
                f"slice {config.slice.name} disappeared while it was being created; see `gcloud compute tpus operations list --zone={config.zone}`"
            )
        if found.gone_for_good:
            raise gcloud.Preempted(
                f"slice {found.name} became {found.state} while it was being created; run `tpu-launch up` again"
            )
        if found.state != shown:
            say(f"slice {found.name} is {found.state}")
            shown = found.state
        if clock() > deadline:
            raise CommandTimeout(
                f"slice {found.name} is {found.state} and not READY after {config.slice.create_minutes:.0f} minutes (slice.create_minutes)"
            )
        sleep(2.0)
        found = _node(config)
    _check_type(config, found)
    return found


def _check_type(config: Config, found: SliceState) -> None:
    if found.accelerator_type and found.accelerator_type != config.slice.accelerator_type:
        raise gcloud.Conflict(
            f"slice {found.name} exists and is a {found.accelerator_type}, not a {config.slice.accelerator_type}: "
            "choose another slice.name, or delete it with `tpu-launch down`"
        )
    if len(found.hosts) != config.accelerator.hosts:
        raise LaunchError(
            f"slice {found.name} has {len(found.hosts)} hosts; a {config.slice.accelerator_type} has {config.accelerator.hosts}: delete and create it again"
        )


def delete(
    config: Config,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Deletes the slice, in whichever zone it is, with the request that it came from, and waits until the API says that
    both are gone.

    Returns whether there was one. A request is deleted first, with force: one that was granted after somebody gave up
    takes its node along.
    """
    zones = placement.in_order(config)
    with ThreadPoolExecutor(2 * len(zones)) as pool:
        # The queue is looked at also when the file says nothing of it (any more): a request would keep its quota.
        requests, nodes = pool.map(_request, zones), pool.map(_node, zones)
        there = [each for each in zip(zones, requests, nodes, strict=True) if each[1:] != (None, None)]
    for here, asked, found in there:
        _delete_in(here, asked, found, say, clock, sleep)
    placement.forget(config)
    return bool(there)


def _delete_in(
    config: Config,
    asked: queued.Request | None,
    found: SliceState | None,
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """What was found in one zone."""
    deadline = clock() + _DELETE_MINUTES * 60
    told = costs.since(config, found.created, time.time()) if found is not None else ""
    say(f"deleting slice {config.slice.name}{f' ({told})' if told else ''}")
    if asked is not None:
        say(f"its queued resource is {asked.state}: deleted with what belongs to it")
        queued.remove(config, clock=clock, sleep=sleep)
        found = _node(config)
    while found is not None:
        try:
            if found.state != "DELETING":
                gcloud.call(gcloud.delete_command(config), timeout=_DELETE_MINUTES * 60)
        except (gcloud.NotFound, gcloud.Conflict):
            pass  # gone meanwhile, or another operation is on it: the next look tells
        found = _node(config)
        if found is not None:
            if clock() > deadline:
                raise CommandTimeout(
                    f"slice {found.name} is {found.state} and not gone after {_DELETE_MINUTES:.0f} minutes; run `tpu-launch down` again"
                )
            sleep(2.0)
