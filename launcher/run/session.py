"""One process's work on a run: finding or making the run, the right to supervise it, and the provider of its hosts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.gcloud import Retry
from launcher.home import hold_shared, of_slice, write_private
from launcher.provider import LogLine, Observation, Overlay, Provider, SliceState, container_name
from launcher.run import specification
from launcher.run.bucket import FOLDER, Lease, RunBucket
from launcher.run.events import RunEvent, Supervised
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.specification import SecretSource, Specification
from launcher.run.state import Phase
from launcher.run.verdict import Verdict
from launcher.tpu_vm.requests import RequestRecord
from launcher.workstation import CheckedClock, Workstation
from training import storage
from training.machine import Clock, format_time

_DESCRIBE_SECONDS = 120.0
_JOIN_SECONDS = 10.0  # for a renewal of a lease that is under way
_DESCRIBE_AGAIN_SECONDS = 5.0  # before a slice whose description may be stale is described again


class RunStopped(LaunchError):
    """The user stopped the run: no attempt of it is started."""

    exit_code = Exit.STOPPED

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id} was stopped (`tpu-launch stop` or `down`); `tpu-launch run` resumes it")


@dataclass(frozen=True)
class Output:
    """Where the user sees what happens."""

    say: Callable[[str], None]  # takes one line about the launcher's own work
    emit: Callable[[int, LogLine], None]  # takes one log line of a host: worker index, line


@dataclass(frozen=True)
class Context:
    """The process in which a command on a run works."""

    home: Path  # the launcher's folder
    environment: Mapping[str, str]  # holds values of secrets
    make_provider: Callable[[Config], Provider]
    output: Output
    machine: Workstation


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the verdict on its last attempt, and the last lines of the host that is the first cause."""

    run_id: str
    attempt: int
    verdict: Verdict
    last_lines: list[str]


