"""The slice of a configuration with several candidates: created as one of them, with what earlier commands left.
Without slice.candidates, `create` is that of `creation`.

A race asks for several candidates at once, takes the first in the file's order that is granted, and withdraws all other
requests. A granted one waits at most two minutes for those before it that Google has not answered yet.

A request is recorded before it is made (requests.py), and counts as open until Google says that neither its node nor
its queued resource is there. What may be granted together never costs more than slice.price_limit. A command that is
interrupted withdraws its requests; one that is killed leaves them in the record, and the next `up`, `run` or `down`
takes one that was granted meanwhile and withdraws the others.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher import costs
from launcher.config import Candidate, Config
from launcher.errors import BadInput, LaunchError
from launcher.gcloud import Backoff, Conflict, QuotaExceeded, Refused, Stockout
from launcher.provider import SliceState
from launcher.shell import Result
from launcher.tpu_vm import creation, deletion, requests, slice_hints, slices
from launcher.tpu_vm.requests import Recorded, RequestRecord
from launcher.tpu_vm.slices import NotOurs, Say
from launcher.workstation import CheckedClock, Owner, Workstation
from training import storage
from training.machine import Event, Future

_POLL_SECONDS = 1.0
_LOCK_POLL_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, before a candidate without capacity is asked for again
_BETTER_SECONDS = 120.0  # for which a granted slice waits for requests of candidates before it in the file
_TURN_SECONDS = 600.0  # in the queue, while price_limit leaves no room for other candidates
_ASLEEP_SECONDS = 30.0  # by which a wait is late if the computer slept
_WITHDRAW_SECONDS = 300.0  # for which a withdrawal is tried while Google's API does not answer


def create(config: Config, say: Say, machine: Workstation, patient: Workstation) -> SliceState:
    """Returns the slice when READY: the existing one (a lost one is deleted first), or the first candidate granted; one
    before it in the file has two minutes more. Without slice.candidates, as `creation.create`. Else waits, without
    limit, for other processes that ask, and withdraws all other requests, on `patient`, whose clock, unlike that of
    `machine`, never raises. Raises as `creation.create`, and Conflict while a slice is there that was granted for an
    earlier version of the file."""
    if not config.slice.candidates:
        _require_candidates(config, RequestRecord(config), machine)
        return creation.create(config, say, machine)
    with turn(config, say, machine) as record:
        _follow(config, record)
        _require_candidates(config, record, machine)
        race = Race(config, record, say, machine, patient)
        try:
            existing = slices.describe(config, machine)
        except LaunchError as error:
            raise (creation.add_bill(config, error) if error.transient else error) from None
        place, used = slice_hints.in_current_place(config), _used(config, record, existing)
        if existing is None or existing.gone_for_good or existing.state == "DELETING":
            if used is not None and used.granted is not None:
                record.end([used], requests.DELETED if existing is None else requests.TAKEN, machine.clock.time())
            if existing is not None and existing.gone_for_good:
                deletion.look_and_delete(place, say, machine)
            return race.run()
        if used is None:  # created while the file named no candidates
            return creation.create_in_place(place, say, machine)
        if existing.ready or used.granted is not None:
            return race.keep(used, place)
        return race.run()  # which goes on with the request, among others: Google has not granted it yet


def check_owner(config: Config, describe: Callable[[], SliceState | None], owner: Owner) -> None:
    """Raises NotOurs when the slice that `describe` returns (None: no slice) is another owner's, unless --any-owner is
    set. Passes on errors of `describe`; a transient one says that a slice of an earlier command may be billed."""
    try:
        existing = describe()
    except LaunchError as error:
        raise (creation.add_bill(config, error) if error.transient else error) from None
    if existing is not None:
        slices.require_ours(config, existing.labels, owner)


def withdraw_unused(config: Config, say: Say, machine: Workstation) -> None:
    """Withdraws requests that a killed command left open, and waits for their deletion, as `Race.withdraw`; keeps the
    one whose slice is granted or READY. Does nothing without open requests. Raises Conflict at once while another
    process of this machine asks for candidates, LaunchError if the slice can't be described."""
    record = RequestRecord(config)
    if not record.open():
        return
    with record.try_lock() as held:
        if not held:
            raise Conflict(f"another tpu-launch asks for candidates of slice {config.slice.name}: wait for its end")
        _follow(config, record)
        used = next((request for request in record.open() if request.granted is not None), None)
        if used is None:
            existing = slices.describe(config, machine)
            if existing is not None and existing.ready and (used := _used(config, record, existing)):
                record.grant(used, machine.clock.time())
        left = [request for request in record.open() if used is None or request.number != used.number]
        Race(config, record, say, machine, machine).withdraw(left)


