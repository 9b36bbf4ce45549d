"""Creating a slice through a queued resource: a request that waits for capacity until its valid-until, and is deleted
when nobody wants it any more.

The request has the slice's name, and so has its one node. Waiting can be resumed: it is Google that waits, and every
step starts from what the API says. While it waits, errors that may pass are waited out: a request that nobody watches
may be granted and is billed then. A request that is SUSPENDED or FAILED never comes back by itself and keeps its quota:
it is deleted, with force, and made again while there is time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.calls import Patience, call_gcloud, try_deletion
from launcher.gcloud.errors import Conflict, NotFound, Stockout, explain_error
from launcher.provider import SliceState
from launcher.tpu_vm import commands, ownership, placement
from launcher.workstation import Workstation
from training.machine.clock import parse_time

_SECONDS = 120.0  # for one question; creating and deleting a request is quick, providing it is not
_FIRST_LOOK_SECONDS = 120.0  # until an API that does not answer ends what has not begun
_POLL_SECONDS = 2.0
_REPORT_SECONDS = 60.0
_LONGEST_PAUSE = 300.0
_DELETE_SECONDS = 900.0
_LATE_SECONDS = 60.0  # the API may be this late in failing a request whose time is over
_ASKED_AT_MOST = 3  # times in a row that the answer to a creation is lost
_LAG_SECONDS = 20.0  # the node of an ACTIVE request may not be visible yet
_DEAD = ("SUSPENDED", "FAILED")


@dataclass(frozen=True)
class Request:
    """A queued resource as the API describes it."""

    name: str

    state: str
    """CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDING, SUSPENDED, FAILED or DELETING."""

    initiator: str
    """Who suspended it: USER or SERVICE."""

    error: str
    """What the API says about a failure."""

    created: float | None
    """Unix seconds."""

    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Of the node that it becomes."""

    @property
    def lost(self) -> bool:
        """Its node was taken away."""
        return self.state in ("SUSPENDING", "SUSPENDED")


def _base(config: Config, verb: str) -> list[str]:
    # --zone always: without it `create --reserved` asks for a reservation in "locations/None" (SDK 528).
    ends = [f"--project={config.project}", f"--zone={placement.current_zone(config)}", "--quiet"]
    return ["gcloud", "compute", "tpus", "queued-resources", verb, config.slice.name, *ends]


def create_command(config: Config, labels: dict[str, str], seconds: float) -> list[str]:
    """Asks for the slice; not granted any more after `seconds`. Always the GA track: alpha's --spot sends a
    contradiction (SDK 528)."""
    flags = [
        f"--node-id={config.slice.name}",
        f"--runtime-version={config.runtime_version}",
        f"--valid-until-duration={round(seconds)}s",
    ]
    return [*_base(config, "create"), *flags, *commands.node_flags(config, labels)]


def describe_command(config: Config) -> list[str]:
    """Describes the request as JSON."""
    return [*_base(config, "describe"), "--format=json"]


def delete_command(config: Config) -> list[str]:
    """With force: the node goes too."""
    return [*_base(config, "delete"), "--force"]


def parse(text: str) -> Request:
    """What `describe --format=json` printed."""
    resource: dict[str, Any] = json.loads(text)
    state: dict[str, Any] = resource.get("state", {})
    error = state.get("failedData", {}).get("error", {})
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    return Request(
        name=resource["name"].rsplit("/", 1)[-1],
        state=state.get("state", "STATE_UNSPECIFIED"),
        initiator=state.get("stateInitiator", ""),
        error=error.get("message", ""),
        created=parse_time(resource.get("createTime", "")),
        labels=specs[0].get("node", {}).get("labels", {}) if specs else {},
    )


def describe(config: Config, machine: Workstation) -> Request | None:
    """The request, or None when there is none."""
    try:
        return parse(call_gcloud(machine, describe_command(config), timeout=_SECONDS))
    except NotFound:
        return None


def obtain(
    config: Config,
    labels: dict[str, str],
    node: Callable[[], SliceState | None],
    say: Callable[[str], None],
    machine: Workstation,
) -> None:
    """Returns when the request is ACTIVE and its node READY. Makes the request when there is none, and goes on waiting
    for one that there is.

    Args:
        config: with slice.queued.
        labels: of a node that is created.
        node: describes the node, None when there is none.
        say: is given lines for a person.
        machine: asks gcloud, and waits.

    Raises:
        Stockout: the time is over; the request is deleted then.
        LaunchError: what Google reports about quota, permission or the request itself. It says so when a request is
            left that may be granted.
    """
    acquisition = _Acquisition(config, labels, node, say, machine)
    try:
        acquisition.run()
    except KeyboardInterrupt:
        say("the request goes on waiting: `tpu-launch up` goes on with it, `tpu-launch down` deletes it")
        raise
    except LaunchError as error:
        if acquisition.request is None or isinstance(error, Conflict):
            raise
        raise type(error)(
            f"{error}\n  the request goes on waiting without anybody who watches it, and is billed when it is granted: "
            "`tpu-launch up` goes on with it, `tpu-launch down` deletes it",
            exit_code=error.exit_code,
        ) from None


