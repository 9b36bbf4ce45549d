"""`tpu-launch doctor --devices`: every host of a slice tries its devices, in the run's image, in some seconds.

A container of its own runs `tpu-train check-devices` on all hosts at once, as an attempt does, and is removed whatever
happens. Its id is that of a run, so no run starts beside it; and it does not start beside a run. What hosts report is
judged in `judge.py`.
"""

from __future__ import annotations

import contextlib

from launcher.config import Config
from launcher.device_check.judge import CREATE_ANEW, HostResult, judge
from launcher.errors import Exit, LaunchError
from launcher.images import local
from launcher.provider import Attempt, HostReport, Observation, Provider
from launcher.run.runs import new_run_id, runs_on_slice
from launcher.run.session import Context
from launcher.run.start import require_all, require_ready
from launcher.workstation import Workstation
from training.device_check import Problem

SECONDS = 300.0
_NAME = "device-check"
_INTERVAL = 1.0  # seconds between two observations


def check_devices(config: Config, context: Context, seconds: float = SECONDS) -> list[HostResult]:
    """Checks the devices of all hosts of a READY slice.

    Args:
        config: The slice and the image.
        context: This process.
        seconds: To wait for the hosts' answers, from the start of their containers.

    Returns:
        A result for each host.

    Raises:
        LaunchError: A run is on the slice (CONFLICT), the slice is not READY, or there is no image.
    """
    if any(ledger.state.phase.is_open for ledger in runs_on_slice(config, context.home, context.machine)):
        raise LaunchError(
            f"slice {config.slice.name} has a run: its devices are in use; "
            "wait for it, or stop it with `tpu-launch stop`",
            exit_code=Exit.CONFLICT,
        )
    provider = context.make_provider(config)
    with contextlib.closing(provider):
        require_ready(config, provider)
        image = local.image(config, context.output.say)
        attempt = make_attempt(config, new_run_id(_NAME, context.machine), image)
        context.output.say(f"trying the devices of {config.accelerator.hosts} hosts")
        try:
            return _run(config, provider, attempt, context, seconds)
        finally:
            with contextlib.suppress(LaunchError):
                provider.stop(attempt.container, grace=1, remove=True)


def make_attempt(config: Config, run_id: str, image: str) -> Attempt:
    """The container that every host is given."""
    output = ["--output", config.trainer.output] if config.trainer is not None else []
    return Attempt(
        run_id=run_id,
        number=0,
        image=image,
        command=("tpu-train", "check-devices", "--backend", config.backend, *output),
        environment=config.run.environment,
        shm_size=config.run.shm_size,
        user=config.run.user,
    )


def _run(config: Config, provider: Provider, attempt: Attempt, context: Context, seconds: float) -> list[HostResult]:
    for verb, reports in (("prepare", provider.prepare(attempt)), ("start", None)):
        reports = provider.start(attempt) if reports is None else reports
        if any(report.occupied_by for report in reports):
            require_all(reports, verb)
        if not all(report.ok for report in reports):
            return [_refused(report, verb) for report in reports]
    deadline = context.machine.clock.monotonic() + seconds
    while True:
        observations = _observe(provider, attempt, config.accelerator.hosts, context.machine)
        over = all(observation.container and observation.container.ended for observation in observations)
        if over or context.machine.clock.monotonic() >= deadline:
            return judge(observations, config.slice.accelerator_type, seconds)
        context.machine.clock.sleep(_INTERVAL)


def _refused(report: HostReport, verb: str) -> HostResult:
    if report.ok:
        return HostResult(report.worker, {}, (Problem("not tried, because of another host", "", fatal=False),))
    return HostResult(report.worker, {}, (Problem(f"could not {verb} the container: {report.detail}", CREATE_ANEW),))


def _observe(provider: Provider, attempt: Attempt, hosts: int, machine: Workstation) -> list[Observation]:
    return machine.threads.map(
        lambda worker: provider.observe(worker, attempt.container, None), range(hosts), at_once=64
    )