def _require_candidates(config: Config, record: RequestRecord, machine: Workstation) -> None:
    """Raises Conflict if our slice of a granted request is there, which the file, or the run after preflight, does not
    name: it would not be found, a second one created, and both billed. Raises LaunchError if Google does not answer."""
    known = {(candidate.zone, config.placed(candidate).node) for candidate in config.candidates}
    for request in record.open():
        if request.granted is None or (request.candidate.zone, request.node) in known:
            continue
        found = slices.describe_node(config.placed(request.candidate, request.node), machine)
        if found is not None and not slices.why_not_of(config, found.labels, machine.owner):
            raise Conflict(
                f"slice {config.slice.name} exists as {request.candidate}, node {request.node}, which is not among its "
                "candidates any more: `tpu-launch down` deletes it"
            )


def _follow(config: Config, record: RequestRecord) -> None:
    """Copies what other machines have recorded, if their bucket answers. Saves the candidate of a granted request as
    the current one: a killed command may have ended before it did so."""
    with contextlib.suppress(storage.StorageError):
        record.pull()
    for request in record.open():
        if request.granted is not None:
            slice_hints.save_place(config, request.candidate)


def _used(config: Config, record: RequestRecord, existing: SliceState | None) -> Recorded | None:
    """Returns the open request for the candidate last seen (not known: the first one) if there is a slice, `existing`;
    else the open request that is recorded as granted. None without such a request."""
    current, open_ = slice_hints.current(config), record.open()
    if existing is not None:
        return next((request for request in open_ if request.candidate == current), None)
    return next((request for request in open_ if request.granted is not None), None)


class _Over(Exception):
    """Ends the thread of a candidate that is withdrawn: at its next wait, or at its next command."""


@dataclass
class _Entry:
    """A request of this command that has not ended."""

    request: Recorded
    over: Event
    begun: float
    answer: Future[SliceState]


@contextlib.contextmanager
def turn(config: Config, say: Say, machine: Workstation) -> Iterator[RequestRecord]:
    """Waits without limit, telling the user once, until no other process of this machine asks for the slice's
    candidates; yields their record, locked during the block."""
    record, said = RequestRecord(config), False
    while True:
        with record.try_lock() as held:
            if held:
                yield record
                return
        if not said:
            say(f"another tpu-launch is asking for candidates of slice {config.slice.name}; waiting for it")
            said = True
        machine.clock.sleep(_LOCK_POLL_SECONDS)


def while_open(
    record: RequestRecord, request: Recorded, machine: Workstation, is_over: Callable[[], bool] = lambda: False
) -> Workstation:
    """Returns a copy of `machine` whose waits (each second) and commands (before each) raise _Over once `is_over()`,
    and Conflict once another command has recorded the request's end here: its slice is not created again."""

    def check() -> None:
        if is_over():
            raise _Over
        record.require_open(request)

    def run(argv: Sequence[str], **options: Any) -> Result:
        check()
        return machine.run(argv, **options)

    return replace(machine, clock=CheckedClock(machine.clock, check), run=run)