@dataclass(frozen=True)
class Session:
    """One process's work on a run."""

    context: Context
    ledger: Ledger
    specification: Specification
    config: Config  # the configuration in the specification
    provider: Provider
    secrets: SecretSource

    @property
    def machine(self) -> Workstation:
        return self.context.machine

    @property
    def workers(self) -> Sequence[int]:
        return range(self.provider.host_count)

    def choose_workers(self, host: int | None) -> Sequence[int]:
        """Returns the indices of one host, or of all (None). Raises BadInput for a host that the slice lacks."""
        if host is None:
            return self.workers
        if host not in self.workers:
            raise BadInput(f"--host {host}: the slice has hosts 0 to {len(self.workers) - 1}")
        return [host]

    @property
    def clock(self) -> Clock:
        """The machine's clock; its `sleep` raises RunStopped when the user stops the run."""
        return CheckedClock(self.machine.clock, self.check_stop)

    def say(self, text: str) -> None:
        """Tells the user "run ID" followed by the text, which begins with ":" or ","."""
        self.context.output.say(f"run {self.ledger.run_id}{text}")

    def note(self, event: RunEvent) -> None:
        """Records an event that only informs; if it can't be written at once, says so and goes on."""
        self.ledger.note(event, self.context.output.say)

    def check_stop(self) -> None:
        """Raises RunStopped when the user has stopped the run, in this process or another one. Before that waits until
        this process's lease, if it has one, is fresh; ends this process when another one has the lease."""
        self.ledger.confirm()
        if self.ledger.state.stop_requested:
            raise RunStopped(self.ledger.run_id)

    def container(self, attempt: int) -> str:
        return container_name(self.ledger.run_id, attempt)

    def observe(
        self, worker: int, attempt: int, since: str | None, *, patience: float = 0.0, progress: bool = False
    ) -> Observation:
        """Returns the provider's observation of an attempt's container on a host, with `since` and when it was asked;
        instead of any exception, even a bug's, an observation without these whose `problem` tells it: a task that
        observes must go on."""
        asked = self.machine.clock.monotonic()
        try:
            found = self.provider.observe(worker, self.container(attempt), since, patience=patience, progress=progress)
            return replace(found, since=since, asked=asked)
        except LaunchError as error:
            return Observation(worker, None, problem=str(error).splitlines()[0])
        except Exception as error:
            return Observation(worker, None, problem=f"tpu-launch can't read its answer: {error!r}")

    def describe_slice(self, wait: Callable[[float], object] | None = None, doubted: str = "") -> SliceState | None:
        """Returns the slice, None without one. Asks the API again, after a `wait` (None: sleep) of 5 s, if there is
        none or its state is `doubted`. Raises LaunchError."""
        found = self.provider.describe()
        if found is None or found.state == doubted:  # one answer may be stale
            (wait or self.machine.clock.sleep)(_DESCRIBE_AGAIN_SECONDS)
            found = self.provider.describe()
        return found

    def delete_slice(self, created: str) -> None:
        """Deletes the slice and waits until it is gone; leaves one, and says so, that was created at another time than
        `created` (RFC 3339; "": not known). Raises LaunchError, for an API that does not answer after two minutes."""
        retry = Retry(self.machine, self.context.output.say, f"slice {self.config.slice.name}")
        found = retry.call(self.provider.describe, self.machine.clock.monotonic() + _DESCRIBE_SECONDS)
        if found is not None and created and found.created and found.created != created:
            self.say(f": slice {found.name} is not the one to delete: it was created at {found.created}; left alone")
        else:
            with hold_shared(deletion_mark(self.config)):
                self.provider.delete()

    def secret_values(self) -> dict[str, str]:
        """Returns the values of the run's secrets that this process knows, by name; {} where the platform has them.
        May read the run's env file; raises BadInput if that can't be read."""
        return self.secrets.values(self.specification) if self.provider.capabilities.sends_secrets else {}

    def unknown_secrets(self) -> list[str]:
        """Returns the names of secrets whose values this process does not know, and so can't mask; on GKE, all. Raises
        as `secret_values`."""
        if not self.provider.capabilities.sends_secrets:
            return list(self.config.gke.secrets)
        known = self.secret_values()
        return [name for name in self.specification.secrets if name not in known]

    def describe_missing_secrets(self) -> str:
        """Returns a sentence that says which secrets the next attempt would lack, and where they were looked for; ""
        for none, and where the platform has them."""
        missing = self.unknown_secrets() if self.provider.capabilities.sends_secrets else []
        places = " and ".join(filter(None, ("the environment", self.specification.env_file)))
        return f"values of secrets are missing (looked in {places}): {', '.join(missing)}" if missing else ""


def open_session(context: Context, ledger: Ledger, given: Mapping[str, str] | None = None) -> Session:
    """Returns a run's session with a provider, which the caller closes. `given`: values of secrets, by name. Raises
    BadInput if the run's specification is missing or damaged."""
    spec = specification.read(ledger.folder)
    config = spec.config()
    secrets = SecretSource(context.environment, given or {})
    return Session(context, ledger, spec, config, context.make_provider(config), secrets)


def deletion_mark(config: Config) -> Path:
    """Returns the path of the file that is locked while this machine deletes a slice: no run is started on it."""
    return of_slice(config.project, config.slice.name, "deleting")


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
    """Returns the runs known here on a slice of this name, project, zone and provider, oldest first, ended ones too."""
    wanted = (config.slice.name, config.project, config.zone, config.provider)
    return [
        ledger
        for ledger in list_runs(home, machine)
        if (record := ledger.record) and (record.slice, record.project, record.zone, record.provider) == wanted
    ]


