"""One process's work on a run: the process, the run's ledger and specification, and the provider of its hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.file_lock import hold_shared
from launcher.gcloud.retry import Retry
from launcher.home import of_slice
from launcher.provider import LogLine, Provider, SliceState, container_name
from launcher.run import specification
from launcher.run.ledger import Ledger
from launcher.run.specification import SecretSource, Specification
from launcher.run.verdict import Verdict
from launcher.workstation import CheckedClock, Workstation
from training.machine import Clock

_DESCRIBE_SECONDS = 120.0
DESCRIBE_AGAIN_SECONDS = 5.0  # before a slice that seems to be gone is described again


class RunStopped(LaunchError):
    """The user stopped the run: no attempt of it is started."""

    exit_code = Exit.STOPPED

    @classmethod
    def of(cls, run_id: str) -> RunStopped:
        """Returns the error that says that the run was stopped, and which command resumes it."""
        return cls(f"run {run_id} was stopped (`tpu-launch stop` or `down`); `tpu-launch run` resumes it")


@dataclass(frozen=True)
class Output:
    """Where the user sees what happens."""

    say: Callable[[str], None]
    """Takes one line about the launcher's own work."""

    emit: Callable[[int, LogLine], None]
    """Takes one log line of a host: worker index, line."""


@dataclass(frozen=True)
class Context:
    """The process in which a command on a run works."""

    home: Path
    """The launcher's folder."""
    environment: Mapping[str, str]
    """Holds values of secrets."""
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
    config: Config
    """The configuration in the specification."""
    provider: Provider
    secrets: SecretSource

    @property
    def machine(self) -> Workstation:
        return self.context.machine

    @property
    def workers(self) -> Sequence[int]:
        """Worker indices of all hosts."""
        return range(self.provider.host_count)

    def choose_workers(self, host: int | None) -> Sequence[int]:
        """Returns the worker indices of one host, or of all. Raises BadInput for a host that the slice lacks."""
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

    def check_stop(self) -> None:
        """Raises RunStopped when the user has stopped the run, in this process or another one. Before that waits until
        this process's lease, if it has one, is fresh; ends this process when another one has the lease."""
        self.ledger.confirm()
        if self.ledger.state.stop_requested:
            raise RunStopped.of(self.ledger.run_id)

    def container(self, attempt: int) -> str:
        """Returns the name of an attempt's container, the same on every host."""
        return container_name(self.ledger.run_id, attempt)

    def describe_slice(self) -> SliceState | None:
        """Returns the slice; None if two descriptions, 5 s apart, show none. Raises LaunchError."""
        if (found := self.provider.describe()) is None:  # one answer may be stale
            self.machine.clock.sleep(DESCRIBE_AGAIN_SECONDS)
            found = self.provider.describe()
        return found

    def delete_slice(self, created: str) -> None:
        """Deletes the slice, unless one of its name was created at another time than `created` (RFC 3339; "": not
        known). Raises LaunchError, for an API that does not answer after two minutes."""
        retry = Retry(self.machine, self.context.output.say, f"slice {self.config.slice.name}")
        found = retry.call(self.provider.describe, self.machine.clock.monotonic() + _DESCRIBE_SECONDS)
        if found is not None and created and found.created and found.created != created:
            self.say(f": slice {found.name} is not the one to delete: it was created at {found.created}; left alone")
        else:
            with hold_shared(deletion_mark(self.config)):
                self.provider.delete()

    def secret_values(self) -> dict[str, str]:
        """Returns the values of the run's secrets that this process knows, by name; {} where the platform has them."""
        return self.secrets.values(self.specification) if self.provider.capabilities.sends_secrets else {}

    def unknown_secrets(self) -> list[str]:
        """Returns the names of secrets whose values this process does not know, and so can't mask."""
        if not self.provider.capabilities.sends_secrets:
            return list(self.config.gke.secrets)
        return self.secrets.missing(self.specification)

    def with_image(self, image: str) -> Session:
        """Writes the specification with the image, here and in the bucket, and returns the session that uses it."""
        spec = self.specification.model_copy(update={"image": image})
        specification.write(self.ledger.folder, spec)
        self.ledger.publish()
        return replace(self, specification=spec)


def open_session(context: Context, ledger: Ledger, secrets: SecretSource) -> Session:
    """Returns the session of a run as its folder describes it, with a new provider; the caller closes the provider."""
    spec = specification.read(ledger.folder)
    config = spec.config()
    return Session(context, ledger, spec, config, context.make_provider(config), secrets)


def deletion_mark(config: Config) -> Path:
    """Returns the path of the file that is locked while this machine deletes a slice: no run is started on it."""
    return of_slice(config.project, config.slice.name, "deleting")