class Race:
    """One command's requests for the candidates of a slice. Used by one thread, under `turn`."""

    def __init__(
        self, config: Config, record: RequestRecord, say: Say, machine: Workstation, patient: Workstation
    ) -> None:
        """Says which candidates cost too much. `patient`: the machine for withdrawals; its waits do not raise."""
        self.config, self.record, self.say, self.machine, self.patient = config, record, say, machine, patient
        self.begin = machine.clock.monotonic()
        self.entries: dict[Candidate, _Entry] = {}
        self.left = self._affordable()  # candidates that may be asked for, in the file's order
        self.granted_at: float | None = None  # when the first slice was READY
        self.leaving: dict[int, Future[None]] = {}  # withdrawals under way, by the number of the request
        self.next_ask = dict.fromkeys(self.left, 0.0)  # monotonic clock
        self.pauses = {candidate: Backoff(machine, _FIRST_PAUSE, _LONGEST_PAUSE) for candidate in self.left}
        self.error: LaunchError = BadInput(f"slice {config.slice.name}: no candidate fits within slice.price_limit")

    def run(self) -> SliceState:
        """Asks for the candidates, waits until one is READY (`_collect`), and returns its slice after recording it and
        withdrawing all other requests. Goes on with requests that an earlier command left open. Withdraws all but a
        granted one if it raises: Stockout without capacity within slice.stockout_minutes, the last reason (LaunchError)
        if Google refuses every candidate, Conflict if a `down` ended the requests."""
        try:
            self.withdraw([request for request in self.record.open() if request.candidate not in self.left])
            while True:
                self._ask()
                if (won := self._collect()) is not None:
                    return won
                deadline = self.begin + self.config.slice.stockout_minutes * 60
                if not self.entries and all(self.next_ask[candidate] > deadline for candidate in self.left):
                    raise self.error
                self._make_room()
                self._wait()
        except BaseException:
            self._withdraw_rest()  # after this command no process chooses between the requests
            raise

    def keep(self, used: Recorded, place: Config) -> SliceState:
        """Records the grant of an earlier command's request, withdraws all others, and returns its slice, which is in
        `place`, when READY. Raises as `creation.create_in_place`, and Conflict once a `down` has ended the request."""
        self.record.grant(used, self.machine.clock.time())
        self.withdraw([request for request in self.record.open() if request.number != used.number])
        try:
            return creation.create_in_place(place, self.say, while_open(self.record, used, self.machine))
        except Conflict:
            if used.number not in [request.number for request in self.record.open()]:
                self.withdraw([used])  # this command may have created it again before that end
            raise

    def _affordable(self) -> list[Candidate]:
        """Returns the candidates within the configuration's cost limits; says which are left out, and why."""
        allowed = []
        for candidate in self.config.candidates:
            try:
                costs.check(self.config.placed(candidate))
            except BadInput as error:
                self.say(f"not asking for {candidate}: {error}")
            else:
                allowed.append(candidate)
        return allowed

    def _room(self) -> float:
        """Returns the dollars an hour that slice.price_limit leaves beside the open requests; infinity without one."""
        limit = self.config.slice.price_limit
        if limit is None:
            return float("inf")
        return limit - sum(_price(request.candidate) for request in self._open().values())

    def _open(self) -> dict[int, Recorded]:
        """Returns the open requests by number, also entries that a `down` has just ended: their slices may be there.
        Raises LaunchError if the record's bucket does not answer; OSError."""
        return {item.number: item for item in (*self.record.open(), *(each.request for each in self.entries.values()))}

    def _ask(self) -> None:
        """Starts a thread for each candidate without one, unless it is being withdrawn: for an open request of an
        earlier command, else for a new one if it is due, slice.price_limit has room and no slice is granted yet.
        Records a new one first. Raises OSError, LaunchError if it can't be recorded."""
        now, earlier = self.machine.clock.monotonic(), {item.candidate: item for item in self.record.open()}
        for candidate in self.left:
            request = earlier.get(candidate)
            if candidate in self.entries or (request is not None and request.number in self.leaving):
                continue
            if request is None:
                early = self.granted_at is not None or now < self.next_ask[candidate]
                if early or _price(candidate) > self._room() + 1e-9:
                    continue
                request = self.record.ask(candidate, self.config.placed(candidate).node, self.machine.clock.time())
                self.say(f"request {request.number}: {candidate}")
            self._start(request)

    def _start(self, request: Recorded) -> None:
        """Starts the thread that creates a request's slice, and keeps its entry, whose `over` ends the thread."""
        over = self.machine.threads.event()
        machine = while_open(self.record, request, self.machine, over.is_set)
        placed = self.config.placed(request.candidate, request.node)
        answer = self.machine.threads.submit(self._create, placed, machine)
        self.entries[request.candidate] = _Entry(request, over, self.machine.clock.monotonic(), answer)

    def _create(self, placed: Config, machine: Workstation) -> SliceState:
        """Returns a candidate's slice when it is READY. Begins each message with the candidate. Raises as the waits of
        `machine` and `creation.create` do, and NotOurs for another owner's slice."""
        where = f"{placed.slice.accelerator_type} in {placed.zone}"
        state = creation.create_in_place(placed, lambda text: self.say(f"{where}: {text}"), machine)
        slices.require_ours(placed, state.labels, self.patient.owner)
        return state

    def _collect(self) -> SliceState | None:
        """Looks, without waiting, at the requests whose threads have ended; ends or retries failed ones (`_refuse`).
        Returns the granted slice that is first in the file's order, after recording it and withdrawing all others; None
        if none is granted, and for up to two minutes while candidates before it may be: then withdraws only those
        behind it. Raises Conflict after a `down`, and any error of a request that is no LaunchError."""
        best: _Entry | None = None
        for candidate, entry in [(each, self.entries[each]) for each in self.left if each in self.entries]:
            self.record.require_open(entry.request)
            if not entry.answer.done():
                continue
            error = entry.answer.exception()
            if error is None:
                best = best or entry
                continue
            del self.entries[candidate]
            if not isinstance(error, LaunchError):
                raise error
            self._refuse(entry, error)
        if best is None:
            return None
        now = self.machine.clock.monotonic()
        self.granted_at = now if self.granted_at is None else self.granted_at
        place = self.left.index(best.request.candidate)
        before = any(candidate in self.entries for candidate in self.left[:place])
        if not before or now - self.granted_at >= _BETTER_SECONDS:
            return self._take(best, best.answer.result())
        behind = [self.entries[candidate].request for candidate in self.left[place + 1 :] if candidate in self.entries]
        self.withdraw(behind, wait=False)
        return None

    def _take(self, entry: _Entry, state: SliceState) -> SliceState:
        """Records the slice as the run's, and its candidate as the one last seen; withdraws all other requests, and
        waits for that, without raising if one can't be withdrawn. Returns `state`."""
        self.record.grant(entry.request, self.machine.clock.time())
        slice_hints.save_place(self.config, entry.request.candidate)
        self.say(f"request {entry.request.number}: granted, {entry.request.candidate}")
        self._withdraw_rest(entry.request.number)  # which the record may not tell while its bucket is silent
        return state

    def _withdraw_rest(self, *used: int) -> None:
        """Withdraws all open requests but `used` (numbers) and granted ones; waits, also for earlier withdrawals. Does
        not raise if one can't be withdrawn: `withdraw` tells the user, and leaves it open."""
        granted = {*used, *(item.number for item in self.record.read() if item.granted is not None)}
        self.withdraw([item for number, item in self._open().items() if number not in granted | self.leaving.keys()])
        for thread in self.leaving.values():
            thread.result()

    def _refuse(self, entry: _Entry, error: LaunchError) -> None:
        """Tells the user the error of a request, and records its end, or withdraws it in a thread if Google may have
        accepted it. A candidate whose error is transient, like a stock-out, is asked for again after a pause (15 s,
        growing to five minutes); any other is dropped."""
        candidate, first_line = entry.request.candidate, str(error).splitlines()[0]
        self.error = error
        self.say(f"request {entry.request.number}: {candidate}: {first_line}")
        if isinstance(error, Stockout):
            self.record.end([entry.request], requests.NO_CAPACITY, self.machine.clock.time())
        elif isinstance(error, QuotaExceeded | Refused | NotOurs):  # Google has accepted nothing: nothing to withdraw
            self.record.end([entry.request], requests.REFUSED, self.machine.clock.time())
        else:
            self.withdraw([entry.request], wait=False)
        if error.transient:
            self.next_ask[candidate] = self.machine.clock.monotonic() + self.pauses[candidate].next()
        else:
            self.left.remove(candidate)

    def _wait(self) -> None:
        """Waits until something may have changed: a second while a request is open, else until the next one is due.
        Restarts the ten minutes of each request if the computer slept: Google may have granted it meanwhile."""
        now, due = self.machine.clock.monotonic(), min((self.next_ask[item] for item in self.left), default=0.0)
        seconds = _POLL_SECONDS if self.entries else max(_POLL_SECONDS, due - now)
        self.machine.clock.sleep(seconds)
        if (woke := self.machine.clock.monotonic()) - now - seconds > _ASLEEP_SECONDS:
            for entry in self.entries.values():
                entry.begun = woke

    def _make_room(self) -> None:
        """Withdraws the oldest request after ten minutes without a grant, and waits for its deletion, if
        slice.price_limit leaves no room for a candidate that is due. The withdrawn one is due ten minutes later."""
        now, room = self.machine.clock.monotonic(), self._room()
        due = [item for item in self.left if item not in self.entries and self.next_ask[item] <= now]
        oldest = min(self.entries.values(), key=lambda entry: entry.begun, default=None)
        if not due or oldest is None or now - oldest.begun < _TURN_SECONDS or oldest.answer.done():
            return
        if min(map(_price, due)) > room and self.granted_at is None:  # else nothing more is asked for
            minutes = _TURN_SECONDS / 60
            self.say(f"request {oldest.request.number}: no capacity in {minutes:.0f} minutes, trying another candidate")
            self.withdraw([oldest.request])  # may take as long as the creation that it cancels
            self.next_ask[oldest.request.candidate] = self.machine.clock.monotonic() + _TURN_SECONDS

    def withdraw(self, doomed: Sequence[Recorded], *, wait: bool = True) -> None:
        """Withdraws requests: ends their threads at the next wait or command, deletes their nodes and queued resources
        until Google has none, and records the end; without `wait` in a thread, kept in `leaving`: a granted slice must
        not wait for it. Raises nothing if Google refuses, or does not answer for five minutes: tells the user, and
        leaves the requests open for the next command to withdraw."""
        entries = [entry for request in doomed if (entry := self.entries.pop(request.candidate, None)) is not None]
        for entry in entries:
            entry.over.set()
        if doomed and wait:
            self._delete(doomed, entries)
        elif doomed:
            thread = self.machine.threads.submit(self._delete, doomed, entries)
            self.leaving.update({request.number: thread for request in doomed})

    def _delete(self, doomed: Sequence[Recorded], entries: Sequence[_Entry]) -> None:
        """Deletes the requests' nodes and queued resources, again until the threads of `entries` have ended, and
        records the end. If that fails (for five minutes, if it may pass), only tells the user and leaves them open."""
        places = [self.config.placed(request.candidate, request.node) for request in doomed]
        names = ", ".join(str(request.candidate) for request in doomed)
        self.say(f"withdrawing {names}")
        clock = self.patient.clock
        deadline = clock.monotonic() + _WITHDRAW_SECONDS
        left = (
            f"{names}: not withdrawn yet, and billed once granted; the next `tpu-launch up`, `run` or `down` withdraws "
            "them: "
        )
        try:
            while True:
                ended = all(entry.answer.done() for entry in entries)  # look once more after the last thread has ended
                late = clock.monotonic() > deadline  # before the try: this machine may sleep during it
                try:
                    deletion.delete_places(self.config, places, self.say, self.patient, all_requests=True)
                    if ended:
                        break
                except LaunchError as error:
                    if not error.transient or late:
                        self.say(f"{left}{error}")
                        return
                clock.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self.say(f"{left}interrupted")
            raise
        self.record.end(doomed, requests.WITHDRAWN, clock.time())


def _price(candidate: Candidate) -> float:
    """Returns the list price in dollars an hour; 0 when it is unknown, which price_limit does not allow."""
    return costs.per_hour(candidate.accelerator_type, candidate.zone, candidate.capacity) or 0.0