class _Acquisition:
    """The state machine of `obtain`. Each step acts on what the API said last of the request."""

    def __init__(
        self,
        config: Config,
        labels: dict[str, str],
        node: Callable[[], SliceState | None],
        say: Callable[[str], None],
        machine: Workstation,
    ) -> None:
        assert config.slice.queued is not None
        self.config, self.labels, self.node, self.say, self.machine = config, labels, node, say, machine
        self.patience = Patience(machine, say, f"request {config.slice.name}")
        # A hiccup must not end this: the request of an earlier command may be there, and be granted.
        first_look = Patience(machine, say, f"request {config.slice.name}", doubts=False)
        look_until = machine.clock.monotonic() + _FIRST_LOOK_SECONDS
        self.request = first_look.ask(lambda: describe(config, machine), look_until)
        self.pause = 0.0  # before the next request, when one was lost
        self.lost_answers = 0
        self.lost: LaunchError | None = None  # what stands for the last answer
        self.node_missing_since: float | None = None
        begin = machine.clock.monotonic() - self._age()
        self.deadline = begin + config.slice.queued.valid_until_hours * 3600
        self.progress = _Progress(say, config, begin, self.deadline)

    def run(self) -> None:
        """Until the node is READY."""
        self._wait_for_deletion()
        while True:
            request = self.request
            if request is None:
                self._make_request()
            else:
                ownership.require_ours(self.config, request.labels, self.machine.owner)
                if request.state == "ACTIVE":
                    state = self.patience.ask(self.node, self._patient_until())
                    if state is not None and state.ready:
                        return
                    if self._is_lost(state):
                        reason = state.state if state else "gone"
                        self.say(f"the node of request {request.name} is {reason}: deleting the request, asking again")
                        self._remove()
                        continue
                elif request.state in _DEAD:
                    self._replace(request)
                    continue
            self._check_deadline()
            self._poll()

    def _wait_for_deletion(self) -> None:
        """A request that was being deleted already when we came is waited out."""
        if self.request is not None and self.request.state == "DELETING":
            self.say(f"request {self.request.name} is DELETING: waiting until it is gone, then asking again")
            self._remove()

    def _is_lost(self, node: SliceState | None) -> bool:
        """Whether the node of an ACTIVE request will not come: it was taken away, or stays missing."""
        if node is not None:
            self.node_missing_since = None
            return node.gone_for_good
        now = self.machine.clock.monotonic()
        if self.node_missing_since is None:
            self.node_missing_since = now
        return now - self.node_missing_since >= _LAG_SECONDS

    def _patient_until(self) -> float:
        """When the last question about this request is asked: not before it could have been granted and made."""
        now = self.machine.clock.monotonic()
        return max(now, self.deadline) + self.config.slice.create_minutes * 60

    def _age(self) -> float:
        """Seconds since the request was made, while it can still be granted."""
        request = self.request
        if request is None or request.created is None or request.state in _DEAD:
            return 0.0
        return self.machine.clock.time() - request.created

    def _left(self) -> float:
        return self.deadline - self.machine.clock.monotonic()

    def _make_request(self) -> None:
        if self.lost is not None and self.lost_answers >= _ASKED_AT_MOST:
            raise self.lost
        slice_, left = self.config.slice, self._left()
        self.say(f"asking for a {slice_.accelerator_type} in {self.config.zone}, for {costs.duration(left)} at most")
        try:
            command = create_command(self.config, self.labels, max(1.0, left))
            with placement.asking(self.config) as mark:
                call_gcloud(self.machine, command, timeout=_SECONDS, pass_fds=mark)
        except Conflict as error:
            # There is a request when an earlier try of ours arrived after all, or another `up` was quicker; else a
            # node has the name.
            self.lost, self.lost_answers = error, self.lost_answers + 1
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost, self.lost_answers = error, self.lost_answers + 1
            self.say(f"{str(error).splitlines()[0]}: looking whether the request was made nevertheless")
        else:
            self.lost_answers = 0
        self.progress.reset()

    def _replace(self, request: Request) -> None:
        """Deletes a SUSPENDED or FAILED request, and waits before the next one. Raises what its failure means, unless
        asking again may help and there is time."""
        left = self._left()
        self._remove()
        if request.state == "FAILED":
            if request.error:
                error = explain_error(request.error, create_command(self.config, self.labels, max(1.0, left)))
                if not error.transient:
                    raise error
            if left <= _LATE_SECONDS / 2:
                raise Stockout(_too_late(self.config, request))
        wait = min(self.pause * (0.5 + self.machine.random.random()), max(0.0, self._left()))
        reason = request.error or f"by {request.initiator}"
        self.say(f"request {request.name} was {request.state} ({reason}): deleted it, asking again in {wait:.0f} s")
        self.machine.clock.sleep(wait)
        self.pause = min(max(10.0, self.pause * 2), _LONGEST_PAUSE)

    def _remove(self) -> None:
        if self.request is not None:
            remove(self.config, self.request, self.say, self.machine)
        self.request, self.node_missing_since = None, None

    def _check_deadline(self) -> None:
        """Gives up on a request that was not granted in time. One that is being granted has the time of a creation."""
        is_granted = self.request is not None and self.request.state in ("PROVISIONING", "ACTIVE")
        grace = self.config.slice.create_minutes * 60 if is_granted else _LATE_SECONDS
        if self._left() < -grace:
            request = self.request
            self._remove()
            raise Stockout(_too_late(self.config, request))

    def _poll(self) -> None:
        self.machine.clock.sleep(_POLL_SECONDS)
        before = self.request
        self.request = self.patience.ask(lambda: describe(self.config, self.machine), self._patient_until())
        if self.request is None and before is not None:
            raise Conflict(
                f"request {self.config.slice.name} was deleted while it was waited for; `tpu-launch up` asks again"
            )
        self.progress.report(self.request, self.machine.clock.monotonic())


