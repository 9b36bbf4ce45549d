"""Calls of gcloud, and what its errors mean.

Command lines are built by pure functions, so that `plan` prints exactly what would run. gcloud's error messages are
interpreted here and nowhere else: no capacity, no quota, no permission, a conflict, something missing. Known defects of
the SDK (seen with 528.0.0) decide the shape of every call: `--output-directory` is broken, subsets of workers lose exit
codes, and ssh's 255 makes gcloud run the whole command again, so calls address `all` or one worker, and no remote
command returns 255.

A call is tried again in one case only: another operation on the same node has not ended (`Busy`), with a random pause
and one deadline (`call`, six lines). tenacity or google.api_core.retry would replace these lines by as many lines of
predicates; the other errors must not be retried, because gcloud itself retries what passes and a creation costs money.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence

from launcher import shell
from launcher.config import Config
from launcher.errors import CommandTimeout, Exit, LaunchError
from launcher.tpu_vm import idle_shutdown, placement

# gcloud has no time-outs of its own for ssh: a dead host would hang each call for minutes.
_BUSY_SECONDS = 60.0  # how long another operation on the same node is waited for
_SSH_FLAGS = (
    "--ssh-flag=-oConnectTimeout=10",
    "--ssh-flag=-oServerAliveInterval=15",
    "--ssh-flag=-oServerAliveCountMax=3",
)


class NotFound(LaunchError):
    """The thing that was asked for doesn't exist."""


class Stockout(LaunchError):
    """The zone has no capacity now."""

    exit_code = Exit.STOCKOUT


class QuotaExceeded(LaunchError):
    """The project's quota is used up."""

    exit_code = Exit.QUOTA


class PermissionDenied(LaunchError):
    """The account may not do it, or the API is off."""

    exit_code = Exit.PERMISSION


class Conflict(LaunchError):
    """Something of that name exists already."""

    exit_code = Exit.CONFLICT


class Preempted(LaunchError):
    """The slice was taken away; only deleting it is left."""

    exit_code = Exit.PREEMPTED


class Busy(LaunchError):
    """Another operation is on its way; the same request works when that has ended."""

    exit_code = Exit.CONFLICT


class Refused(LaunchError):
    """Google refuses the request as it is written; asking again changes nothing."""

    exit_code = Exit.BAD_INPUT


def _base(config: Config, *words: str) -> list[str]:
    # Only the alpha track has --tunnel-through-iap (SDK 528).
    track = ["alpha"] if words[0] == "ssh" and config.slice.iap else []
    place = [f"--project={config.project}", f"--zone={placement.current_zone(config)}"]
    return ["gcloud", *track, "compute", "tpus", "tpu-vm", *words, *place, "--quiet"]


def create_command(config: Config, labels: dict[str, str]) -> list[str]:
    """Creates the node and waits for the operation."""
    return [
        *_base(config, "create", config.slice.name),
        f"--version={config.runtime_version}",
        *node_flags(config, labels),
    ]


def node_flags(config: Config, labels: dict[str, str]) -> list[str]:
    """The flags that describe a node, for its creation and for a request in the queue. The type is always given:
    gcloud's default is a v2-8."""
    wanted = config.slice
    command = [f"--accelerator-type={wanted.accelerator_type}"]
    if wanted.capacity != "on-demand":
        command.append(f"--{wanted.capacity}")
    if wanted.network:
        command.append(f"--network={wanted.network}")
    if wanted.subnetwork:
        command.append(f"--subnetwork={wanted.subnetwork}")
    if wanted.internal_ips:
        command.append("--internal-ips")
    if wanted.service_account:
        command.append(f"--service-account={wanted.service_account}")
    command.append("--scopes=https://www.googleapis.com/auth/cloud-platform")
    both = {**labels, **wanted.labels}
    command += idle_shutdown.metadata_flags(config)
    command.append("--labels=" + ",".join(f"{key}={value}" for key, value in sorted(both.items())))
    return command


def describe_command(config: Config) -> list[str]:
    """Describes the node as JSON."""
    return [*_base(config, "describe", config.slice.name), "--format=json"]


def delete_command(config: Config) -> list[str]:
    """Deletes the node and waits for the operation."""
    return _base(config, "delete", config.slice.name)


def ssh_command(config: Config, script: str, *, worker: str = "all", dry_run: bool = False) -> list[str]:
    """Runs `script` (POSIX shell) on all hosts, or on one. Its output has no host prefix: scripts print their own."""
    assert worker == "all" or worker.isdigit(), "a subset of workers loses exit codes"
    command = [*_base(config, "ssh", config.slice.name), f"--worker={worker}", *_SSH_FLAGS]
    command += _network_path(config)
    if dry_run:
        command.append("--dry-run")
    return [*command, f"--command={script}"]


def shell_command(config: Config, worker: int, flags: Sequence[str] = ()) -> list[str]:
    """A person's own ssh session on one host, or (with flags of ssh's) a tunnel to it."""
    command = [
        *_base(config, "ssh", config.slice.name),
        f"--worker={worker}",
        *_SSH_FLAGS,
        *(f"--ssh-flag={flag}" for flag in flags),
    ]
    return [*command, *_network_path(config)]


