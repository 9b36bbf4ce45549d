"""`tpu-launch doctor --devices`: every host of a slice tries its devices, in the run's image, in some seconds.

One container a host runs `tpu-train check-devices`, on all hosts at once, as an attempt does, and is removed in any
case. Its id is that of a run, so no run starts beside it; and it does not start beside a run.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.config import Config
from launcher.errors import Exit, LaunchError
from launcher.images import local
from launcher.provider import Attempt, Observation, Provider
from launcher.run.session import Context, new_run_id, runs_on_slice
from launcher.run.start import require_all, require_ready
from launcher.tpu_vm import slice_hints
from training.device_check import Problem, find_problems, parse_facts
from training.errors import Exit as TrainerExit

SECONDS = 300.0
COLUMNS = ["host", "devices", "memory", "bf16 product", "sum over all", "clock", "disk free", "bucket w / r", ""]
_NAME = "device-check"
_INTERVAL = 1.0  # seconds between two observations
_CLOCK_SECONDS = 5.0  # hosts that differ more spoil the order of log lines; much more, tokens and certificates
RECREATE = "`tpu-launch status`, then `tpu-launch down` and `up`"


@dataclass(frozen=True)
class DeviceReport:
    """The facts reported by one host, and its problems."""

    worker: int
    facts: Mapping[str, Any]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Returns whether the host has no fatal problem; True also if it was not tried, because another host failed."""
        return not any(problem.fatal for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as `doctor --devices --json` prints it."""
        problems = [asdict(problem) for problem in self.problems]
        return {"worker": self.worker, "ok": self.ok, "facts": dict(self.facts), "problems": problems}

    def row(self) -> list[str]:
        """Returns the cells of its row in the table with the headings COLUMNS; "-" for what the host did not report."""
        facts = self.facts
        memory, free = facts.get("memory_bytes"), facts.get("disk_free_bytes")
        write, read = facts.get("bucket_write_mb_s"), facts.get("bucket_read_mb_s")
        wrong, total = facts.get("wrong_products"), facts.get("sum")
        expected, kind = facts.get("devices_expected", "?"), facts.get("kind", "?")
        devices = f"{facts['devices']} of {expected} {kind}" if "devices" in facts else "-"
        return [
            str(self.worker),
            devices,
            "-" if memory is None else f"{memory / 2**30:.1f} GiB",
            "-" if wrong is None else f"{wrong} wrong" if wrong else "right",
            "-" if total is None else "right" if total == facts.get("slice_devices") else f"{total:g}",
            "-" if "clock_offset" not in facts else f"{facts['clock_offset']:+.1f} s",
            "-" if free is None else f"{free / 2**30:.0f} GiB",
            "-" if write is None or read is None else f"{write:g} / {read:g} MB/s",
            "ok" if self.ok else "FAIL",
        ]


def check_devices(config: Config, context: Context, seconds: float = SECONDS) -> list[DeviceReport]:
    """Checks the devices of all hosts of a READY slice, in containers of the run's image, which is made and pushed if
    necessary. Waits for answers until `seconds` after the start, removes the containers (says where it can't), and
    returns a report for each host, silent ones too. Raises BadInput if there is no slice or a program is missing,
    LaunchError if a run is on the slice (CONFLICT), it is not READY, or there is no image."""
    if any(ledger.state.phase.is_open for ledger in runs_on_slice(config, context.home, context.machine)):
        raise LaunchError(
            f"slice {config.slice.name} has a run: its devices are in use; "
            "wait for it, or stop it with `tpu-launch stop`",
            exit_code=Exit.CONFLICT,
        )
    provider = context.make_provider(config)
    with contextlib.closing(provider):
        require_ready(config, provider)
        image = local.image(config, context.output.say).reference
        attempt = make_attempt(config, new_run_id(_NAME, context.machine), image)
        context.output.say(f"trying the devices of {provider.host_count} hosts")
        try:
            return _run(config, provider, attempt, context, seconds)
        finally:
            with contextlib.suppress(LaunchError):
                for report in provider.stop(attempt.container, grace=1, remove=True):
                    if not report.ok and provider.capabilities.cloud_tpu_node:  # `stop --run` knows no such run
                        remove = f"tpu-launch ssh --host {report.worker} -- sudo docker rm --force {attempt.container}"
                        context.output.say(f"host {report.worker} may still have the check's container: `{remove}`")


def make_attempt(config: Config, run_id: str, image: str) -> Attempt:
    """Returns the attempt that runs `tpu-train check-devices` on every host; a trainer's output bucket is tried too."""
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


def _run(config: Config, provider: Provider, attempt: Attempt, context: Context, seconds: float) -> list[DeviceReport]:
    """Starts the containers, observes all hosts until every container has ended or `seconds` have passed, and judges.
    Returns at once if a host can't start its container; raises LaunchError if another run uses one."""
    reports = provider.start(attempt)
    if any(report.occupied_by for report in reports):
        require_all(reports, "start")
    if not all(report.ok for report in reports):  # the failure is fatal, not its effect on other hosts
        other, failed = Problem("not tried, because of another host", fatal=False), "could not start the container"
        return [
            DeviceReport(report.worker, {}, (other if report.ok else Problem(f"{failed}: {report.detail}", RECREATE),))
            for report in reports
        ]
    deadline = context.machine.clock.monotonic() + seconds
    while True:
        observations = context.machine.threads.map(
            lambda worker: provider.observe(worker, attempt.container, None), range(provider.host_count), at_once=64
        )
        over = all(observation.container and observation.container.ended for observation in observations)
        if over or context.machine.clock.monotonic() >= deadline:
            return judge_hosts(observations, slice_hints.current(config).accelerator_type, seconds)
        context.machine.clock.sleep(_INTERVAL)


def judge_hosts(observations: Sequence[Observation], accelerator_type: str, seconds: float) -> list[DeviceReport]:
    """Returns the reports of all hosts. `observations` are the last ones, in worker order; `seconds` is how long the
    hosts had. `clock_offset` among the facts is in seconds from the median of the hosts' clocks."""
    reports = []
    told = [parse_facts(line.text for line in observation.lines) for observation in observations]
    clocks = sorted(facts["clock"] for facts in told if "clock" in facts)  # read by all hosts at their rendezvous
    for observation, facts in zip(observations, told, strict=True):
        problems = find_problems(facts, len(observations), accelerator_type)
        if not facts.get("error") and (end := _judge_end(observation, facts, seconds)):
            problems.insert(0, end)
        if "clock" in facts:
            offset = facts["clock"] - clocks[len(clocks) // 2]
            facts = {**facts, "clock_offset": round(offset, 3)}
            if abs(offset) > _CLOCK_SECONDS:
                fix = "sudo systemctl restart chrony, on that host"
                problems.append(Problem(f"its clock is {offset:+.0f} s off the others'", fix, fatal=False))
        reports.append(DeviceReport(observation.worker, facts, tuple(problems)))
    return reports


def _judge_end(observation: Observation, facts: Mapping[str, Any], seconds: float) -> Problem | None:
    """Returns the problem if a host is silent, still runs after `seconds`, or failed before phase "done"; else None."""
    state, phase = observation.container, facts.get("phase", "beginning")
    if state is None:
        return Problem(f"does not answer: {observation.problem}", RECREATE)
    if not state.ended:
        return Problem(f"not done after {seconds:g} s, in phase {phase!r}", RECREATE)
    if state.exit_code == 0 or phase == "done":
        return None
    last = observation.lines[-1].text if observation.lines else ""
    if state.exit_code == 127:  # no such program
        fix = "check in our image: leave out image.dockerfile, image.reference and image.base"
        return Problem(f"tpu-train can't start in this image: {last}", fix)
    if state.exit_code == TrainerExit.LOST_PEER:
        return Problem(f"not finished, because of another host: {facts.get('lost') or last}")
    return Problem(f"{phase}: ended with exit code {state.exit_code}: {last or 'no output'}", RECREATE)
