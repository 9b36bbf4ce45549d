"""Creates a slice, and waits until it is READY.

A slice under way is waited for, a stopped one started, one that is being deleted waited out. A preempted node must be
deleted before its name can be used again, as the API demands. Nothing is used without our labels (slices.py).

gcloud waits for an operation for half an hour at most, and has no command that describes an operation. So gcloud waits
for a creation, because its message says why it failed; after that, or when the answer is lost, the node is described
until it is READY.
"""

import shlex

from launcher import costs
from launcher.config import Candidate, Config
from launcher.errors import BadInput, CommandTimeout, LaunchError
from launcher.gcloud import DELETE_SECONDS, Backoff, Conflict, Preempted, Retry, StillRunning, Stockout, call_gcloud
from launcher.provider import SliceState
from launcher.tpu_vm import commands, queued, slice_hints, slices
from launcher.tpu_vm.deletion import delete_in_zone, remove
from launcher.tpu_vm.slices import Say
from launcher.workstation import Workstation

_POLL_SECONDS = 2.0
_MOST_CREATES = 3  # whose answers are lost
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, between rounds through zones without capacity


def create(config: Config, say: Say, machine: Workstation) -> SliceState:
    """Returns the slice when READY: creates a missing one, starts a stopped one, replaces a preempted one, else waits.
    Passes over zones without capacity; after the last one, tries all again for slice.stockout_minutes, with growing
    pauses.

    Raises:
        Conflict: The name is taken by a slice of another type, or another owner's that is not READY at first sight (a
            READY one is returned), or another command deleted the slice meanwhile.
        Stockout, QuotaExceeded, PermissionDenied, Refused: As Google says; only a stock-out is retried.
        BadInput, CommandTimeout: A cost limit forbids it; it is not READY after slice.create_minutes.
        LaunchError: Google does not answer: at the first look at once, later for slice.create_minutes.
    """
    begin, backoff = machine.clock.monotonic(), Backoff(machine, _FIRST_PAUSE, _LONGEST_PAUSE)
    try:
        zones = _zones_to_try(config, machine)
    except LaunchError as error:
        raise (add_bill(config, error) if error.transient else error) from None
    has_asked = False
    while True:
        for placed in zones:
            slice_hints.save_place(config, Candidate(config.slice.accelerator_type, placed.zone, config.slice.capacity))
            creation = _Creation(placed, say, machine, first_contact=not has_asked)
            has_asked = True
            try:
                return creation.run()
            except KeyboardInterrupt:
                creation.explain_interrupt()
                raise
            except Stockout as error:
                stockout = error
                if len(zones) > 1:
                    say(str(error).splitlines()[0])
            except LaunchError as error:
                raise creation.with_bill(error) from None
        wait = backoff.next()
        left = config.slice.stockout_minutes * 60 - (machine.clock.monotonic() - begin)
        if wait > left:
            slice_hints.forget(config)
            raise stockout
        say(
            f"no capacity in {', '.join(config.zones)}: trying again in {wait:.0f} s, for {costs.duration(left)} more "
            "(slice.stockout_minutes)"
        )
        machine.clock.sleep(wait)


def _zones_to_try(config: Config, machine: Workstation) -> list[Config]:
    """Returns the configuration in each zone to try: only the slice's zone if it exists, otherwise all zones. A slice
    that is gone for good must be deleted first, so its zone comes first. Asks Google only if there are several zones;
    raises LaunchError if it does not answer."""
    zones = slice_hints.in_every_place(config)
    existing = slices.describe(config, machine) if len(zones) > 1 else None
    if existing is None:
        return zones
    current = slice_hints.current(config).zone
    if not existing.gone_for_good:
        return [zoned for zoned in zones if zoned.zone == current]
    return sorted(zones, key=lambda zoned: zoned.zone != current)


def create_in_place(config: Config, say: Say, machine: Workstation) -> SliceState:
    """Returns the slice of the configuration's one candidate when READY, as `create` does, and tries no other zone.
    Raises Stockout at once; retries its first look at the slice for slice.create_minutes."""
    creation = _Creation(config, say, machine, first_contact=False)
    try:
        return creation.run()
    except LaunchError as error:
        raise creation.with_bill(error) from None


