"""The result of a command on one host. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostResult:
    """What a command on a host printed, or why it could not be run (`problem`)."""

    worker: int

    returncode: int | None
    """None when the host was not reached."""

    stdout: str = ""
    stderr: str = ""
    problem: str = ""

    refused: bool = False
    """The host is there, but ssh as we speak it does not work (keys, host keys, a proxy): gcloud may get through."""

    timed_out: bool = False
    """The command was started and did not end in its time."""

    @property
    def reached(self) -> bool:
        """Whether the command ran to its end."""
        return self.returncode is not None