def find_run(
    home: Path, machine: Workstation, run_id: str | None, *, slice_name: str | None = None, provider: str | None = None
) -> Ledger:
    """Returns the run of that id, or the newest (`run_id` None), of that slice and provider (None: any), after pulling
    an unfinished one's events, if its bucket answers. Raises BadInput when there is none, or it is damaged."""
    known = [
        ledger
        for ledger in list_runs(home, machine)
        if slice_name in (None, ledger.record.slice) and provider in (None, ledger.record.provider)
    ]
    found = known[-1:] if run_id is None else [ledger for ledger in known if ledger.run_id == run_id]
    if found:
        return pull_known(found[0], machine)
    if run_id is None:
        raise BadInput(
            f"no run was started from this folder yet (looked in {home / 'runs'}); `tpu-launch run` starts one\n"
            "  others are kept apart: --emulated before a command, or --provider gke, chooses theirs"
        )
    if (home / "runs" / run_id / "run.json").exists():
        ledger = Ledger(home / "runs" / run_id, machine.clock)
        _ = ledger.record, ledger.entries()  # raises if damaged or of another version; else another slice's run
    raise BadInput(f"there is no run {run_id!r} here; known: {', '.join(run.run_id for run in known) or 'none'}")


def find_on_slice(config: Config, context: Context, run_id: str | None) -> Ledger:
    """Returns the run of that id, or the newest one, on the configured slice, as `find_run` does."""
    return find_run(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)


def pull_known(ledger: Ledger, machine: Workstation) -> Ledger:
    """Pulls the events that other machines recorded of an unfinished run, as `Ledger.pull`, and ignores its
    LaunchError. Returns the ledger."""
    if ledger.state.phase is not Phase.FINISHED:
        with contextlib.suppress(LaunchError):
            ledger.pull(machine.threads)
    return ledger


def resolve_run(
    config: Config,
    context: Context,
    requested: Specification,
    overlay: Overlay | None,
    *,
    run_id: str | None,
    new: bool,
) -> Ledger:
    """Returns the run to resume, or makes the folder of a new one with `requested` and `overlay`, here and (config.yaml
    only) in its bucket, if this account may write there. With `run_id`, it is that run, also a finished one, whatever
    `new` is. Else the newest run on the slice is resumed, unless it has finished, its configuration hash differs, or
    `new` is set. Raises BadInput if `run_id` is no run of the provider, or has another hash; LaunchError if the bucket
    of a new run fails."""
    home, machine, config_hash = context.home, context.machine, specification.hash_configuration(config)
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
    folder = _folder_in_bucket(config, name, context.output.say)
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
    url = storage.join(config.trainer.output, run_id, FOLDER)
    place, content = storage.join(url, "config.yaml"), config.document.dump().encode()
    try:
        created = storage.write(place, content)
        storage.write(place, content, replaces=created.generation)  # the lease is replaced every few seconds
    except storage.NotAllowed as error:
        reason = "because its events can't be kept in its bucket"
        say(f"run {run_id}: only this machine can supervise it, {reason}: {error}")
        return ""
    except storage.StorageError as error:
        raise LaunchError(f"run {run_id} can't be written to its bucket: {error}") from None
    return url


def import_run(home: Path, machine: Workstation, url: str, *, overlays: bool = True) -> Ledger:
    """Copies a run's folder and events from gs://bucket/runs/ID over those in this machine's launcher folder; with
    `overlays` their archives too. Raises BadInput if no run, or a copied one, is at `url`; LaunchError if it does not
    answer; OSError for a file here."""
    url = url.rstrip("/")
    ledger = Ledger(home / "runs" / storage.name_of(url), machine.clock)
    try:
        RunBucket.of_run(url).download(ledger.folder, overlays=overlays)
    except storage.NotFound as error:
        raise BadInput(
            f"{url} is no run that another machine can go on with ({error}): name gs://bucket/runs/ID, whose ID "
            "`tpu-launch list gs://bucket/runs` shows"
        ) from None
    except storage.StorageError as error:
        raise LaunchError(f"{url} can't be read: {error}") from None
    _ = ledger.record  # raises BadInput if it is damaged
    ledger.pull(machine.threads)
    return ledger