def _too_late(config: Config, request: Request | None) -> str:
    assert config.slice.queued is not None
    reason = f"\n  Google said: {request.error}" if request is not None and request.error else ""
    hours = config.slice.queued.valid_until_hours
    return (
        f"no capacity for a {config.slice.accelerator_type} in {config.zone} within {hours:g} h "
        f"(slice.queued.valid_until_hours); the request was deleted{reason}\n"
        "  ask for longer, in another zone, or for another accelerator type"
    )


def remove(config: Config, doomed: Request, say: Callable[[str], None], machine: Workstation) -> None:
    """Deletes the request, with its node if it has one, and waits until the API says that it is gone. One that was made
    anew under its name is left alone. Raises CommandTimeout."""
    deadline = machine.clock.monotonic() + _DELETE_SECONDS
    patience, reported = Patience(machine, say, f"request {doomed.name}"), ""
    while True:
        request = patience.ask(lambda: describe(config, machine), deadline)
        if request is None or request.created != doomed.created:
            return
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(
                f"request {request.name} is {request.state} and not gone after {_DELETE_SECONDS / 60:.0f} minutes; "
                "run `tpu-launch down` again"
            )
        # A request that is being suspended must get there first; the API sometimes forgets a deletion, so it is asked
        # for again.
        if request.state not in ("DELETING", "SUSPENDING"):
            problem = try_deletion(machine, delete_command(config), timeout=_DELETE_SECONDS)
            if problem is None:
                continue
            text = str(problem).splitlines()[0]
            if text != reported:
                say(f"deleting request {request.name}: {text}; trying again")
            reported = text
        machine.clock.sleep(_POLL_SECONDS)


class _Progress:
    """Reports the state when it changes, and once a minute how long it has been."""

    def __init__(self, say: Callable[[str], None], config: Config, begin: float, deadline: float) -> None:
        self.say, self.name, self.begin, self.deadline = say, config.slice.name, begin, deadline
        self.reset()

    def reset(self) -> None:
        """The next state is reported in any case."""
        self.state, self.reported = "", float("-inf")

    def report(self, request: Request | None, now: float) -> None:
        """Reports a request, unless that was done a short time ago."""
        if request is None or (request.state == self.state and now - self.reported < _REPORT_SECONDS):
            return
        left = ""
        if now < self.deadline:
            age, rest = costs.duration(now - self.begin), costs.duration(self.deadline - now)
            left = f", asked {age} ago, valid for {rest} more"
        self.say(f"request {self.name} is {request.state}{left}")
        self.state, self.reported = request.state, now
