"""Creating a slice through a queued resource ("request"): Google waits for capacity until the request's valid-until.

The request has the slice's name, and so has its one node. Waiting can be resumed, because every step starts from what
the API says. While it waits, transient errors are retried: a request left alone may be granted and is billed then. A
request that is SUSPENDED or FAILED never recovers and keeps its quota: it is deleted, with force, and made again while
there is time.
"""

from launcher import costs
from launcher.config import Config
from launcher.errors import LaunchError
from launcher.gcloud import DELETE_SECONDS, Backoff, Conflict, Retry, Stockout, call_gcloud, explain_error
from launcher.provider import SliceState
from launcher.tpu_vm import commands, deletion, slice_hints, slices
from launcher.tpu_vm.slices import Request, Say
from launcher.workstation import Workstation
from training.machine import parse_time

_SECONDS = 120.0  # for one call: creating a request is quick, providing it is not
_FIRST_LOOK_SECONDS = 120.0  # until an API that does not answer ends what has not begun
_POLL_SECONDS = 2.0
_REPORT_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0  # between requests, the second one on
_LATE_SECONDS = 60.0  # the API may be this late in failing a request whose time is over
_MOST_LOST_ANSWERS = 3  # to create requests, in a row
_DEAD = ("SUSPENDED", "FAILED")