def begin_run(
    home: Path, machine: Workstation, record: RunRecord, document: str, spec: Specification, overlay: Overlay | None
) -> Ledger:
    """Writes a new run's folder, which must not exist, on this machine, its record last; `spec` gets the run's id.
    `document` is the resolved configuration as YAML."""
    folder = home / "runs" / record.run_id
    folder.mkdir(mode=0o700, parents=True)
    write_private(folder / "config.yaml", document)
    if overlay is not None:
        specification.write_overlay(folder, overlay)
    specification.write(folder, spec.model_copy(update={"run": record.run_id}))
    write_private(folder / "run.json", json.dumps(asdict(record), indent=1))  # last: a folder without it is no run
    return Ledger(folder, machine.clock)


def new_run_id(name: str, machine: Workstation) -> str:
    """Returns a run id: NAME-MMDD-HHMMSS-XXXX, of UTC and 4 random hexadecimal digits, so that two workstations don't
    collide."""
    now = format_time(machine.clock.time())
    day, time = now[5:10], now[11:19]
    return f"{name}-{day.replace('-', '')}-{time.replace(':', '')}-{machine.random.randrange(1 << 16):04x}"


@contextlib.contextmanager
def supervising(ledger: Ledger, machine: Workstation, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the run's lock and, if it has a bucket, its lease, which a thread renews; releases them at the end. First
    copies the run's files to the bucket. Ends this process when another one has taken the lease. Raises LaunchError if
    the bucket does not answer, or (Exit.CONFLICT) if a process of any machine supervises the run."""
    with ledger.supervising():
        if ledger.bucket is None:
            yield
            return
        lease = take_lease(ledger, ledger.bucket, machine, say)
        over = machine.threads.event()
        thread = machine.threads.start(lease.keep, over, ledger.pull)
        try:
            share(ledger, ledger.bucket, say)  # for longer than the lease lasts, on a slow line
            yield
        finally:
            over.set()
            thread.join(_JOIN_SECONDS)
            ledger.lease = None
            if not thread.is_alive():
                lease.release()


def take_lease(ledger: Ledger, place: RunBucket, machine: Workstation, say: Callable[[str], None]) -> Lease:
    """Pulls the run's events, takes its lease, which the caller renews (`Lease.keep`), sets `ledger.lease` and records
    Supervised; first names the folder (file `holder`). Waits 30 s if the bucket tells no time and a lease looks live.
    Raises LaunchError if another process has the lease (Exit.CONFLICT), or the bucket does not answer."""
    if not (holder := ledger.holder):
        holder = f"{os.uname().nodename}:{machine.random.randrange(1 << 32):08x}"
        write_private(ledger.folder / "holder", holder)  # later processes with the folder's lock reuse it
    lease = Lease(place, ledger.run_id, holder, machine, say)
    try:
        # First the lease, then the events: a Supervised that follows is that of a process with a newer lease.
        found = place.judge_lease(machine.clock)
        ledger.pull(machine.threads)
        lease.supervisions = ledger.state.supervisions
        lease.take(found)
    except storage.StorageError as error:
        raise LaunchError(f"run {ledger.run_id}: its lease can't be taken: {error}") from None
    ledger.lease = lease
    ledger.append(Supervised(max(0, ledger.state.attempt), holder))
    lease.supervisions += 1
    return lease


def share(ledger: Ledger, place: RunBucket, say: Callable[[str], None]) -> None:
    """Copies the run's files and the requests for the slice's candidates to the bucket, for other machines. Says so
    if the requests can't be copied; raises LaunchError if the files can't."""
    ledger.publish()
    config = specification.read(ledger.folder).config()
    if config.slice.candidates:
        try:
            RequestRecord(config).share(place.requests)
        except (storage.StorageError, OSError) as error:
            say(f"requests for slice {config.slice.name} are recorded on this machine only: {error}")
