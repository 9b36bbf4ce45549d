"""The interface of a provider: what a platform that runs containers on hosts must do, and the data in which it reports.

`launcher.run` supervises a run through this Protocol alone. `launcher.tpu_vm` implements it over gcloud and Fabric,
`launcher.gke` over kubectl; `launcher.providers` makes one by name. This module holds data only and decides nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from training.distributed.cluster import SECRET_VARIABLE
from training.machine.clock import Clock

LOG_OVERLAP = timedelta(seconds=1)  # how far before the newest known line `observe` is asked to begin again


DELIVERY_SECONDS = 120
"""How long a container waits for its secrets beyond Attempt.start_seconds."""


@dataclass(frozen=True)
class Capabilities:
    """What a provider can do beyond the methods of the Protocol. Callers ask for these, never for a provider's name."""

    cloud_tpu_node: bool
    """The slice is a Cloud TPU node of its own: gcloud lists it, opens shells on its hosts, and its price is known."""

    emulated: bool
    """`--emulated` can stand in for it."""

    sends_secrets: bool
    """Values of `run.secrets` travel from this machine to the hosts. Otherwise the platform has secrets of its own."""

    replaces_hosts: bool
    """A slice that is deleted and created again has other hosts. Otherwise the platform chooses hosts for each
    attempt."""

    overlays: bool
    """Files can be laid over those of an image (`run --overlay`)."""


@dataclass(frozen=True)
class Overlay:
    """Files that are laid over those of an image."""

    target: str
    """The folder of the container over which the archive is unpacked: an absolute path."""

    archive: bytes = field(repr=False)
    """A gzip-compressed tar archive."""

    @property
    def digest(self) -> str:
        """SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class SliceState:
    """A slice as its owner's API describes it."""

    name: str
    state: str  # CREATING, READY, PREEMPTED, ...: Google's words
    health: str
    accelerator_type: str
    hosts: tuple[str, ...]  # internal addresses in worker order
    detail: str = ""  # what the API says about health or symptoms
    created: str = ""  # when, RFC 3339; empty when the API doesn't say
    uid: str = ""  # the API's own number of it: another slice of the same name has another one
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    request: str = ""  # name of the request in the queue that it came from

    def is_same(self, other: SliceState | None) -> bool:
        """Whether both are descriptions of one slice, and not of two that have the same name one after the other."""
        return other is not None and (self.name, self.uid, self.created) == (other.name, other.uid, other.created)

    @property
    def ready(self) -> bool:
        """Whether its hosts can be used."""
        return self.state == "READY"

    @property
    def trouble(self) -> str:
        """What the API says is wrong with it, for a person; empty when all is well."""
        parts = [
            self.state if not self.ready else "",
            self.health if self.health.startswith("UNHEALTHY") else "",
            self.detail,
        ]
        return ", ".join(part for part in parts if part)

    @property
    def gone_for_good(self) -> bool:
        """Must be deleted before anything of that name can run again."""
        return self.state in ("PREEMPTED", "TERMINATED")


@dataclass(frozen=True)
class Attempt:
    """One start of a run on a slice: everything every host must be told."""

    run_id: str
    number: int
    image: str  # repository@sha256:... or an image id
    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)  # name -> content, below /etc/tpu-launch
    shm_size: str = "16g"
    compile_cache_gb: float = 0.0  # of compiled programs that the host's disk keeps for later attempts
    stop_seconds: int = 30  # that the container has to end when its host shuts down
    user: str | None = None
    secrets: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # environment variables that nothing but the command may see
    overlay: Overlay | None = None  # files over the image's own
    start_seconds: float = 900.0  # for pulling the image and starting it, on all hosts
    host_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False, compare=False)
    """By which the hosts of this attempt know each other, and no other attempt's. It travels as secrets do, and is kept
    nowhere: the next attempt has another one."""

    def all_secrets(self, hosts: int) -> dict[str, str]:
        """The variables that nothing but the command may see, on a slice of so many hosts. One host meets nobody."""
        return {**({SECRET_VARIABLE: self.host_secret} if hosts > 1 else {}), **self.secrets}

    @property
    def container(self) -> str:
        """Name of the attempt's container, the same on every host."""
        return container_name(self.run_id, self.number)


