"""Calls of gcloud, each with a time-out; its failures are LaunchErrors that say what to do.

A call is tried again in one case only: another operation on the same node has not ended (`Busy`), with a random pause
and one deadline. tenacity or google.api_core.retry would replace these six lines by as many lines of predicates; other
errors are not retried here, because gcloud itself retries what passes, and a creation costs money.

What waits for minutes or hours asks through `Patience`: then a moment without a network ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher import shell
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.errors import Busy, Conflict, PermissionDenied, explain_error
from launcher.workstation import RunCommand, Workstation

_BUSY_SECONDS = 60.0  # how long another operation on the same node is waited for
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # seconds, between questions that fail
# How long a refusal is doubted: a session that ends at night, a policy that is being changed. Nothing is lost by it.
_DOUBT_SECONDS = 600.0

T = TypeVar("T")


def ask_gcloud(
    argv: Sequence[str], *, timeout: float, run: RunCommand = shell.run, pass_fds: Sequence[int] = ()
) -> str:
    """Runs a gcloud command that does not concern a node, once, and returns its standard output. Raises the LaunchError
    that its message means."""
    try:
        result = run(argv, timeout=timeout, pass_fds=pass_fds)
    except CommandTimeout as error:
        raise CommandTimeout(f"{error}\n  Google's API, or the network to it, does not answer: try again") from None
    if result.ok:
        return result.stdout
    raise explain_error(result.stderr or result.stdout, argv)


def try_deletion(machine: Workstation, argv: Sequence[str], *, timeout: float) -> LaunchError | None:
    """Runs a deletion once: whoever tries it again looks first what has the name by then.

    Returns:
        None when it is done; else why it may have to be tried again: gone already, another operation, a lost answer.

    Raises:
        LaunchError: trying again changes nothing.
    """
    try:
        ask_gcloud(argv, timeout=timeout, run=machine.run)
    except LaunchError as error:
        if not (error.transient or isinstance(error, Conflict)):
            raise
        return error
    return None


def call_gcloud(machine: Workstation, argv: Sequence[str], *, timeout: float, pass_fds: Sequence[int] = ()) -> str:
    """Runs a gcloud command and returns its standard output; waits for another operation to end. gcloud inherits
    `pass_fds`. Raises the LaunchError that its message means."""
    deadline = machine.clock.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return ask_gcloud(argv, timeout=timeout, run=machine.run, pass_fds=pass_fds)
        except Busy:
            if machine.clock.monotonic() > deadline:
                raise
        machine.clock.sleep(1.0 + 2.0 * machine.random.random())


def call_gcloud_long(machine: Workstation, argv: Sequence[str], *, timeout: float, pass_fds: Sequence[int]) -> str:
    """As `call_gcloud`, for the creation of a node: a time-out says that Google may still be creating it."""
    try:
        return call_gcloud(machine, argv, timeout=timeout, pass_fds=pass_fds)
    except CommandTimeout:
        raise CommandTimeout(
            f"no end after {timeout / 60:.0f} minutes of: {shell.quote(argv)}\n"
            "Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
        ) from None


class Patience:
    """Goes on asking while something is waited for: errors that may pass are waited out, with growing pauses, and said
    once each.

    Args:
        machine: asks gcloud, and waits.
        say: is given lines for a person.
        subject: what is waited for, as it begins a line.
        doubts: whether a permission that is refused may come back, because it was there a moment ago.
    """

    def __init__(self, machine: Workstation, say: Callable[[str], None], subject: str, *, doubts: bool = True) -> None:
        self._machine, self._say, self._subject, self._doubts = machine, say, subject, doubts
        self._refused_since: float | None = None
        self._reported = ""

    def ask(self, question: Callable[[], T], deadline: float) -> T:
        """The answer. Raises the last error when the time is over (`deadline`: seconds of the monotonic clock), and at
        once one that does not pass."""
        pause = _FIRST_PAUSE
        while True:
            try:
                answer = question()
            except LaunchError as error:
                now = self._machine.clock.monotonic()
                if now + pause > deadline or not self._may_pass(error, now):
                    raise
                self._report(error)
            else:
                self._refused_since, self._reported = None, ""
                return answer
            self._machine.clock.sleep(pause * (0.5 + self._machine.random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _may_pass(self, error: LaunchError, now: float) -> bool:
        if not isinstance(error, PermissionDenied):
            self._refused_since = None
            return error.transient
        if self._refused_since is None:
            self._refused_since = now
        return self._doubts and now - self._refused_since < _DOUBT_SECONDS

    def _report(self, error: LaunchError) -> None:
        text = " ".join(line.strip() for line in str(error).splitlines())[:300]
        if text != self._reported:
            self._say(f"{self._subject}: still waiting, although: {text}")
            self._reported = text
