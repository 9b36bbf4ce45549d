"""Calls of gcloud, each with a time-out, and their retries; failures are LaunchErrors that say what to do.

gcloud retries what passes within seconds, and a creation costs money: a call is retried only while another operation on
the same node is under way (`Busy`). What waits for minutes or hours is repeated through `Retry`, so that a moment
without a network ends nothing. tenacity and google.api_core.retry know neither our errors nor a simulation's clock.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher import shell
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.errors import Busy, Conflict, PermissionDenied, explain_error
from launcher.workstation import RunCommand, Workstation

DELETE_SECONDS = 900.0
_BUSY_SECONDS = 60.0
_DELETION_PAUSE = 2.0  # seconds
# Retry PERMISSION_DENIED this long: sessions expire and IAM changes propagate.
_DENIED_SECONDS = 600.0

T = TypeVar("T")


def run_gcloud(
    argv: Sequence[str], *, timeout: float, run: RunCommand = shell.run, pass_fds: Sequence[int] = ()
) -> str:
    """Runs gcloud once; it inherits `pass_fds`. Returns its output; raises the LaunchError that its message means."""
    try:
        result = run(argv, timeout=timeout, pass_fds=pass_fds)
    except CommandTimeout as error:
        raise CommandTimeout(f"{error}\n  Google's API, or the network to it, does not answer: try again") from None
    if result.ok:
        return result.stdout
    raise explain_error(result.stderr or result.stdout, argv)


def call_gcloud(machine: Workstation, argv: Sequence[str], *, timeout: float, pass_fds: Sequence[int] = ()) -> str:
    """Runs gcloud as `run_gcloud`; retries for a minute while another operation on the node is under way (Busy)."""
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
    machine: Workstation, say: Callable[[str], None], look: Callable[[], Look | None], deadline: float
) -> None:
    """Deletes something and returns when it is gone. Each deletion follows a look: what was seen before may have been
    minutes ago.

    Args:
        say: Is given a line for each new error after which the deletion is repeated.
        look: Asks the API; returns what is still there and the command that deletes it, None when nothing is left.
        deadline: Seconds of the monotonic clock; DELETE_SECONDS after the begin.

    Raises:
        CommandTimeout: It is still there after the deadline.
        LaunchError: Repeating the deletion changes nothing.
    """
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
        """Returns the seconds of the next pause."""
        pause = self._base * (0.5 + self._machine.random.random())
        self._base = min(self._base * 2, self._longest)
        return pause


class Retry:
    """Repeats operations that wait for one thing, while their errors are transient. Tells the user each error once.

    Args:
        subject: Names what is waited for; begins each line.
        retry_denied: Also retry PERMISSION_DENIED, for ten minutes. False where the permission may never have been
            granted.
    """

    def __init__(
        self, machine: Workstation, say: Callable[[str], None], subject: str, *, retry_denied: bool = True
    ) -> None:
        self._machine, self._say, self._subject, self._retry_denied = machine, say, subject, retry_denied
        self._denied_since: float | None = None
        self._reported = ""

    def call(self, operation: Callable[[], T], deadline: float) -> T:
        """Returns the operation's result. Retries it with growing pauses, and tells the user each new error.
        `deadline`: seconds of the monotonic clock.

        Raises:
            LaunchError: The operation's error: at once when it is not transient, else that of a try at the deadline.
        """
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
        """Returns whether an error may pass; notes since when permission has been denied."""
        if not isinstance(error, PermissionDenied):
            self._denied_since = None
            return error.transient
        if self._denied_since is None:
            self._denied_since = now
        return self._retry_denied and now - self._denied_since < _DENIED_SECONDS
