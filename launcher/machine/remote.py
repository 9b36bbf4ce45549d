"""An open connection to one host: the interface through which commands reach hosts. Data and Protocols only.

`launcher.tpu_vm.ssh.transport` implements it over Fabric; `launcher.tpu_vm.ssh.pool` keeps connections open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Address:
    """How gcloud reaches one host."""

    worker: int
    host: str
    user: str
    key_file: str
    known_hosts: str
    alias: str
    """The name under which the host's key is kept in `known_hosts`."""


class ConnectionFailed(Exception):
    """A connection could not be opened, or broke. Its message says why."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """The host is there, but refuses us (keys, host keys, a proxy): gcloud may get through."""


class Connection(Protocol):
    """A connection to one host. Tasks may run commands on it at once."""

    @property
    def is_open(self) -> bool:
        """Whether it is, as far as is known here."""

    def run(self, command: str, *, timeout: float, stdin: str | None) -> tuple[int, str, str]:
        """Exit code, output and error output of a command line.

        Raises:
            TimeoutError: The command did not end within `timeout` seconds.
            ConnectionFailed: The connection broke; the command may have run.
        """

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        """Runs a command line whose standard input stays open until its end, and hands over each line of its output and
        error output as it comes; its exit code.

        Raises:
            TimeoutError: The command did not end within `timeout` seconds.
            ConnectionFailed: The connection broke; the command may have run.
        """

    def close(self) -> None:
        """Closes it; commands that run on it fail."""


Connect = Callable[[Address], Connection]
"""Opens a connection. Raises ConnectionFailed."""
