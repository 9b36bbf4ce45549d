"""Creating a slice through a queued resource ("request"): Google waits for capacity until the request's valid-until.

The request has the slice's name, and so has its one node. Waiting can be resumed, because every step starts from what
the API says. While it waits, transient errors are retried: a request left alone may be granted and is billed then. A
request that is SUSPENDED or FAILED never recovers and keeps its quota: it is deleted, with force, and made again while
there is time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import LaunchError
from launcher.gcloud.calls import DELETE_SECONDS, Backoff, Look, Retry, call_gcloud, delete_until_gone
from launcher.gcloud.errors import Conflict, ResourceNotFound, Stockout, explain_error
from launcher.provider import SliceState
from launcher.tpu_vm import commands, ownership, slice_hints
from launcher.workstation import Workstation
from training.machine import parse_time

_SECONDS = 120.0  # for one question; creating and deleting a request is quick, providing it is not
_FIRST_LOOK_SECONDS = 120.0  # until an API that does not answer ends what has not begun
_POLL_SECONDS = 2.0
_REPORT_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0  # between requests, the second one on
_LATE_SECONDS = 60.0  # the API may be this late in failing a request whose time is over
_MOST_LOST_ANSWERS = 3  # to create requests, in a row
_LAG_SECONDS = 20.0  # the node of an ACTIVE request may not be visible yet
_DEAD = ("SUSPENDED", "FAILED")


@dataclass(frozen=True)
class Request:
    """A queued resource as the API describes it."""

    name: str

    state: str
    """CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDING, SUSPENDED, FAILED or DELETING."""

    initiator: str
    """USER or SERVICE: which of them suspended it."""

    error: str
    """The API's message about a failure."""

    created: float | None
    """Unix seconds."""

    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Labels of the node that it becomes."""

    @property
    def lost(self) -> bool:
        """Returns whether its node was taken away."""
        return self.state in ("SUSPENDING", "SUSPENDED")


def _base(config: Config, verb: str) -> list[str]:
    # --zone always: without it `create --reserved` asks for a reservation in "locations/None" (SDK 528).
    """Returns the gcloud command for a verb on the request; alpha's for a create whose capacity only alpha has."""
    placed = slice_hints.in_current_place(config)
    ends = [f"--project={config.project}", f"--zone={placed.zone}", "--quiet"]
    track = ["alpha"] if verb == "create" and _alpha_flags(placed) else []
    return ["gcloud", *track, "compute", "tpus", "queued-resources", verb, placed.node, *ends]


def _alpha_flags(config: Config) -> list[str]:
    """Returns the flags of kinds of capacity that only the alpha track has (SDK 528); [] for others."""
    wanted = config.slice
    if wanted.capacity == "flex-start":
        assert wanted.max_run_hours is not None
        return ["--provisioning-model=flex-start", f"--max-run-duration={round(wanted.max_run_hours * 3600)}s"]
    if wanted.capacity == "calendar":
        return ["--provisioning-model=reservation-bound", f"--reservation={wanted.reservation}"]
    if wanted.capacity == "reserved" and wanted.reservation is not None:
        return [f"--reservation={wanted.reservation}"]
    return []


def create_command(config: Config, labels: dict[str, str], seconds: float) -> list[str]:
    """Returns the command that requests the slice, to be granted within `seconds`. Uses the GA track where it can:
    alpha's --spot contradicts itself (SDK 528)."""
    flags = [
        f"--node-id={config.node}",
        f"--runtime-version={config.runtime_version}",
        f"--valid-until-duration={round(seconds)}s",
    ]
    return [*_base(config, "create"), *flags, *_alpha_flags(config), *commands.node_flags(config, labels)]


def describe_command(config: Config) -> list[str]:
    """Returns the command that prints the request as JSON."""
    return [*_base(config, "describe"), "--format=json"]


def delete_command(config: Config) -> list[str]:
    """Returns the command that deletes the request and, with force, its node."""
    return [*_base(config, "delete"), "--force"]


def parse(text: str) -> Request:
    """Returns the request in the output of `describe --format=json`; its labels are those of its first node."""
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
    """Returns the request, or None when there is none."""
    try:
        return parse(call_gcloud(machine, describe_command(config), timeout=_SECONDS))
    except ResourceNotFound:
        return None


