"""The machine that the launcher runs on: what its code does to the outside goes through one value.

`cli` makes a `Workstation` (`launcher.providers.this_machine`) and passes it down. Code below uses no `time`,
`threading`, `queue`, `subprocess` or `random` itself (ruff's banned-api holds that), so a simulation that makes its
own `Workstation` decides what time it is, which thread runs next, and what gcloud, ssh and hosts answer. Files are not
part of it: they are real.
"""

import getpass
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher import shell
from launcher.errors import LaunchError
from launcher.shell import Result
from training.machine import Clock, Machine

_CHECK_SECONDS = 1.0  # between two checks of a clock that is checked
_ACCOUNT_COMMAND = ["gcloud", "config", "get", "account", "--quiet"]


@dataclass(frozen=True)
class Owner:
    """A user with a Google account, for the labels of the slices that they create. Both values are valid in a label."""

    user: str  # the name on this machine
    account: str = ""  # a hash, because all members of a project can see labels; "" if gcloud has no account


def this_owner() -> Owner:
    """Returns this process's user name (its number without a name), as a valid label, with a hash of gcloud's account:
    of $CLOUDSDK_CORE_ACCOUNT, else of what gcloud says (in half a second, or up to 30 s); "" without gcloud or
    account."""
    account = os.environ.get("CLOUDSDK_CORE_ACCOUNT", "")
    if not account:
        try:
            answer = shell.run(_ACCOUNT_COMMAND, timeout=30.0)
            account = answer.stdout.strip() if answer.ok else ""
        except LaunchError:  # gcloud is missing or does not answer: the next command with it says so
            account = ""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return Owner(re.sub(r"[^a-z0-9_-]", "-", user.lower())[:63], hash_account(account))


def hash_account(email: str) -> str:
    """Returns the first digits of the SHA-256 of an e-mail address in lower case, for a label; "" for no address."""
    return hashlib.sha256(email.strip().lower().encode()).hexdigest()[:12] if email else ""


@dataclass(frozen=True)
class Address:
    """How gcloud reaches one host."""

    worker: int
    host: str
    user: str
    key_file: str
    known_hosts: str
    alias: str  # the name under which the host's key is kept in `known_hosts`


class ConnectionFailed(Exception):
    """A connection could not be opened, or broke. Its message says why."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """The host answers, but refuses us (keys, host keys, a proxy): gcloud may get through."""


class HostConnection(Protocol):
    """An open ssh connection to one host (`launcher.tpu_vm.ssh`). Several threads may run commands on it at once."""

    @property
    def is_open(self) -> bool:
        """Returns whether the connection is open, as far as is known here."""

    def run(self, command: str, *, timeout: float, stdin: str | None) -> tuple[int, str, str]:
        """Runs a command line with the input `stdin` (None: none). Returns its exit code, output and error output, with
        surrogates for bytes that are not UTF-8. Raises TimeoutError after `timeout` seconds, ConnectionFailed if the
        connection broke: the command may have run."""

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        """Runs a command line whose standard input stays open until its end, and passes each line of its output and
        error output to `on_line` as it comes. Returns its exit code. Raises as `run`."""

    def close(self) -> None:
        """Closes the connection; commands that run on it fail."""


Connect = Callable[[Address], HostConnection]
"""Opens a connection to a host. Raises ConnectionFailed."""


class RunCommand(Protocol):
    """Runs a local command: `launcher.shell.run`."""

    def __call__(
        self, argv: Sequence[str], *, timeout: float, input: str | bytes | None = None, pass_fds: Sequence[int] = ()
    ) -> Result: ...


class StreamCommand(Protocol):
    """Runs a local command and passes on its output line by line: `launcher.shell.stream`."""

    def __call__(
        self,
        argv: Sequence[str],
        on_line: Callable[[str], None],
        *,
        timeout: float,
        on_start: Callable[[Callable[[], None]], object] | None = None,
    ) -> Result: ...


@dataclass(frozen=True, kw_only=True)
class Workstation(Machine):
    """A machine from which the launcher runs local commands and connects to hosts."""

    run: RunCommand = shell.run
    stream: StreamCommand = shell.stream
    connect: Connect
    find_owner: Callable[[], Owner] = lambda: Owner("nobody")

    @property
    def owner(self) -> Owner:
        """The user and account in the labels of slices that are created from here; the first use asks gcloud."""
        return self.find_owner()


@dataclass(frozen=True)
class CheckedClock(Clock):
    """A clock whose waits are interrupted: `check` is called at the begin of each and every second, and may raise."""

    clock: Clock
    check: Callable[[], None]

    def monotonic(self) -> float:
        return self.clock.monotonic()

    def time(self) -> float:
        return self.clock.time()

    def sleep(self, seconds: float) -> None:
        """Waits, and calls `check` before and every second. Raises what `check` raises."""
        deadline = self.clock.monotonic() + seconds
        while True:
            self.check()
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return
            self.clock.sleep(min(left, _CHECK_SECONDS))
