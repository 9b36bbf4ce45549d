"""The slice of a configuration with several candidates: created as one of them, with what earlier commands left.

The record of requests (requests.py) says what may exist; a race (race.py) asks for all candidates at once. Without
slice.candidates, `create` is that of `creation`.
"""

import contextlib
from collections.abc import Callable

from launcher.config import Config
from launcher.errors import LaunchError
from launcher.gcloud.errors import Conflict
from launcher.provider import SliceState
from launcher.tpu_vm import creation, deletion, ownership, race, requests, slice_hints, slices
from launcher.tpu_vm.race import Race, Say
from launcher.tpu_vm.requests import Recorded, RequestRecord
from launcher.workstation import Owner, Workstation
from training import storage


def create(config: Config, say: Say, machine: Workstation, patient: Workstation) -> SliceState:
    """Returns the slice when it is READY: the one that exists, or the first candidate that Google grants. Withdraws the
    others on `patient`, whose clock, unlike that of `machine`, does not raise. Raises as `creation.create`."""
    if not config.slice.candidates:
        return creation.create(config, say, machine)
    with race.turn(config, say, machine) as record:
        _follow(config, record)
        starting = Race(config, record, _api(config, say, patient), say, machine, patient)
        try:
            existing = slices.describe(config, machine)
        except LaunchError as error:
            raise (creation.add_bill(config, error) if error.transient else error) from None
        place, used = slice_hints.in_current_place(config), _used(config, record, existing)
        is_granted = used is not None and used.granted is not None
        if existing is not None and not existing.gone_for_good and existing.state != "DELETING":
            if used is not None and (existing.ready or is_granted):
                record.grant(used, machine.clock.time())
                starting.withdraw([request for request in record.open() if request.number != used.number])
            if existing.ready or used is None or is_granted:
                own = machine if used is None else race.while_open(record, used, machine)
                try:
                    return creation.create_in_place(place, say, own)
                except Conflict:
                    if used is not None and used.number not in [request.number for request in record.open()]:
                        starting.withdraw([used])  # this command may have created it again before that end
                    raise
        elif used is not None and is_granted:
            record.end([used], requests.TAKEN if existing is not None else requests.DELETED, machine.clock.time())
        if existing is not None and existing.gone_for_good:
            deletion.look_and_delete(place, say, machine)
        return starting.run()


def check_owner(config: Config, describe: Callable[[], SliceState | None], owner: Owner) -> None:
    """Raises NotOurs when the slice that exists is another owner's. When Google does not answer, the error says that a
    slice of an earlier command may be billed."""
    try:
        existing = describe()
    except LaunchError as error:
        raise (creation.add_bill(config, error) if error.transient else error) from None
    if existing is not None:
        ownership.require_ours(config, existing.labels, owner)


def withdraw_unused(config: Config, say: Say, machine: Workstation) -> None:
    """Withdraws the requests that a killed command left open, and keeps the one whose slice is used. Raises Conflict
    while another process asks for candidates: it may withdraw the one that is READY."""
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
        Race(config, record, _api(config, say, machine), say, machine, machine).withdraw(left)


def _follow(config: Config, record: RequestRecord) -> None:
    """Copies what other machines have recorded, if their bucket answers. Saves the candidate of a granted request as
    the current one: a killed command may have ended before it did so."""
    with contextlib.suppress(storage.StorageError):
        record.pull()
    for request in record.open():
        if request.granted is not None:
            slice_hints.save_place(config, request.candidate)


def _used(config: Config, record: RequestRecord, existing: SliceState | None) -> Recorded | None:
    """Returns the open request of the slice that exists; without a slice, the one granted before; else None."""
    current, open_ = slice_hints.current(config), record.open()
    if existing is not None:
        return next((request for request in open_ if request.candidate == current), None)
    return next((request for request in open_ if request.granted is not None), None)


def _api(config: Config, say: Say, machine: Workstation) -> race.SliceCalls:
    """Returns the calls by which a race makes slices: `create` begins its messages with the candidate, and raises
    NotOurs for another owner's slice; `delete` also waits for create requests that may still arrive."""

    def create_one(placed: Config, own: Workstation) -> SliceState:
        where = f"{placed.slice.accelerator_type} in {placed.zone}"
        state = creation.create_in_place(placed, lambda text: say(f"{where}: {text}"), own)
        ownership.require_ours(placed, state.labels, machine.owner)
        return state

    return race.SliceCalls(
        create=create_one, delete=lambda places: deletion.delete_places(config, places, say, machine, all_requests=True)
    )