class Acquisition:
    """Obtains a slice with these labels through a request. Each step acts on the last description of the request."""

    def __init__(self, config: Config, labels: dict[str, str], say: Say, machine: Workstation) -> None:
        """Describes the request that an earlier command may have made; its age counts against the time limit."""
        assert config.slice.queued is not None
        self.config, self.labels, self.say, self.machine = config, labels, say, machine
        self.retry = Retry(machine, say, f"request {config.slice.name}")
        # Retry the first look: the request of an earlier command may be there, and be granted.
        first_look = Retry(machine, say, f"request {config.slice.name}", retry_denied=False)
        look_until = machine.clock.monotonic() + _FIRST_LOOK_SECONDS
        self.request = first_look.call(lambda: slices.describe_request(config, machine), look_until)
        self.requested = False  # by this command, and not described yet
        self.replacements = 0
        self.backoff = Backoff(machine, _FIRST_PAUSE, _LONGEST_PAUSE)  # between replacements
        self.lost: list[LaunchError] = []  # why the last answers in a row are not known
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
            error.args = (
                f"{error}\n  the request {'stays' if is_seen else 'may be'} in the queue and is billed when it is "
                "granted: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it",
            )
            raise

    def _wait_until_ready(self) -> None:
        """Returns when the node is READY. Waits out a request that is being deleted, replaces a lost request or node;
        raises NotOurs for another owner's request, Stockout and Conflict as `run`."""
        if self.request is not None and self.request.state == "DELETING":
            self.say(f"request {self.request.name} is DELETING: waiting until it is gone, then making a new one")
            self._remove()
        while True:
            request = self.request
            if request is None:
                self._check_deadline()  # first, or the new request would be left in the queue
                self._make_request()
            else:
                slices.require_ours(self.config, request.labels, self.machine.owner)
                if request.state == "ACTIVE":
                    node = self.retry.call(lambda: slices.describe_node(self.config, self.machine), self._retry_until())
                    if node is not None and node.ready:
                        return
                    if self._is_lost(node):
                        reason = node.state if node else "gone"
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

    def _is_lost(self, node: SliceState | None) -> bool:
        """Returns whether an ACTIVE request's node is preempted, or missing for 20 s (`node_missing_since`)."""
        if node is not None:
            self.node_missing_since = None
            return node.gone_for_good
        now = self.machine.clock.monotonic()
        if self.node_missing_since is None:
            self.node_missing_since = now
        return now - self.node_missing_since >= slices.LAG_SECONDS

    def _retry_until(self) -> float:
        """Returns until when (monotonic clock) errors are retried: create_minutes from now or a later deadline."""
        return max(self.machine.clock.monotonic(), self.deadline) + self.config.slice.create_minutes * 60

    def _age(self) -> float:
        """Returns the seconds since the request was made; 0 without one, or for one that can't be granted any more."""
        request = self.request
        created = None if request is None else parse_time(request.created)
        if request is None or created is None or request.state in (*_DEAD, "DELETING"):
            return 0.0
        return self.machine.clock.time() - created

    def _left(self) -> float:
        """Returns the seconds until the request's time is over; negative afterwards."""
        return self.deadline - self.machine.clock.monotonic()

    def _make_request(self) -> None:
        """Requests the slice. A Conflict or a lost answer is kept in `lost`, and raised instead of a fourth request in
        a row; other errors are raised at once."""
        if len(self.lost) >= _MOST_LOST_ANSWERS:
            raise self.lost[-1]
        slice_, left = self.config.slice, self._left()
        self.say(
            f"requesting a {slice_.accelerator_type} in {self.config.zone}: waiting {costs.duration(left)} at most"
        )
        try:
            command = commands.create_request_command(self.config, self.labels, max(1.0, left))
            with slice_hints.mark_create_in_flight(self.config) as descriptors:
                call_gcloud(self.machine, command, timeout=_SECONDS, pass_fds=descriptors)
        except Conflict as error:
            # An earlier try of ours arrived after all, or another `up` was quicker; or a node has the name.
            self.lost.append(error)
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost.append(error)
            self.say(f"{str(error).splitlines()[0]}: checking whether the request was made nevertheless")
        else:
            self.lost.clear()
        self.requested = True
        self.told = ""  # tell its state, even if it is the one told last

    def _replace(self, request: Request) -> None:
        """Deletes a SUSPENDED or FAILED request, and waits before the next one (the first at once). After FAILED,
        raises the error that this means unless it is transient, and Stockout when less than 30 s are left."""
        left = self._left()
        self._remove()
        if request.state == "FAILED":
            if request.detail:
                command = commands.create_request_command(self.config, self.labels, max(1.0, left))
                error = explain_error(request.detail, command)
                if not error.transient:
                    raise error
            if left <= _LATE_SECONDS / 2:
                raise self._too_late(request)
        wait = min(self.backoff.next(), max(0.0, self._left())) if self.replacements else 0.0
        reason = request.detail or f"by {request.initiator}"
        self.say(f"request {request.name} was {request.state} ({reason}): deleted it; making a new one in {wait:.0f} s")
        self.machine.clock.sleep(wait)
        self.replacements += 1

    def _remove(self) -> None:
        """Deletes the request with its node, if any, and waits until it is gone, for 15 minutes (CommandTimeout)."""
        if self.request is not None:
            deadline = self.machine.clock.monotonic() + DELETE_SECONDS
            deletion.remove(self.config, self.request, self.say, self.machine, deadline)
        self.request, self.requested, self.node_missing_since = None, False, None

    def _check_deadline(self) -> None:
        """Deletes the request and raises Stockout if its time has been over for a minute, or for create_minutes while
        its node is being made."""
        is_granted = self.request is not None and self.request.state in ("PROVISIONING", "ACTIVE")
        grace = self.config.slice.create_minutes * 60 if is_granted else _LATE_SECONDS
        if self._left() < -grace:
            request = self.request
            self._remove()
            raise self._too_late(request)

    def _too_late(self, request: Request | None) -> Stockout:
        """Returns the error for a request (None: it is gone) not granted in time, with Google's reason if known."""
        assert self.config.slice.queued is not None
        reason = f"\n  Google said: {request.detail}" if request is not None and request.detail else ""
        hours = self.config.slice.queued.valid_until_hours
        return Stockout(
            f"no capacity for a {self.config.slice.accelerator_type} in {self.config.zone} within {hours:g} h "
            f"(slice.queued.valid_until_hours); the request was deleted{reason}\n"
            "  ask for longer, in another zone, or for another accelerator type"
        )

    def _poll(self) -> None:
        """Sleeps 2 s, describes the request again and tells the user its state. Raises Conflict when two looks miss
        it."""
        before = self.request
        for _ in range(2):  # one answer that there is none may be stale
            self.machine.clock.sleep(_POLL_SECONDS)
            self.request = self.retry.call(
                lambda: slices.describe_request(self.config, self.machine), self._retry_until()
            )
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