class _Creation:
    """The state machine of `create`, in one zone and once. Each step acts on the last description of the node."""

    def __init__(self, config: Config, say: Say, machine: Workstation, *, first_contact: bool) -> None:
        """`first_contact`: raise at once when the API does not answer, instead of retrying."""
        self.config, self.say, self.machine, self.first_contact = config, say, machine, first_contact
        self.retry = Retry(machine, say, f"slice {config.slice.name}")
        self.exists: bool | None = None  # when it was last described
        self.creates = 0
        self.granted = False  # whether gcloud reported the end of a creation
        self.lost: LaunchError | None = None  # why the answer to a create request is not known
        self.missing_since: float | None = None
        self.reported = ""
        self._reset_deadline()

    def run(self) -> SliceState:
        """Returns the slice when it is READY. Raises as `create`, a stock-out at once."""
        if self.first_contact:
            node = slices.describe_node(self.config, self.machine)
        else:
            node = self.retry.call(lambda: slices.describe_node(self.config, self.machine), self.deadline)
        while True:
            self.exists = node is not None
            if node is None:
                self._handle_missing()
            else:
                self.missing_since = None
                if self.creates or not node.ready:  # a run may use a READY slice of any owner
                    slices.require_ours(self.config, node.labels, self.machine.owner)
                if self._act(node):
                    return node
            node = self.retry.call(lambda: slices.describe_node(self.config, self.machine), self.deadline)

    def explain_interrupt(self) -> None:
        """If Ctrl-C may leave a slice, tells the user so; of a request in the queue, `queued` has told it."""
        if self.exists or (self.creates and self.config.slice.queued is None):
            self.say(
                "interrupted: Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` "
                "deletes it"
            )

    def with_bill(self, error: LaunchError) -> LaunchError:
        """Returns the error, with a line about the bill if a slice may be left and the error does not say so."""
        was_requested = self.creates and self.config.slice.queued is None
        is_left = self.exists or (error.transient and (was_requested or self.exists is None))
        if not is_left or isinstance(error, Conflict) or "`tpu-launch down`" in str(error):
            return error
        return add_bill(self.config, error)

    def _act(self, node: SliceState) -> bool:
        """Takes one step towards READY: minutes for a deletion or a start. Returns whether the node was READY. Raises
        Conflict and other LaunchErrors."""
        if node.state == "DELETING":
            self._wait_for_deletion(node)
        elif node.gone_for_good:
            self._replace(node)
        else:
            self._check_size(node)
            if node.ready:
                return True
            if node.state == "STOPPED":
                self._start(node)
            self._wait(node)
        return False

    def _check_size(self, node: SliceState) -> None:
        """Raises Conflict for a node of another type, LaunchError for a READY one without all hosts of its type."""
        wanted, hosts = self.config.slice.accelerator_type, self.config.accelerator.hosts
        if node.accelerator_type and node.accelerator_type != wanted:
            raise Conflict(
                f"slice {node.name} exists and is a {node.accelerator_type}, not a {wanted}: "
                "choose another slice.name, or delete it with `tpu-launch down`"
            )
        if node.ready and len(node.hosts) != hosts:
            raise LaunchError(
                f"slice {node.name} has {len(node.hosts)} hosts; a {wanted} has {hosts}: delete and create it again"
            )

    def _handle_missing(self) -> None:
        """Creates the node, or waits a moment if it was requested and may not be visible yet. Raises Conflict when it
        was deleted, and the last error after _MOST_CREATES requests whose answers were lost; and as `_create_node`."""
        now = self.machine.clock.monotonic()
        if self.missing_since is None:
            self.missing_since = now
        if self.creates and now - self.missing_since < slices.LAG_SECONDS:
            self.machine.clock.sleep(_POLL_SECONDS)
        elif self.granted:
            raise Conflict(
                f"slice {self.config.slice.name} was deleted by another command while this one waited for it; "
                "`tpu-launch up` creates it again"
            )
        elif self.lost is not None and self.creates >= _MOST_CREATES:
            raise self.lost
        else:
            self._create_node()

    def _create_node(self) -> None:
        """Checks the cost limit, requests the node (with slice.queued: from the queue) and waits for gcloud. Keeps a
        Conflict or a lost answer in `lost`; goes on after gcloud's half hour. Raises BadInput at the cost limit,
        CommandTimeout after slice.create_minutes, and gcloud's other errors."""
        config, slice_ = self.config, self.config.slice
        costs.check(config)
        self.say(
            f"creating {slice_.accelerator_type} slice {slice_.name} in {config.zone} ({config.accelerator.hosts} "
            f"hosts, {slice_.capacity})"
        )
        self.say(costs.line(config))
        labels = slices.make_labels(config, self.machine.owner, self.machine.clock.time())
        self.creates += 1
        self.missing_since = None
        slice_hints.save_create_time(config, self.machine.clock.time())
        if slice_.queued is not None:
            queued.Acquisition(config, labels, self.say, self.machine).run()
            self.granted = True
            self._reset_deadline()
            return
        if self.creates == 1:
            self._reset_deadline()
        try:
            seconds = max(1.0, self.deadline - self.machine.clock.monotonic())
            command = commands.create_command(config, labels)
            with slice_hints.mark_create_in_flight(config) as descriptors:
                call_gcloud(self.machine, command, timeout=seconds, pass_fds=descriptors)
            self.granted = True
        except StillRunning:
            self.say(f"gcloud waits no longer than half an hour; still waiting for slice {slice_.name}")
        except Conflict as error:  # another `up` created it, or an earlier try of gcloud's own arrived after all
            self.lost = error
        except CommandTimeout:
            raise CommandTimeout(
                f"no end after {seconds / 60:.0f} minutes of: {shlex.join(command)}\n"
                "Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
            ) from None
        except (Stockout, Preempted):
            raise
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost = error
            self.say(f"{str(error).splitlines()[0]}: checking whether {slice_.name} is being created nevertheless")

    def _start(self, node: SliceState) -> None:
        """Starts a STOPPED node. Raises BadInput at a cost limit, Stockout, and gcloud's other errors unless they are
        transient: then the next description tells whether it starts."""
        try:
            costs.check(self.config)
        except BadInput as error:
            raise BadInput(
                f"slice {node.name} is STOPPED and is not started: {str(error).removesuffix('. Nothing was created')}\n"
                "  raise the limit, or delete the slice with `tpu-launch down`"
            ) from None
        self.say(f"slice {node.name} is STOPPED: starting it")
        seconds = max(1.0, self.deadline - self.machine.clock.monotonic())
        try:
            call_gcloud(self.machine, commands.node_command(self.config, "start"), timeout=seconds)
        except Stockout as error:
            raise Stockout(
                f"slice {node.name} can't be started: {error}; or delete it with `tpu-launch down`"
            ) from None
        except LaunchError as error:
            if not error.transient:
                raise  # else the next description tells whether it starts

    def _wait_for_deletion(self, node: SliceState) -> None:
        """Waits until a DELETING node is gone, 15 minutes at most (CommandTimeout); resets the deadline. Raises
        Conflict if this command has requested the node: another command deletes it."""
        if self.creates:
            raise Conflict(
                f"slice {node.name} is being deleted by another command while this one waits for it; `tpu-launch up` "
                "creates it again"
            )
        self.say(f"slice {node.name} is DELETING: waiting until it is gone, then creating it")
        deadline = self.machine.clock.monotonic() + DELETE_SECONDS
        remove(self.config, node, self.say, self.machine, deadline, wait_only=True)
        self._reset_deadline()

    def _replace(self, node: SliceState) -> None:
        """Deletes a lost node and its request, and waits for that; resets the deadline. Raises Preempted if this
        command created the node, else as `delete_in_zone`."""
        if self.creates:
            raise Preempted(
                f"slice {node.name} became {node.state} while it was being created; run `tpu-launch up` again"
            )
        self.say(f"slice {node.name} is {node.state}: deleting it, because its name can't be used before")
        delete_in_zone(self.config, slices.find_request(self.config, self.machine), node, self.say, self.machine)
        self._reset_deadline()

    def _wait(self, node: SliceState) -> None:
        """Tells the user a new state and sleeps 2 s. Raises CommandTimeout after slice.create_minutes."""
        if node.state != self.reported:
            self.say(f"slice {node.name} is {node.state}")
            self.reported = node.state
        if self.machine.clock.monotonic() > self.deadline:
            raise CommandTimeout(
                f"slice {node.name} is {node.state} and not READY after {self.config.slice.create_minutes:.0f} minutes "
                "(slice.create_minutes): `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
            )
        self.machine.clock.sleep(_POLL_SECONDS)

    def _reset_deadline(self) -> None:
        """Gives the slice slice.create_minutes from now on to become READY."""
        self.deadline = self.machine.clock.monotonic() + self.config.slice.create_minutes * 60


def add_bill(config: Config, error: LaunchError) -> LaunchError:
    """Adds a line to an error, which it returns: the slice may exist, and is billed then."""
    error.args = (
        f"{error}\n  slice {config.slice.name} may exist, and is billed then: `tpu-launch up` goes on with it, "
        "`tpu-launch down` deletes it",
    )
    return error