def _network_path(config: Config) -> list[str]:
    """How hosts without an external address are reached."""
    if config.slice.iap:
        return ["--tunnel-through-iap"]
    return ["--internal-ip"] if config.slice.internal_ips else []


def accelerator_types_command(config: Config) -> list[str]:
    """Lists the accelerator types that the zone offers; fails when the project, the API or the permissions are not in
    order."""
    return [*_base(config, "accelerator-types", "list"), "--format=value(name.basename())"]


def runtime_versions_command(config: Config) -> list[str]:
    """Lists the software versions that the zone offers for TPU VMs."""
    return [*_base(config, "versions", "list"), "--format=value(name.basename())"]


def call(argv: Sequence[str], *, timeout: float) -> str:
    """Runs a gcloud command and returns its standard output; waits for another operation to end. Raises the LaunchError
    that its message means."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        result = shell.run(argv, timeout=timeout)
        if result.ok:
            return result.stdout
        error = explain(result.stderr or result.stdout, argv)
        if not isinstance(error, Busy) or time.monotonic() > deadline:
            raise error
        time.sleep(1.0 + 2.0 * random.random())


def call_long(argv: Sequence[str], *, timeout: float) -> str:
    """As `call`, for the creation of a node: a time-out says that Google may still be creating it."""
    try:
        return call(argv, timeout=timeout)
    except CommandTimeout:
        raise CommandTimeout(
            f"no end after {timeout / 60:.0f} minutes of: {shell.quote(argv)}\n"
            "Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
        ) from None


# Longest and most specific first: the first that matches explains the error. Messages: terraform-provider-google
# #21243, skypilot `instance_utils.py`, marin #1612, and the API's own answers.
_MEANINGS: tuple[tuple[str, type[LaunchError], str], ...] = (
    (r"no more capacity|Insufficient (reserved )?capacity|stockout|ZONE_RESOURCE_POOL_EXHAUSTED", Stockout,
     "no capacity in the zone right now: try again later, another zone, or another accelerator type"),
    (r"terminal state \W?(PREEMPTED|TERMINATED)", Preempted,
     "the slice was taken away: `tpu-launch up` deletes it and creates it again"),
    (r"unable to queue the operation", Busy, "another operation on it has not ended yet: try again in a minute"),
    (r"Quota limit|[Qq]uota .*(exceeded|exhausted)|RESOURCE_EXHAUSTED", QuotaExceeded,
     "quota: ask for more in the Cloud console (IAM & Admin > Quotas), or use what you have elsewhere; waiting does "
     "not "
     "help"),
    (r"SERVICE_DISABLED|has not been used in project|API .*is disabled|is not enabled", PermissionDenied,
     "the Cloud TPU API is off in this project: gcloud services enable tpu.googleapis.com"),
    (r"PERMISSION_DENIED|[Pp]ermission .*denied|does not have permission|forbidden", PermissionDenied,
     "the account lacks a permission, the zone is not open to the project, or the zone does not exist"),
    (r"ALREADY_EXISTS|already exists", Conflict, "something of that name exists already"),
    (r"NOT_FOUND|was not found|could not be found", NotFound, "it does not exist"),
    (r"INVALID_ARGUMENT|invalid AcceleratorType|invalid RuntimeVersion", Refused,
     "Google refuses the request: correct the file"),
    (r"do not currently have an active account|gcloud auth login|Reauthentication", PermissionDenied,
     "sign in first: gcloud auth login"),
    (r"UNAVAILABLE|DEADLINE_EXCEEDED|Connection (refused|reset)|Max retries exceeded|code=5\d\d",
     LaunchError, "Google's API can't be reached or has a temporary failure: try again"),
)  # fmt: skip


def explain(stderr: str, argv: Sequence[str]) -> LaunchError:
    """The error that gcloud's message means, with what to do about it."""
    text = summarize(stderr)
    for pattern, kind, advice in _MEANINGS:
        if re.search(pattern, stderr):
            if advice.startswith("sign in"):  # gcloud says it in eight lines
                text = text.splitlines()[0]
            return kind(f"{text}\n  {advice}")
    return LaunchError(f"{text}\n  from: {shell.quote(argv)[:400]}")


def summarize(stderr: str) -> str:
    """The part of gcloud's output that says what went wrong, without its own decoration."""
    lines = [
        line
        for line in stderr.splitlines()
        if line.strip() and not line.startswith(("Create request issued", "Waiting for operation", "."))
    ]
    errors = [number for number, line in enumerate(lines) if line.startswith("ERROR:")]
    chosen = lines[errors[0] :] if errors else lines[-5:]
    text = "\n".join(chosen[:12]).removeprefix("ERROR: ").strip()
    text = re.sub(r"^\(gcloud[\w.-]*\)\s*", "gcloud: ", text)
    if match := re.search(r'\{\s*"code": \d+,\s*"message": "((?:[^"\\]|\\.)*)"', text):  # an operation's error, as JSON
        text = text[: match.start()] + json.loads(f'"{match.group(1)}"')
    return text or "gcloud failed without a message"
