"""Starting, resuming, attaching to and stopping a run.

A run is found again by its folder and by the labels of its containers, so every function here may be called again after
a crash at any point: a start that finds its containers running attaches to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.config import TRAINER_SECTIONS, Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import Attempt, HostReport, LogLine, Observation, Provider
from launcher.run import ledger as ledgers
from launcher.run import overlay as overlays
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.recovery import Budgets, Next, bad_host, decide, spent_so_far
from launcher.run.supervise import Watched, explain, last_lines, supervise
from launcher.run.verdict import Cause, Kind, Limits, Verdict

CONFIG_FILE = "config.yaml"  # below /etc/tpu-launch in the container
TRAINER_COMMAND = ("tpu-train", "train", f"/etc/tpu-launch/{CONFIG_FILE}")

CHECKED = (
    "TPU_LAUNCH_PREFLIGHT"  # variable of the containers: hashes of the programs that preflight compiled, with commas
)

Say = Callable[[str], None]
Emit = Callable[[int, LogLine], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended here: its last attempt's verdict, and what the host that is the cause wrote last."""

    run_id: str
    attempt: int
    verdict: Verdict
    last_lines: list[str]


def run(
    config: Config,
    provider: Provider,
    home: Path,
    image: Callable[[], str],
    *,
    run_id: str | None,
    new: bool,
    say: Say,
    emit: Emit,
) -> Outcome:
    """Starts the run's next attempt on every host, watches it, and starts further attempts as the budgets allow.

    Without `run_id`, the newest run of this slice that has not finished and means the same is resumed, unless `new`.
    `image` is called when a first attempt is really started, and returns what hosts must run.
    """
    require_secrets(config)
    ledger = _choose(config, home, run_id, new)
    with ledger.supervising():
        seen_ready = not provider.known_ready()
        if seen_ready:
            _require_ready(config, provider)
        watched = _open_attempt(config, provider, ledger)
        if watched is not None:
            say(f"run {ledger.folder.name}: attempt {watched.number} is there already; attaching to it")
            over = not any(_status(look) == "running" for look in _looks(provider, watched))
            outcome = _go_on(config, provider, ledger, watched, say, emit)
            if not over or outcome.verdict.kind is Kind.FINISHED:
                return outcome
            # It had ended while nobody watched: what was asked for now is to resume it.
            say(f"run {ledger.folder.name}: attempt {watched.number} had ended: {explain(outcome.verdict)[0]}")
        return _go_on(config, provider, ledger, image(), say, emit, seen_ready=seen_ready)


def attach(config: Config, provider: Provider, home: Path, run_id: str | None, *, say: Say, emit: Emit) -> Outcome:
    """Goes on watching a run that was started before, from this terminal or another."""
    ledger = ledgers.find(home, run_id, slice_name=config.slice.name, provider=config.provider)
    with ledger.supervising():
        if ledger.attempts == 0:
            raise BadInput(f"run {ledger.folder.name} was never started")
        if ledger.outcome is not None:
            raise BadInput(
                f"run {ledger.folder.name} is not running: its last attempt ended with {ledger.outcome!r}; `tpu-launch logs` shows its lines"
            )
        return _go_on(config, provider, ledger, _watched(config, ledger, ledger.attempts - 1), say, emit)


def under_way(config: Config, home: Path) -> bool:
    """Whether an attempt was begun on this slice that has not ended, as far as is known here."""
    return any(ledger.under_way for ledger in ledgers.runs(home) if _same_slice(config, ledger.record))


def stop(
    config: Config, provider: Provider, home: Path, run_id: str | None, *, grace: int | None, say: Say
) -> list[HostReport]:
    """Asks the run's containers on all hosts to stop (SIGTERM; SIGKILL after the grace), and waits until they have."""
    ledger = ledgers.find(home, run_id, slice_name=config.slice.name, provider=config.provider)
    if ledger.attempts == 0:
        raise BadInput(f"run {ledger.folder.name} was never started")
    number = ledger.attempts - 1
    ledger.event("stop", attempt=number)
    say(f"stopping run {ledger.folder.name} on {config.accelerator.hosts} hosts")
    seconds = config.run.stop_seconds if grace is None else grace
    return provider.stop(_watched(config, ledger, number).container, grace=seconds, remove=False)