def container_name(run_id: str, attempt: int) -> str:
    """Name of an attempt's container, the same on every host."""
    return f"tpu-launch-{run_id}-{attempt}"


@dataclass(frozen=True)
class ContainerState:
    """A container of an attempt, as its engine reports it. Times are RFC 3339 strings of the host's clock."""

    status: str  # created, running, exited, absent
    exit_code: int | None = None
    oom_killed: bool = False
    started_at: str = ""
    finished_at: str = ""
    error: str = ""
    image: str = ""
    rebooted: bool = False
    """Its host has booted since it was created."""
    ended_before_reboot: bool = False
    """Its command had ended by then."""

    @property
    def running(self) -> bool:
        """Whether its command runs."""
        return self.status in ("running", "paused", "restarting")

    @property
    def ended(self) -> bool:
        """Whether its command has run and runs no more."""
        return self.status in ("exited", "dead")


@dataclass(frozen=True)
class LogLine:
    """One line of a container's output: when the engine received it (RFC 3339, host's clock), and the line."""

    timestamp: str
    text: str


@dataclass(frozen=True)
class Observation:
    """What one look at one host showed. `container` is None when the host could not be asked; `problem` says why."""

    worker: int
    container: ContainerState | None
    lines: tuple[LogLine, ...] = ()
    more: bool = False  # the look was cut short: there are more lines right now
    problem: str = ""
    since: str | None = None  # from when on lines were asked for; None: from the beginning


@dataclass(frozen=True)
class HostReport:
    """What one host answered to a command that all hosts were given."""

    worker: int
    ok: bool
    detail: str
    """The image id, or what went wrong, for a person."""

    occupied_by: str = ""
    """Id of another run that uses this host, when that is why the command failed."""


@dataclass(frozen=True)
class CommandReport:
    """How a command in a host's live container ended."""

    worker: int

    exit_code: int | None
    """The command's own; None when it was not seen to end, or did not run."""

    ended: float
    """By this machine's monotonic clock: which host was the first."""

    problem: str = ""
    """Why there is no exit code, for a person."""


class Provider(Protocol):
    """A platform to run on. Every method is bounded in time and safe to repeat; errors are LaunchErrors."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond these methods."""

    def connect(self) -> None:
        """Starts to open connections to the hosts in the background, where that saves time later. Does not wait."""

    def close(self) -> None:
        """Closes what is open. What runs on hosts goes on; the provider can be used again."""

    def describe(self) -> SliceState | None:
        """The slice, or None when it doesn't exist."""

    def known_ready(self) -> bool:
        """Whether the slice was READY, and as the file says, when a command from here last used it: then a start need
        not ask before it tries."""

    def create(self, clock: Clock | None = None) -> None:
        """Creates the slice and returns when it is READY and its hosts answer.

        Args:
            clock: How to wait, where that may be long: its `sleep` may raise, which ends the creation.
        """

    def delete(self) -> None:
        """Deletes the slice and returns when the API says that it is gone; none is fine."""

    def prepare(self, attempt: Attempt) -> list[HostReport]:
        """Gets the image onto every host and makes the attempt's container there, not yet started. `detail` is the
        image id."""

    def start(self, attempt: Attempt) -> list[HostReport]:
        """Starts the prepared containers on all hosts."""

    def observe(self, worker: int, container: str, since: str | None, *, patience: float = 0.0) -> Observation:
        """One look at a container on a host: its state and its log lines from `since` (inclusive) on.

        While the container runs, the look may wait `patience` seconds for its end before it answers.
        """

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        """Stops a container on every host, or on some: SIGTERM, then SIGKILL after `grace` seconds; removes it if
        asked. Gone is fine."""

    def execute(
        self,
        container: str,
        command: Sequence[str],
        workers: Sequence[int],
        *,
        seconds: float,
        on_line: Callable[[int, str], None],
    ) -> list[CommandReport]:
        """Runs a command in a live container on some hosts at once, never twice, and hands over each line of it (worker
        index, text). It has no standard input, is ended after so many seconds, and when this call is interrupted."""

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """What the slice and the hosts know of an attempt that failed: file name -> text for a person. Never raises."""

    def stacks(self, container: str) -> dict[int, str]:
        """Where the processes of a container are, on every host that answers: text for a person. Never raises for a
        host."""
