"""Classifies gcloud's error messages: no capacity, no quota, no permission, a conflict, something missing. Pure.

No other module interprets gcloud's English.
"""

import json
import re
import shlex
from collections.abc import Sequence

from launcher.errors import Exit, LaunchError


class ResourceNotFound(LaunchError):
    """The resource does not exist."""


class Stockout(LaunchError):
    """The zone has no capacity now."""

    exit_code = Exit.STOCKOUT


class QuotaExceeded(LaunchError):
    """The project's quota is used up."""

    exit_code = Exit.QUOTA


class PermissionDenied(LaunchError):
    """The account lacks a permission, or the API is off."""

    exit_code = Exit.PERMISSION


class Conflict(LaunchError):
    """The name is taken."""

    exit_code = Exit.CONFLICT


class Preempted(LaunchError):
    """The slice was taken away and can only be deleted."""

    exit_code = Exit.PREEMPTED


class Busy(LaunchError):
    """Another operation is under way; the same request succeeds when that has ended."""

    exit_code = Exit.CONFLICT

    @property
    def transient(self) -> bool:
        return True


class Refused(LaunchError):
    """Google rejects the request as written; repeating it changes nothing."""

    exit_code = Exit.BAD_INPUT


class Unavailable(LaunchError):
    """Google's API can't be reached, or fails temporarily."""


class StillRunning(LaunchError):
    """gcloud stopped waiting for an operation that goes on."""


_NO_CAPACITY = "no capacity in the zone right now: try again later, another zone, or another accelerator type"
_NO_ACCESS = (
    "the account lacks a permission, the zone is not open to the project, or the zone does not exist: "
    "`tpu-launch doctor` finds out which"
)
_NO_QUOTA = (
    "quota: request more in the Cloud console (IAM & Admin > Quotas), or use another zone's; waiting does not help"
)
_SSH = "a host does not accept ssh connections now: try again in a minute"

# Most specific first: the first match explains the error. tests/launcher/test_gcloud.py has their sources.
_MEANINGS: tuple[tuple[str, type[LaunchError], str], ...] = (
    # Errors of ssh, which gcloud runs: its "Permission denied" and "Connection refused" are not the API's.
    (r"Permission denied \((publickey|keyboard-interactive|password)", LaunchError, _SSH),
    (r"ssh: connect to host|kex_exchange_identification|Connection (closed|reset) by .* port \d+", LaunchError, _SSH),
    (r"no more capacity|[Ii]nsufficient (reserved )?capacity|insufficientCapacity|(?i:stock_?out)|"
     r"(ZONE_)?RESOURCE_POOL_EXHAUSTED|not have enough resources available|NO_CAPACITY",
     Stockout, _NO_CAPACITY),
    (r"(terminal|while in) state \W?(PREEMPTED|TERMINATED)", Preempted,
     "the slice was taken away: `tpu-launch up` deletes it and creates it again"),
    (r"(?i:unable to queue the operation)|\bABORTED\b|while in state \W?[A-Z]+ING\b|(?i:resource_?not_?ready)|"
     r"[Aa]nother operation .*in progress", Busy,
     "another operation on it has not ended yet: try again in a minute"),
    (r'"code": 1\b|\bCANCELLED\b|creation of \S+ was cancelled', Conflict,
     "it was deleted by another command: `tpu-launch up` creates a slice again"),
    (r"(?i:has not finished in \d+ seconds)", StillRunning, "Google goes on with it"),
    (r"(?i:per (minute|second|100 seconds))|RATE_?LIMIT_?EXCEEDED|(?i:rate ?limit ?exceeded|too many requests)|"
     r"PerMinute|OPERATION_RATE_EXCEEDED|Resource has been exhausted", Unavailable,
     "too many requests in a short time: try again in a minute"),
    (r"Quota limit|[Qq]uota .*(exceeded|exhausted)|QUOTA_EXCEEDED|QuotaFailure|quotaExceeded|"
     r"(?i:reservation for request queue)", QuotaExceeded, _NO_QUOTA),
    (r'"code": 8\b', Stockout, _NO_CAPACITY),
    (r"RESOURCE_EXHAUSTED", QuotaExceeded, _NO_QUOTA),
    (r"Max retries exceeded|NewConnectionError|[Nn]ame or service not known|name resolution|NameResolutionError|"
     r"Network is unreachable|No route to host|Unable to find the server|RemoteDisconnected|Connection aborted|"
     r"(Read|Connect)Timeout|[Rr]ead timed out|ConnectionError|SSLEOFError|EOF occurred", Unavailable,
     "Google's API can't be reached from this machine: check its network, then try again"),
    (r"[Bb]illing .*(disabled|not enabled|not found|closed)|BILLING_DISABLED", PermissionDenied,
     "billing is off in this project: turn it on in the Cloud console (Billing)"),
    (r"SERVICE_DISABLED|has not been used in project|API .*is disabled|is not enabled", PermissionDenied,
     "the Cloud TPU API is off in this project: gcloud services enable tpu.googleapis.com"),
    (r"do not currently have an active account|gcloud auth login|Reauthentication|invalid_grant|UNAUTHENTICATED|"
     r"not have any valid credentials|invalid authentication credentials", PermissionDenied,
     "sign in first: gcloud auth login"),
    (r"PERMISSION_DENIED|[Pp]ermission .*denied|does not have permission|[Ff]orbidden|access is unauthorized|"
     r"prohibited by organization|CONSUMER_INVALID|not found or deleted", PermissionDenied, _NO_ACCESS),
    (r"ALREADY_EXISTS|already exists", Conflict,
     "the name is taken: choose another one, or delete what has it"),
    (r"NOT_FOUND|was not found|could not be found", ResourceNotFound,
     "it does not exist: check its name, project and zone; `tpu-launch up` creates a slice"),
    (r"INVALID_ARGUMENT|invalid AcceleratorType|invalid RuntimeVersion", Refused,
     "Google refuses the request: correct the file"),
    (r"unrecognized arguments|Invalid choice|(?i:must be specified)", Refused,
     "this gcloud does not know the command: gcloud components update"),
    (r"UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|internal error|Connection (refused|reset)|code=5\d\d|HTTPError 5\d\d|"
     r"Bad Gateway|Service Unavailable|[Bb]ackend ?[Ee]rror|[Uu]nknown [Ee]rror", Unavailable,
     "Google's API has a temporary failure: try again"),
)  # fmt: skip
# A creation whose operation failed: Google says no more than this when it has no hosts for a large slice.
_OF_CREATION: tuple[tuple[str, type[LaunchError], str], ...] = (
    (r'"code": 13\b|an internal error has occurred', Stockout,
     f"Google does not say why; at a creation, the cause is mostly missing capacity. {_NO_CAPACITY}"),
)  # fmt: skip


def explain_error(stderr: str, argv: Sequence[str]) -> LaunchError:
    """Returns the error that gcloud's message means, with advice: Stockout for an internal error of a creation, a
    transient LaunchError for an unknown wording."""
    text = summarize_error(stderr)
    creates = list(argv[4:5]) in (["create"], ["start"])
    for pattern, kind, advice in (*(_OF_CREATION if creates else ()), *_MEANINGS):
        if re.search(pattern, stderr):
            if advice.startswith("sign in"):  # gcloud says it in eight lines
                text = text.splitlines()[0]
            return kind(f"{text}\n  {advice}")
    return LaunchError(f"{text}\n  from: {shlex.join(argv)[:400]}\n  check `tpu-launch status`, then try again")


def summarize_error(stderr: str) -> str:
    """Returns what went wrong from gcloud's output, at most 12 lines, undecorated; a general text if it is empty."""
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