class Acquisition:
    """Obtains a slice through a request. Each step acts on the last description of the request.

    Args:
        labels: Labels of a new node.
        node: Describes the node; returns None when there is none.
        say: Is given lines for the user; also told that Ctrl-C leaves the request in the queue.
    """

    def __init__(
        self,
        config: Config,
        labels: dict[str, str],
        node: Callable[[], SliceState | None],
        say: Callable[[str], None],
        machine: Workstation,
    ) -> None:
        """Describes the request that an earlier command may have made; its age counts against the time limit."""
        assert config.slice.queued is not None
        self.config, self.labels, self.node, self.say, self.machine = config, labels, node, say, machine
        self.retry = Retry(machine, say, f"request {config.slice.name}")
        # Retry the first look: the request of an earlier command may be there, and be granted.
        first_look = Retry(machine, say, f"request {config.slice.name}", retry_denied=False)
        look_until = machine.clock.monotonic() + _FIRST_LOOK_SECONDS
        self.request = first_look.call(lambda: describe(config, machine), look_until)
        self.requested = False  # by this command, and not described yet
        self.replacements = 0
        self.backoff = Backoff(machine, _FIRST_PAUSE, _LONGEST_PAUSE)  # between replacements
        self.lost_answers = 0
        self.lost: LaunchError | None = None  # why the last answer is not known
        self.node_missing_since: float | None = None
        self.begin = machine.clock.monotonic() - self._age()
        self.deadline = self.begin + config.slice.queued.valid_until_hours * 3600
        self.told, self.told_at = "", float("-inf")  # the state that the user was told last, and when

    def run(self) -> None:
        """Makes the request when there is none, and returns when it is ACTIVE and its node READY.

        Raises:
            Stockout: The time is over; the request is deleted then.
            Conflict: The request is another owner's, or another command deleted it.
            LaunchError: What Google reports about quota, permission or the request itself. The message says when a
                request is left that may be granted.
        """
        try:
            self._wait_until_ready()
        except KeyboardInterrupt:
            self.say("the request stays in the queue: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it")
            raise
        except LaunchError as error:
            is_seen = self.request is not None
            if isinstance(error, Conflict) or not (is_seen or self.requested):
                raise
            raise type(error)(
                f"{error}\n  the request {'stays' if is_seen else 'may be'} in the queue and is billed when it is "
                "granted: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it",
                exit_code=error.exit_code,
            ) from None

    def _wait_until_ready(self) -> None:
        """Returns when the node is READY. Replaces a lost request or node; raises NotOurs for another's request."""
        self._wait_for_deletion()
        while True:
            request = self.request
            if request is None:
                self._check_deadline()  # first, or the new request would be left in the queue
                self._make_request()
            else:
                ownership.require_ours(self.config, request.labels, self.machine.owner)
                if request.state == "ACTIVE":
                    state = self.retry.call(self.node, self._retry_until())
                    if state is not None and state.ready:
                        return
                    if self._is_lost(state):
                        reason = state.state if state else "gone"
                        self.say(
                            f"the node of request {request.name} is {reason}: deleting the request, then a new one"
                        )
                        self._remove()
                        continue
                elif request.state in _DEAD:
                    self._replace(request)
                    continue
                self._check_deadline()
            self._poll()

    def _wait_for_deletion(self) -> None:
        """Waits until a request that is being deleted at the first look is gone."""
        if self.request is not None and self.request.state == "DELETING":
            self.say(f"request {self.request.name} is DELETING: waiting until it is gone, then making a new one")
            self._remove()

    def _is_lost(self, node: SliceState | None) -> bool:
        """Returns whether an ACTIVE request's node is preempted, or missing for 20 s. Records when that began."""
        if node is not None:
            self.node_missing_since = None
            return node.gone_for_good
        now = self.machine.clock.monotonic()
        if self.node_missing_since is None:
            self.node_missing_since = now
        return now - self.node_missing_since >= _LAG_SECONDS

    def _retry_until(self) -> float:
        """Returns until when (monotonic clock) errors are retried: create_minutes after the deadline, or after now."""
        now = self.machine.clock.monotonic()
        return max(now, self.deadline) + self.config.slice.create_minutes * 60

    def _age(self) -> float:
        """Returns the seconds since the request was made; 0 for one that can't be granted any more."""
        request = self.request
        if request is None or request.created is None or request.state in (*_DEAD, "DELETING"):
            return 0.0
        return self.machine.clock.time() - request.created

    def _left(self) -> float:
        """Returns the seconds until the request's time is over; negative afterwards."""
        return self.deadline - self.machine.clock.monotonic()

    def _make_request(self) -> None:
        """Requests the slice. A Conflict or a lost answer is kept, and raised instead of a fourth request in a row."""
        if self.lost is not None and self.lost_answers >= _MOST_LOST_ANSWERS:
            raise self.lost
        slice_, left = self.config.slice, self._left()
        self.say(
            f"requesting a {slice_.accelerator_type} in {self.config.zone}: waiting {costs.duration(left)} at most"
        )
        try:
            command = create_command(self.config, self.labels, max(1.0, left))
            with slice_hints.mark_create_in_flight(self.config) as descriptors:
                call_gcloud(self.machine, command, timeout=_SECONDS, pass_fds=descriptors)
        except Conflict as error:
            # An earlier try of ours arrived after all, or another `up` was quicker; or a node has the name.
            self.lost, self.lost_answers = error, self.lost_answers + 1
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost, self.lost_answers = error, self.lost_answers + 1
            self.say(f"{str(error).splitlines()[0]}: checking whether the request was made nevertheless")
        else:
            self.lost_answers = 0
        self.requested = True
        self.told = ""  # tell its state, even if it is the one told last

    def _replace(self, request: Request) -> None:
        """Deletes a SUSPENDED or FAILED request, and waits before the next one (the first at once). Raises the error
        that its failure means, unless that is transient and there is time left."""
        left = self._left()
        self._remove()
        if request.state == "FAILED":
            if request.error:
                error = explain_error(request.error, create_command(self.config, self.labels, max(1.0, left)))
                if not error.transient:
                    raise error
            if left <= _LATE_SECONDS / 2:
                raise Stockout(_too_late(self.config, request))
        wait = min(self.backoff.next(), max(0.0, self._left())) if self.replacements else 0.0
        reason = request.error or f"by {request.initiator}"
        self.say(f"request {request.name} was {request.state} ({reason}): deleted it; making a new one in {wait:.0f} s")
        self.machine.clock.sleep(wait)
        self.replacements += 1

    def _remove(self) -> None:
        """Deletes the request, if there is one, and waits until it is gone."""
        if self.request is not None:
            remove(self.config, self.request, self.say, self.machine)
        self.request, self.requested, self.node_missing_since = None, False, None

    def _check_deadline(self) -> None:
        """Deletes a request not granted in time and raises Stockout; one being granted has create_minutes more."""
        is_granted = self.request is not None and self.request.state in ("PROVISIONING", "ACTIVE")
        grace = self.config.slice.create_minutes * 60 if is_granted else _LATE_SECONDS
        if self._left() < -grace:
            request = self.request
            self._remove()
            raise Stockout(_too_late(self.config, request))

    def _poll(self) -> None:
        """Sleeps, describes the request again and reports its state. Raises Conflict when it has disappeared."""
        before = self.request
        for _ in range(2):  # one answer that there is none may be stale
            self.machine.clock.sleep(_POLL_SECONDS)
            self.request = self.retry.call(lambda: describe(self.config, self.machine), self._retry_until())
            if self.request is not None or before is None:
                break
        if self.request is None and before is not None:
            raise Conflict(
                f"request {self.config.slice.name} was deleted by another command while this one waited for it; "
                "`tpu-launch up` makes a new one"
            )
        self._tell_state()

    def _tell_state(self) -> None:
        """Tells the user the request's state when it has changed, and once a minute."""
        now, request = self.machine.clock.monotonic(), self.request
        if request is None or (request.state == self.told and now - self.told_at < _REPORT_SECONDS):
            return
        left = ""
        if now < self.deadline:
            age, rest = costs.duration(now - self.begin), costs.duration(self.deadline - now)
            left = f", requested {age} ago, valid for {rest} more"
        self.say(f"request {self.config.slice.name} is {request.state}{left}")
        self.told, self.told_at = request.state, now


