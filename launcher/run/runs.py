"""Runs of the launcher's folder: finding one, and choosing the run that a `tpu-launch run` starts or resumes."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.home import write_private
from launcher.provider import Overlay
from launcher.run import bucket, specification
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.specification import Specification
from launcher.run.state import Phase
from launcher.workstation import Workstation
from training import storage
from training.machine import format_time


def list_runs(home: Path, machine: Workstation) -> list[Ledger]:
    """Returns all runs of the launcher's folder, oldest first, without those that are damaged or of another version."""
    created = {}
    for path in (home / "runs").glob("*/run.json"):
        ledger = Ledger(path.parent, machine.clock)
        with contextlib.suppress(BadInput):  # `find_run` reports it when the user names the run
            ledger.entries()
            created[ledger] = ledger.record.created
    return sorted(created, key=lambda ledger: (created[ledger], ledger.run_id))


def runs_on_slice(config: Config, home: Path, machine: Workstation) -> list[Ledger]:
    """Returns the runs on a slice of this name, project, zone and provider, oldest first, ended ones too."""
    wanted = (config.slice.name, config.project, config.zone, config.provider)
    return [
        ledger
        for ledger in list_runs(home, machine)
        if (record := ledger.record) and (record.slice, record.project, record.zone, record.provider) == wanted
    ]


def find_run(
    home: Path, machine: Workstation, run_id: str | None, *, slice_name: str | None = None, provider: str | None = None
) -> Ledger:
    """Returns the run of that id, or the newest one (`run_id` None), of that slice and provider (None: any), after
    pulling its bucket's events, if the bucket answers. Raises BadInput when there is none, or it is damaged."""
    return pull_known(_find(home, machine, run_id, slice_name, provider), machine)


def pull_known(ledger: Ledger, machine: Workstation) -> Ledger:
    """Pulls the events that other machines recorded of an unfinished run, if its bucket answers. Returns the ledger."""
    if ledger.state.phase is not Phase.FINISHED:
        with contextlib.suppress(LaunchError):
            ledger.pull(machine.threads)
    return ledger


def _find(home: Path, machine: Workstation, run_id: str | None, slice_name: str | None, provider: str | None) -> Ledger:
    """Returns the run as `find_run` does, without asking its bucket."""
    known = [
        ledger
        for ledger in list_runs(home, machine)
        if slice_name in (None, ledger.record.slice) and provider in (None, ledger.record.provider)
    ]
    if run_id is not None:
        for ledger in known:
            if ledger.run_id == run_id:
                return ledger
        if (home / "runs" / run_id / "run.json").exists():
            ledger = Ledger(home / "runs" / run_id, machine.clock)
            _ = ledger.record, ledger.entries()  # raises if damaged or of another version; else another slice's run
        raise BadInput(f"there is no run {run_id!r} here; known: {', '.join(run.run_id for run in known) or 'none'}")
    if not known:
        raise BadInput(
            f"no run was started from this folder yet (looked in {home / 'runs'}); `tpu-launch run` starts one\n"
            "  emulated runs are kept apart: --emulated before a command chooses them"
        )
    return known[-1]


