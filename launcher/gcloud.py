"""Calls of gcloud, each with a time-out, and their retries; failures are LaunchErrors that say what to do: no other
module interprets gcloud's English. The command lines are with those who call it.

gcloud retries what passes within seconds, and a creation costs money: a call is retried only while another operation on
the same node is under way (`Busy`). What waits for minutes or hours is repeated through `Retry`, so that a moment
without a network ends nothing. tenacity and google.api_core.retry know neither our errors nor a simulation's clock.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher import shell
from launcher.errors import CommandTimeout, Exit, LaunchError
from launcher.workstation import RunCommand, Workstation

DELETE_SECONDS = 900.0
_BUSY_SECONDS = 60.0
_DELETION_PAUSE = 2.0  # seconds
# Retry PERMISSION_DENIED this long: sessions expire and IAM changes propagate.
_DENIED_SECONDS = 600.0

T = TypeVar("T")


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
    # "stockout" may be in the name of a slice too: the word alone counts.
    (r"no more capacity|[Ii]nsufficient (reserved )?capacity|insufficientCapacity|STOCK_?OUT|"
     r"(?<![\w/-])[Ss]tock_?out(?![\w-])|RESOURCE_POOL_EXHAUSTED|not have enough resources available|NO_CAPACITY",
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
    """Returns the error that gcloud's message means, with advice; a transient LaunchError for an unknown wording.
    `argv` (gcloud compute tpus KIND VERB ...) tells creations, after which an internal error means no capacity."""
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


def run_gcloud(
    argv: Sequence[str], *, timeout: float, run: RunCommand = shell.run, pass_fds: Sequence[int] = ()
) -> str:
    """Runs gcloud once; it inherits `pass_fds`. Returns its stdout. Raises CommandTimeout after `timeout` seconds, else
    the LaunchError that gcloud's message means."""
    try:
        result = run(argv, timeout=timeout, pass_fds=pass_fds)
    except CommandTimeout as error:
        raise CommandTimeout(f"{error}\n  Google's API, or the network to it, does not answer: try again") from None
    if result.ok:
        return result.stdout
    raise explain_error(result.stderr or result.stdout, argv)


def call_gcloud(machine: Workstation, argv: Sequence[str], *, timeout: float, pass_fds: Sequence[int] = ()) -> str:
    """Runs gcloud as `run_gcloud`. While another operation on the node is under way, runs it again, for a minute; then
    raises Busy. `timeout` is of each run."""
    deadline = machine.clock.monotonic() + _BUSY_SECONDS
    backoff = Backoff(machine, longest=2.0)
    while True:
        try:
            return run_gcloud(argv, timeout=timeout, run=machine.run, pass_fds=pass_fds)
        except Busy:
            if machine.clock.monotonic() > deadline:
                raise
        machine.clock.sleep(backoff.next())


Look = tuple[str, Sequence[str] | None]
"""A description of something that is still there, and the command that deletes it; None while no deletion is needed."""


def delete_until_gone(
    machine: Workstation,
    say: Callable[[str], None],
    look: Callable[[], Look | None],
    deadline: float,
    on_refusal: Callable[[], None] = lambda: None,
) -> None:
    """Deletes something and returns when it is gone. `look` asks the API each time: it returns what is still there and
    the command that deletes it (None: it goes by itself), or None when nothing is left. `say` is given a line for each
    new error after which the deletion is repeated; `on_refusal` is called each time Google refuses it: busy, conflict
    or not found. Raises CommandTimeout after `deadline` (monotonic clock; DELETE_SECONDS after the begin), LaunchError
    if repeating the deletion changes nothing or `look` raises it."""
    reported = ""
    while (seen := look()) is not None:
        description, command = seen
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(
                f"{description} and not gone after {DELETE_SECONDS / 60:.0f} minutes; run the command again"
            )
        if command is not None:
            try:
                run_gcloud(command, timeout=DELETE_SECONDS, run=machine.run)
                continue
            except LaunchError as error:
                # Gone already, another operation, or a lost answer: the next look tells.
                if not (error.transient or isinstance(error, Conflict)):
                    raise
                if isinstance(error, Busy | Conflict | ResourceNotFound):
                    on_refusal()
                text = f"{description}, and is not deleted yet: {str(error).splitlines()[0]}; trying again"
                if text != reported:
                    say(text)
                reported = text
        machine.clock.sleep(_DELETION_PAUSE)


class Backoff:
    """Pauses that double up to a limit, with jitter (half to one and a half times): others wait for the same thing."""

    def __init__(self, machine: Workstation, first: float = 2.0, longest: float = 60.0) -> None:
        self._machine, self._base, self._longest = machine, first, longest

    def next(self) -> float:
        """Returns the seconds of the next pause, without waiting: they double up to `longest`, times 0.5 to 1.5."""
        pause = self._base * (0.5 + self._machine.random.random())
        self._base = min(self._base * 2, self._longest)
        return pause


class Retry:
    """Repeats operations that wait for one thing, named `subject`, while their errors are transient. Tells the user
    each error that is not the last told. With `retry_denied` PERMISSION_DENIED is retried too, for ten minutes; False
    where the permission may never have been granted."""

    def __init__(
        self, machine: Workstation, say: Callable[[str], None], subject: str, *, retry_denied: bool = True
    ) -> None:
        self._machine, self._say, self._subject, self._retry_denied = machine, say, subject, retry_denied
        self._denied_since: float | None = None
        self._reported = ""

    def call(self, operation: Callable[[], T], deadline: float) -> T:
        """Returns the operation's result. Retries it with growing pauses, and tells the user each new error. Raises the
        operation's LaunchError: at once when it is not transient (with `retry_denied`, PERMISSION_DENIED after ten
        minutes), else that of a try at the deadline (monotonic clock)."""
        backoff = Backoff(self._machine)
        while True:
            try:
                result = operation()
            except LaunchError as error:
                now = self._machine.clock.monotonic()
                pause = min(backoff.next(), deadline - now)
                if pause <= 0.0 or not self._is_retryable(error, now):
                    raise
                self._report(error)
            else:
                self._denied_since, self._reported = None, ""
                return result
            self._machine.clock.sleep(pause)

    def _report(self, error: LaunchError) -> None:
        """Tells the user the error in one line, unless it was told last."""
        text = " ".join(line.strip() for line in str(error).splitlines())[:300]
        if text != self._reported:
            self._say(f"{self._subject}: still waiting, although: {text}")
            self._reported = text

    def _is_retryable(self, error: LaunchError, now: float) -> bool:
        """Returns whether an error may pass; a denied permission may, if `retry_denied`, for ten minutes from the first
        denial."""
        if not isinstance(error, PermissionDenied):
            self._denied_since = None
            return error.transient
        if self._denied_since is None:
            self._denied_since = now
        return self._retry_denied and now - self._denied_since < _DENIED_SECONDS