def _too_late(config: Config, request: Request | None) -> str:
    """Returns the message of the Stockout for a request that was not granted in time."""
    assert config.slice.queued is not None
    reason = f"\n  Google said: {request.error}" if request is not None and request.error else ""
    hours = config.slice.queued.valid_until_hours
    return (
        f"no capacity for a {config.slice.accelerator_type} in {config.zone} within {hours:g} h "
        f"(slice.queued.valid_until_hours); the request was deleted{reason}\n"
        "  ask for longer, in another zone, or for another accelerator type"
    )


def remove(config: Config, doomed: Request, say: Callable[[str], None], machine: Workstation) -> None:
    """Deletes the request, with its node if it has one, and returns when the API does not show it any more. Leaves a
    request alone that was recreated under its name. Raises CommandTimeout after 15 minutes."""
    deadline = machine.clock.monotonic() + DELETE_SECONDS
    retry = Retry(machine, say, f"request {doomed.name}")
    asked = doomed.state in ("DELETING", "SUSPENDING")

    def look() -> Look | None:
        """Returns the request's state and, unless it is being deleted, its deletion; None when it is gone."""
        nonlocal asked
        request = retry.call(lambda: describe(config, machine), deadline) or (None if asked else doomed)
        asked = True
        if request is None or request.created != doomed.created:
            return None
        # A request must end SUSPENDING before it can be deleted. The API sometimes forgets a deletion: repeat it.
        wait = request.state in ("DELETING", "SUSPENDING")
        return f"request {request.name} is {request.state}", None if wait else delete_command(config)

    delete_until_gone(machine, say, look, deadline)