def resolve_run(
    config: Config,
    home: Path,
    machine: Workstation,
    requested: Specification,
    overlay: Overlay | None,
    *,
    run_id: str | None,
    new: bool,
    say: Callable[[str], None],
) -> Ledger:
    """Returns the run to resume, or makes the folder of a new one with `requested` and `overlay`. Resumes the run of
    `run_id`, else the newest run on the slice, unless it has finished, its configuration hash differs, or `new` is set.
    Raises BadInput if `run_id` is no run, or has another hash; LaunchError if a new run's bucket does not answer."""
    config_hash = specification.hash_configuration(config)
    if run_id is not None:
        ledger = find_run(home, machine, run_id, provider=config.provider)
        if ledger.record.config_hash != config_hash:
            raise BadInput(
                f"run {run_id} was started with another configuration or command "
                f"(see {ledger.folder / 'config.yaml'}): change the file back, or start a new run with --new"
            )
        return ledger
    for newest in runs_on_slice(config, home, machine)[-1:] if not new else ():
        if newest.state.phase is not Phase.FINISHED and newest.record.config_hash == config_hash:
            return newest
    name = new_run_id(config.run_name, machine)
    folder = _folder_in_bucket(config, name, say)
    record = RunRecord(
        run_id=name,
        project=config.project,
        zone=config.zone,
        slice=config.slice.name,
        config_hash=config_hash,
        created=machine.clock.time(),
        provider=config.provider,
        bucket=folder,
        user=machine.owner.user if folder else "",
        account=machine.owner.account if folder else "",
    )
    return begin_run(home, machine, record, config.document.dump(), requested, overlay)


def _folder_in_bucket(config: Config, run_id: str, say: Callable[[str], None]) -> str:
    """Writes config.yaml into a new run's launcher folder in its bucket, and returns the folder's URL; "" if the output
    is in none, or (said to the user) this account may not create and replace objects there. Raises LaunchError."""
    if config.trainer is None or not storage.is_remote(config.trainer.output):
        return ""
    url = storage.join(config.trainer.output, run_id, bucket.FOLDER)
    place, content = storage.join(url, "config.yaml"), config.document.dump().encode()
    try:
        created = storage.write(place, content)
        storage.write(place, content, replaces=created.generation)  # the lease is replaced every few seconds
    except storage.NotAllowed as error:
        say(
            f"run {run_id}: only this machine can supervise it, because its events can't be kept in its bucket: {error}"
        )
        return ""
    except storage.StorageError as error:
        raise LaunchError(f"run {run_id} can't be written to its bucket: {error}") from None
    return url


def import_run(home: Path, machine: Workstation, url: str, *, overlays: bool = True) -> Ledger:
    """Copies a run's folder from gs://bucket/runs/ID, for the commands of this machine; without `overlays`, only what
    its state depends on. Raises BadInput if no run, or a copied one, is there; LaunchError for a silent bucket."""
    url = url.rstrip("/")
    ledger = Ledger(home / "runs" / storage.name_of(url), machine.clock)
    place = bucket.RunBucket.of_run(url)
    try:
        place.download(ledger.folder, overlays=overlays)
    except storage.NotFound as error:
        raise BadInput(
            f"{url} is no run that another machine can go on with ({error}): name gs://bucket/runs/ID, whose ID "
            "`tpu-launch list gs://bucket/runs` shows"
        ) from None
    except storage.StorageError as error:
        raise LaunchError(f"{url} can't be read: {error}") from None
    if ledger.record.bucket != place.url:
        raise BadInput(f"{url} was copied: the run's folder is {ledger.record.bucket}")
    ledger.pull(machine.threads)
    return ledger


def begin_run(
    home: Path,
    machine: Workstation,
    record: RunRecord,
    document: str,
    requested: Specification,
    overlay: Overlay | None,
) -> Ledger:
    """Writes the folder of a new run, its record last. `document` is the resolved configuration as YAML."""
    folder = home / "runs" / record.run_id
    folder.mkdir(mode=0o700, parents=True)
    write_private(folder / "config.yaml", document)
    if overlay is not None:
        specification.write_overlay(folder, overlay)
    specification.write(folder, requested.model_copy(update={"run": record.run_id}))
    write_private(folder / "run.json", json.dumps(asdict(record), indent=1))  # last: a folder without it is no run
    return Ledger(folder, machine.clock)


def new_run_id(name: str, machine: Workstation) -> str:
    """Returns a run id: name, UTC time, and random digits, so that two workstations don't collide."""
    now = format_time(machine.clock.time())
    day, time = now[5:10], now[11:19]
    return f"{name}-{day.replace('-', '')}-{time.replace(':', '')}-{machine.random.randrange(1 << 16):04x}"
