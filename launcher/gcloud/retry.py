"""The launcher's retry policy: which errors are retried, for how long, with which pauses, what the user is told.

gcloud retries what passes within seconds; this policy serves what waits for minutes or hours, so that a moment without
a network ends nothing. tenacity and google.api_core.retry know neither our errors nor the clock of a simulation.
"""

from collections.abc import Callable
from typing import TypeVar

from launcher.errors import LaunchError
from launcher.gcloud.errors import PermissionDenied
from launcher.workstation import Workstation

# Retry PERMISSION_DENIED this long: sessions expire and IAM changes propagate.
_DENIED_SECONDS = 600.0

T = TypeVar("T")


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
