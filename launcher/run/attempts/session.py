"""One process's work on a run: what it works on, how it ended, and the stop that any process may request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config import Config
from launcher.errors import Exit, LaunchError
from launcher.provider import Provider
from launcher.run import specification
from launcher.run.ledger import Ledger
from launcher.run.specification import SecretSource, Specification
from launcher.run.supervise import AttemptRef, Output
from launcher.run.verdict import Verdict
from launcher.workstation import Workstation
from training.machine.clock import Clock

_STOP_POLL_SECONDS = 1.0


class RunStopped(LaunchError):
    """The run's owner stopped it: no attempt of it is started."""

    exit_code = Exit.STOPPED


@dataclass(frozen=True)
class _UntilStopped:
    """A clock whose waits look for a stop of the run, once a second."""

    clock: Clock
    check_stop: Callable[[], None]

    def monotonic(self) -> float:
        return self.clock.monotonic()

    def time(self) -> float:
        return self.clock.time()

    def sleep(self, seconds: float) -> None:
        deadline = self.clock.monotonic() + seconds
        while True:
            self.check_stop()
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return
            self.clock.sleep(min(left, _STOP_POLL_SECONDS))


@dataclass(frozen=True)
class Outcome:
    """How a run ended here: its last attempt's verdict, and what the host that is the cause wrote last."""

    run_id: str
    attempt: int
    verdict: Verdict
    last_lines: list[str]


@dataclass(frozen=True)
class Session:
    """One process's work on a run, whose lock it holds."""

    home: Path
    """The launcher's folder."""
    ledger: Ledger
    specification: Specification | None
    """None for a run of an older version: it can be watched, and no attempt of it can be started."""
    config: Config
    """The specification's; of a run of an older version, that of the command line."""
    provider: Provider
    secrets: SecretSource
    output: Output
    machine: Workstation

    def say(self, text: str) -> None:
        """Says a line about this run."""
        self.output.say(f"run {self.ledger.run_id}{text}")

    def check_stop(self) -> None:
        """Raises RunStopped when the run's owner asked for its end, here or in another process of this machine."""
        if self.ledger.stop_requested():
            raise RunStopped(f"run {self.ledger.run_id}: its owner stopped it; `tpu-launch run` resumes it")

    @property
    def clock(self) -> Clock:
        """The machine's clock; its `sleep` ends with RunStopped when the run's owner stops it."""
        return _UntilStopped(self.machine.clock, self.check_stop)

    def attempt(self, number: int) -> AttemptRef:
        """How an attempt that was begun is found on the hosts, and which values are masked in what is kept of it."""
        if not self.provider.capabilities.sends_secrets:
            names, values = list(self.config.gke.secrets), dict[str, str]()
        elif self.specification is not None:
            names, values = self.specification.secrets, self.secrets.values(self.specification)
        else:
            names, environment = self.config.run.secrets, self.secrets.environment
            values = {name: environment[name] for name in names if name in environment}
        workers = range(self.config.accelerator.hosts)
        unknown = [name for name in names if name not in values]
        return AttemptRef(self.ledger.run_id, number, workers, values, unknown)


def with_image(session: Session, image: str) -> Session:
    """The session of a run whose image is known now; its specification is written."""
    assert session.specification is not None
    spec = session.specification.model_copy(update={"image": image})
    specification.write(session.ledger.folder, spec)
    return replace(session, specification=spec)