def _begin(
    config: Config, provider: Provider, ledger: Ledger, image: str, say: Say, *, seen_ready: bool
) -> Watched | Verdict:
    """Starts the next attempt on all hosts. The verdict, when the slice was taken away meanwhile: a preemption like any
    other.

    Where the slice was not seen to be READY before (the start itself was the first question), a failure is told as what
    is wrong with the slice.
    """
    number = ledger.attempts
    attempt = make_attempt(config, ledger.folder.name, number, image)
    before = f" (resumes: the last attempt ended with {ledger.outcome!r})" if number and ledger.outcome else ""
    say(f"run {ledger.folder.name}: attempt {number} on {config.accelerator.hosts} hosts{before}")
    _sweep(config, provider, ledger.folder.parent.parent)
    ledger.event(
        "attempt",
        attempt=number,
        image=attempt.image,
        command=list(attempt.command),
        **_overlaid(attempt),
        **_checked(attempt),
    )
    try:
        _start_everywhere(provider, attempt, ledger)
    except LaunchError as error:
        taken = _taken_away(provider, seen_ready)
        outcome = taken.kind.value if taken else "not started"
        ledger.event("ended", attempt=number, outcome=outcome, cause={"what": str(error)}, symptoms=[])
        if taken and (seen_ready or config.run.preemption_retries):
            return taken
        if not seen_ready:
            _require_ready(config, provider)
        raise
    say(f"run {ledger.folder.name}: started on all hosts; Ctrl-C detaches")
    return _watched(config, ledger, number)


def _sweep(config: Config, provider: Provider, home: Path) -> None:
    """Ends what attempts of ours left on hosts that were out of reach when they ended: a host that was only cut off
    goes on working, and holds its TPU."""
    for ledger in ledgers.runs(home):
        left = ledger.left_behind() if _same_slice(config, ledger.record) else []
        for event in left:
            with contextlib.suppress(LaunchError):
                reports = provider.stop(event["container"], grace=1, remove=True, workers=event["hosts"])
                if all(report.ok for report in reports):
                    ledger.event("swept", attempt=event["attempt"], hosts=event["hosts"])


def _same_slice(config: Config, record: RunRecord) -> bool:
    wanted = (config.slice.name, config.project, config.zone, config.provider)
    return (record.slice, record.project, record.zone, record.provider) == wanted


def _taken_away(provider: Provider, seen_ready: bool) -> Verdict | None:
    """Why a start failed, when it was because the slice is gone."""
    try:
        found = provider.describe()
    except LaunchError:
        return None
    if found is None and not seen_ready:
        return None
    if found is None or found.gone_for_good:
        return Verdict(
            Kind.PREEMPTED, Cause(-1, f"the slice is {found.state}" if found else "the slice does not exist any more")
        )
    return None


def _go_on(
    config: Config,
    provider: Provider,
    ledger: Ledger,
    begun: Watched | str,
    say: Say,
    emit: Emit,
    *,
    seen_ready: bool = True,
) -> Outcome:
    """Watches an attempt that runs, or starts one with the image that is given; then the attempts after it that the
    budgets allow.

    Returns the outcome of the last one.
    """
    stall = None if config.run.stall_minutes is None else config.run.stall_minutes * 60
    limits = Limits(lost=config.run.host_lost_seconds, stall=stall)
    budgets = Budgets(config.run.preemption_retries, config.run.failure_retries)
    moments: list[float] = []  # of a recovery: the attempt before was judged, its delay was over, the slice was ready
    while True:
        watched = (
            _begin(config, provider, ledger, begun, say, seen_ready=seen_ready) if isinstance(begun, str) else begun
        )
        seen_ready = True
        if moments:
            _tell_recovery(ledger, [*moments, time.monotonic()], say)
        if isinstance(watched, Verdict):
            number, verdict = ledger.attempts - 1, watched
        else:
            number, verdict = watched.number, supervise(provider, ledger, watched, limits=limits, emit=emit, say=say)
        moments = [time.monotonic()]
        events = ledger.events()
        stopped = ledger.stop_requested(number)
        decision = decide(verdict, spent_so_far(events), budgets, stop_requested=stopped)
        if decision.next is Next.END:
            return Outcome(ledger.folder.name, number, verdict, last_lines(ledger, number, verdict))
        for line in explain(verdict):
            say(f"run {ledger.folder.name}, attempt {number}: {line}")
        say(
            f"run {ledger.folder.name}: starting again ({decision.reason})"
            + (f" in {decision.delay:.0f} s" if decision.delay else "")
        )
        ledger.event("recover", after=verdict.kind.value, attempt=number, reason=decision.reason, delay=decision.delay)
        time.sleep(decision.delay)
        moments.append(time.monotonic())
        _replace_bad_host(config, provider, ledger, say)
        provider.create()  # finds the slice READY, waits for it, or deletes and creates it, as its state demands
        moments.append(time.monotonic())
        begun = str(next(event["image"] for event in reversed(events) if event["event"] == "attempt"))


