"""The interface of a provider, a platform that runs containers on hosts: its Protocol, and the data of its reports.

`launcher.run` supervises a run through this Protocol alone. `launcher.tpu_vm` implements it over gcloud and Fabric,
`launcher.gke` over kubectl; `launcher.providers` makes one by name. This module decides nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from training.distributed.cluster import SECRET_VARIABLE
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine

LOG_OVERLAP = timedelta(seconds=1)  # how far before the newest known line `observe` begins again
DELIVERY_SECONDS = 120  # how long a container waits for its secrets beyond Attempt.start_seconds
SECRETS_LATE = "tpu-launch: the secrets of this run did not arrive"  # begins the only line of a container without them


@dataclass(frozen=True)
class Capabilities:
    """Properties of a provider that are known without making one. Callers check these, never a provider's name."""

    cloud_tpu_node: bool  # gcloud lists the slice and opens shells on its hosts; has a price, and `--emulated`
    sends_secrets: bool  # `run.secrets` travel from this machine to the hosts; else the platform has its own secrets
    replaces_hosts: bool  # a recreated slice has other hosts; else the platform chooses hosts for each attempt
    overlays: bool  # supports `run --overlay`
    programs: tuple[str, ...] = ()  # that it runs on this machine


@dataclass(frozen=True)
class Overlay:
    """Files that replace or complement those of an image."""

    target: str  # absolute path of the container's folder into which the archive is unpacked
    archive: bytes = field(repr=False)  # a gzip-compressed tar archive

    @property
    def digest(self) -> str:
        """SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class SliceState:
    """A slice as the platform's API describes it."""

    name: str
    state: str  # CREATING, READY, PREEMPTED, ...: Google's words
    health: str
    accelerator_type: str
    hosts: tuple[str, ...]  # internal addresses in worker order
    detail: str = ""  # the API's text about health or symptoms
    created: str = ""  # RFC 3339; "" when the API doesn't say
    uid: str = ""  # the API's own id: a recreated slice of the same name has another one
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    request: str = ""  # name of the queued resource that it came from

    def is_same(self, other: SliceState | None) -> bool:
        """Returns whether both describe the same slice, and not a slice and its successor of the same name."""
        return other is not None and (self.name, self.uid, self.created) == (other.name, other.uid, other.created)

    @property
    def ready(self) -> bool:
        return self.state == "READY"

    @property
    def trouble(self) -> str:
        """Returns what the API says is wrong with the slice, for the user; "" when it is READY and healthy."""
        parts = [
            self.state if not self.ready else "",
            self.health if self.health.startswith("UNHEALTHY") else "",
            self.detail if self.health or not self.ready else "",  # without health (GKE) it says where the slice is
        ]
        return ", ".join(part for part in parts if part)

    @property
    def gone_for_good(self) -> bool:
        """Returns whether the slice must be deleted before its name can be used again."""
        return self.state in ("PREEMPTED", "TERMINATED")


COMPILE_CACHE_FOLDER = "/var/cache/tpu-launch"  # in the container; our images have it, as the trainer's user's


def compile_cache_environment(gigabytes: float) -> dict[str, str]:
    """Returns the variables that tell the trainer to keep compiled programs in COMPILE_CACHE_FOLDER, at most so many
    GB; {} for 0. The caller mounts the folder."""
    folder = {"TPU_LAUNCH_COMPILE_CACHE": COMPILE_CACHE_FOLDER, "TPU_LAUNCH_COMPILE_CACHE_GB": f"{gigabytes:g}"}
    return folder if gigabytes else {}


@dataclass(frozen=True)
class Attempt:
    """One start of a run on a slice: everything that hosts need to know."""

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
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables that only the command sees
    overlay: Overlay | None = None
    start_seconds: float = 900.0  # for pulling the image and starting it, on all hosts
    host_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False, compare=False)
    """Shared by the hosts of this attempt only, to prove who they are. Sent as secrets are, and kept nowhere."""

    def all_secrets(self, hosts: int) -> dict[str, str]:
        """Returns the variables in `secrets`, and with several hosts the one with `host_secret`."""
        return {**({SECRET_VARIABLE: self.host_secret} if hosts > 1 else {}), **self.secrets}

    def waits(self, hosts: int) -> bool:
        """Returns whether the command waits in its container until all hosts have started and have what it needs."""
        return bool(self.all_secrets(hosts)) or self.overlay is not None

    @property
    def container(self) -> str:
        return container_name(self.run_id, self.number)


