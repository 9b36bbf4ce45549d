"""What gcloud's error messages mean: no capacity, no quota, no permission, a conflict, something missing. Pure.

gcloud's English is interpreted here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from launcher import shell
from launcher.errors import Exit, LaunchError


class NotFound(LaunchError):
    """There is no such thing."""


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


def explain_error(stderr: str, argv: Sequence[str]) -> LaunchError:
    """The error that gcloud's message means, with what to do about it."""
    text = summarize_error(stderr)
    for pattern, kind, advice in _MEANINGS:
        if re.search(pattern, stderr):
            if advice.startswith("sign in"):  # gcloud says it in eight lines
                text = text.splitlines()[0]
            return kind(f"{text}\n  {advice}")
    return LaunchError(f"{text}\n  from: {shell.quote(argv)[:400]}")


def summarize_error(stderr: str) -> str:
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