def _replace_bad_host(config: Config, provider: Provider, ledger: Ledger, say: Say) -> None:
    """A host can't be exchanged; with run.replace_after, a slice whose same host fails again and again is deleted, to
    be made anew."""
    worker, count = bad_host(ledger.events())
    after = config.run.replace_after
    if count < (after or 2) or config.provider == "gke":  # there the cluster chooses nodes
        return
    told = f"host {worker} was the first cause of the last {count} attempts"
    if after is None:
        say(f"run {ledger.folder.name}: {told}; run.replace_after: 2 makes the slice anew then")
        return
    say(f"run {ledger.folder.name}: {told}: making the slice anew (run.replace_after)")
    ledger.event(
        "replaced", attempt=ledger.attempts - 1, host=worker, reason=f"first cause of {count} attempts in a row"
    )
    provider.delete()


def _tell_recovery(ledger: Ledger, moments: Sequence[float], say: Say) -> None:
    """Where the time from one attempt's end to the next one's start went."""
    names = ("delay", "slice", "start")
    seconds = {name: round(end - begin, 1) for name, begin, end in zip(names, moments, moments[1:], strict=False)}
    ledger.event("recovered", attempt=ledger.attempts - 1, seconds=seconds)
    told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    say(f"run {ledger.folder.name}: recovered in {moments[-1] - moments[0]:.1f} s ({told})")


def make_attempt(config: Config, run_id: str, number: int, image: str) -> Attempt:
    """What every host is told about one start of the run."""
    return Attempt(
        run_id=run_id,
        number=number,
        image=image,
        command=tuple(config.run.command or TRAINER_COMMAND),
        environment=config.run.environment,
        files={CONFIG_FILE: config.document.dump().encode()},
        shm_size=config.run.shm_size,
        user=config.run.user,
        secrets=secrets(config),
        overlay=None if config.overlay is None else overlays.read(config.overlay),
    )


def _checked(attempt: Attempt) -> dict[str, str]:
    """The hashes of the programs that preflight compiled for this run, where it did."""
    found = attempt.environment.get(CHECKED)
    return {"preflight": found} if found else {}


def _overlaid(attempt: Attempt) -> dict[str, str]:
    return (
        {} if attempt.overlay is None else {"overlay": attempt.overlay.digest, "overlay_target": attempt.overlay.target}
    )


def last_image(config: Config, home: Path) -> str | None:
    """What the newest attempt on this slice ran: an overlay goes over that, instead of a new build."""
    for ledger in reversed(ledgers.runs(home)):
        images = [str(event["image"]) for event in ledger.events() if event["event"] == "attempt"]
        if images and _same_slice(config, ledger.record):
            return images[-1]
    return None


def secrets(config: Config) -> dict[str, str]:
    """The values of run.secrets, from this process's environment; absent ones are left out (`require_secrets` refuses
    them before a start).

    On GKE there are none: gke.secrets names where the cluster has them.
    """
    if config.provider == "gke":
        return {}
    return {name: os.environ[name] for name in config.run.secrets if name in os.environ}


def require_secrets(config: Config) -> None:
    """Raises BadInput when a secret that the file names is not in the environment."""
    missing = [name for name in config.run.secrets if name not in os.environ and config.provider != "gke"]
    if missing:
        raise BadInput(
            f"{config.document.place(('run', 'secrets'))}: run.secrets: not in the environment: {', '.join(missing)}; export them, then run again"
        )


def meaning(config: Config) -> str:
    """What makes two starts the same run: the trainer's part of the file and the command, not where it runs, nor which
    backend computes."""
    trainer = {
        key: value for key, value in config.document.value.items() if key in TRAINER_SECTIONS and key != "backend"
    }
    return ledgers.config_hash(json.dumps(trainer, sort_keys=True, default=str), config.run.command or [])