def container_name(run_id: str, attempt: int) -> str:
    """Returns the name of an attempt's container, the same on every host."""
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
    rebooted: bool = False  # the host has booted since the container was created
    ended_before_reboot: bool = False  # the command had ended before that boot

    @property
    def running(self) -> bool:
        return self.status in ("running", "paused", "restarting")

    @property
    def ended(self) -> bool:
        return self.status in ("exited", "dead")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a container's output, and when the engine received it (RFC 3339, host's clock)."""

    timestamp: str
    text: str


@dataclass(frozen=True)
class Observation:
    """The result of observing one host. `container` is None when the host did not answer; `problem` says why."""

    worker: int
    container: ContainerState | None
    lines: tuple[LogLine, ...] = ()
    more: bool = False  # the observation was cut short: more lines can be read at once
    problem: str = ""
    not_taken: bool = False  # by the cluster's API server: the problem says nothing about the host
    since: str | None = None  # the first time whose lines were requested; None: from the beginning
    open: Mapping[str, int] = field(default_factory=dict)  # bytes so far of lines that have not ended, by their times
    progress: tuple[ProgressLine, ...] = ()  # newest of each process that tells it, if it was asked for
    asked: float = float("inf")  # when this machine asked (monotonic clock): the host's state is not older


@dataclass(frozen=True)
class HostReport:
    """A host's answer to a command given to all hosts."""

    worker: int
    ok: bool
    detail: str  # the image id, or what went wrong, for the user
    occupied_by: str = ""  # id of the other run whose use of the host made the command fail


@dataclass(frozen=True)
class CommandReport:
    """The end of a command in a host's live container."""

    worker: int
    exit_code: int | None  # None when the command did not run, or its end was not seen
    ended: float  # seconds of this machine's monotonic clock
    problem: str = ""  # why there is no exit code, for the user


class Provider(Protocol):
    """A platform to run on. Every method is bounded in time and safe to repeat; errors are LaunchErrors."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def host_count(self) -> int:
        """Returns the number of hosts of the slice, as it was last seen; as configured before it exists."""

    def withdraw_unused(self) -> None:
        """Deletes unused requests that earlier commands left open. Raises LaunchError while another command makes
        requests."""

    def connect(self) -> None:
        """Starts to open connections to the hosts in the background. Does not wait, and reports no failure."""

    def close(self) -> None:
        """Closes connections. Containers go on; the provider can be used again."""

    def describe(self) -> SliceState | None:
        """Asks the platform's API for the slice; returns None when it doesn't exist. Raises LaunchError without an
        answer."""

    def known_ready(self) -> bool:
        """Returns whether the slice was READY and as configured when a command of this machine last used it. Then a
        start need not describe it first."""

    def identity(self) -> tuple[str, str]:
        """Returns when the slice was created, and its host 0's address, as known here; "" for what is not known, on GKE
        always."""

    def create(self, clock: Clock | None = None) -> None:
        """Finds the slice READY, waits for it, or creates it, after deleting one that is gone for good; returns when
        its hosts answer. On GKE creates nothing, and warns of missing nodes. Long waits use `clock` (None: the
        machine's), whose `sleep` may raise to end the creation."""

    def delete(self) -> None:
        """Deletes the slice, if it exists (on GKE the runs' objects, not the nodes), and returns when the API says that
        it is gone."""

    def start(self, attempt: Attempt, clock: Clock | None = None) -> list[HostReport]:
        """Starts the attempt's container on every host; leaves one alone that runs or has run. Returns reports with the
        image id as `detail`. On several TPU VMs no command begins unless all hosts have started the same image; each
        pod begins by itself. Waits for nodes use `clock` (None: the machine's), whose `sleep` may raise to end them."""

    def observe(
        self, worker: int, container: str, since: str | None, *, patience: float = 0.0, progress: bool = False
    ) -> Observation:
        """Returns the state of a container on a host and its log lines from the time `since` (inclusive; None: the
        first line) on. While the container runs, may wait up to `patience` seconds for its end. With `progress`, reads
        its lines of progress too, which takes a process in the container. Does not retry."""

    def look(self, worker: int, container: str, *, lines: int = 0) -> Observation:
        """Returns the state of a container on a host, and its newest `lines` log lines. Does not retry."""

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        """Stops a container on `workers` (None: all hosts): SIGTERM, then SIGKILL after `grace` seconds; deletes it if
        `remove`. Returns a report of each host; a missing container counts as stopped."""

    def execute(
        self,
        container: str,
        command: Sequence[str],
        workers: Sequence[int],
        *,
        seconds: float,
        on_line: Callable[[int, str], None],
    ) -> list[CommandReport]:
        """Runs a command in a live container on some hosts at once, never twice, and passes each line of its output
        (worker index, text) to `on_line`. It has no standard input, and is ended after `seconds` and when this call is
        interrupted. Raises BadInput on GKE."""

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """Returns diagnostics of the slice and the hosts after a failed attempt: file name -> text. Never raises."""

    def stacks(self, container: str, *, native: bool = False) -> dict[int, str]:
        """Returns the stack traces of a container's processes, by host, with `native` those of native code too, which
        pauses each process for a moment. Never raises for a host."""