def _choose(config: Config, home: Path, run_id: str | None, new: bool) -> Ledger:
    if run_id is not None:
        known = ledgers.find(home, run_id, provider=config.provider)
        if known.record.config_hash != meaning(config):
            raise BadInput(
                f"run {run_id} was started with another configuration or command (see {known.folder / 'config.yaml'}): "
                "change the file back, or start a new run with --new"
            )
        return known
    if not new:
        for ledger in reversed(ledgers.runs(home)):
            if _same_slice(config, ledger.record):
                if ledger.outcome != "finished" and ledger.record.config_hash == meaning(config):
                    return ledger
                break  # only the newest run of the slice can be meant
    return ledgers.begin(home, lambda name: _record(config, name), config.document.dump(), config.run_name)


def _record(config: Config, run_id: str) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        name=config.run_name,
        project=config.project,
        zone=config.zone,
        slice=config.slice.name,
        file=str(Path(config.document.name).absolute()),
        command=list(config.run.command or TRAINER_COMMAND),
        config_hash=meaning(config),
        created=time.time(),
        provider=config.provider,
    )


def _watched(config: Config, ledger: Ledger, number: int) -> Watched:
    container = make_attempt(config, ledger.folder.name, number, "").container
    return Watched(
        ledger.folder.name, number, container, range(config.accelerator.hosts), tuple(secrets(config).values())
    )


def _require_ready(config: Config, provider: Provider) -> None:
    found = provider.describe()
    if found is None:
        raise BadInput(
            f"slice {config.slice.name} does not exist in {config.zone}: create it with `tpu-launch up -f {config.document.name}`"
        )
    if found.gone_for_good:
        raise LaunchError(
            f"slice {found.name} is {found.state}: `tpu-launch up` deletes it and creates it again",
            exit_code=Exit.PREEMPTED,
        )
    if not found.ready:
        raise LaunchError(
            f"slice {found.name} is {found.state}, not READY: `tpu-launch up` waits for it", exit_code=Exit.CONFLICT
        )


def _open_attempt(config: Config, provider: Provider, ledger: Ledger) -> Watched | None:
    """The attempt that was not seen to end, if any host still has its container. One that no host has any more is
    recorded as ended."""
    if ledger.attempts == 0 or ledger.outcome is not None:
        return None
    watched = _watched(config, ledger, ledger.attempts - 1)
    if any(_status(look) in ("running", "exited") for look in _looks(provider, watched)):
        return watched
    ledger.event(
        "ended",
        attempt=watched.number,
        outcome="vanished",
        cause={"what": "no host has its container any more"},
        symptoms=[],
    )
    return None


def _looks(provider: Provider, watched: Watched) -> list[Observation]:
    newest = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())  # no lines are wanted
    with ThreadPoolExecutor(max_workers=64) as pool:
        return list(pool.map(lambda worker: provider.observe(worker, watched.container, newest), watched.workers))


def _status(look: Observation) -> str:
    return look.container.status if look.container is not None else ""


def _start_everywhere(provider: Provider, attempt: Attempt, ledger: Ledger) -> None:
    """Prepares all hosts, checks that they have the same image, starts all. On any failure nothing is left running."""
    prepared = provider.prepare(attempt)
    images = {report.detail for report in prepared}
    if len(images) != 1 or not all(report.ok for report in prepared):
        with contextlib.suppress(LaunchError):  # what failed is told, not what failed after it
            provider.stop(
                attempt.container, grace=1, remove=True, workers=[report.worker for report in prepared if report.ok]
            )
    _require_all(prepared, "prepare")
    if len(images) != 1:
        raise LaunchError(
            "the hosts do not have the same image: "
            + "; ".join(f"host {report.worker} has {report.detail}" for report in prepared)
        )
    ledger.event("prepared", attempt=attempt.number, image_id=images.pop())
    started = provider.start(attempt)
    if not all(report.ok for report in started):
        with contextlib.suppress(LaunchError):
            provider.stop(attempt.container, grace=1, remove=True)
    _require_all(started, "start")
    ledger.event("started", attempt=attempt.number)


def _require_all(reports: Sequence[HostReport], what: str) -> None:
    failed = [report for report in reports if not report.ok]
    if not failed:
        return
    details = "\n".join(f"  host {report.worker}: {report.detail}" for report in failed)
    if any(report.occupied_by for report in failed):
        raise LaunchError(
            f"the slice is in use:\n{details}\n  wait for it, or stop it with `tpu-launch stop --run RUN`",
            exit_code=Exit.CONFLICT,
        )
    raise LaunchError(f"{len(failed)} of {len(reports)} hosts could not {what} the container:\n{details}")
