"""One `gcloud ... ssh --worker=all` that starts the containers, begun while the hosts are still being prepared: its own
start-up takes seconds for many hosts.

The command waits on each host, for a short time, until it is released over an open connection (`release.sh`). That
happens when every host has been checked and prepared and all have the same image. Without it nothing is started: a
command that is late, or that gcloud runs again, is not released, or finds a container that has started. A host that was
not released in time reports `waiting`, and the start is made again without a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.errors import LaunchError
from launcher.workstation import Workstation


class PendingStart:
    """A gcloud call that runs in the background.

    Args:
        argv: the command.
        machine: runs it.
        timeout: seconds after which it is ended.
    """

    def __init__(self, argv: Sequence[str], machine: Workstation, *, timeout: float) -> None:
        self._terminate: Callable[[], None] | None = None
        self._abandoned = False
        self._result = machine.threads.submit(lambda: machine.run(argv, timeout=timeout, on_start=self._on_start))

    def output(self) -> str:
        """Waits for the call's end; the output of the hosts, empty when gcloud could not run or timed out."""
        try:
            return self._result.result().stdout
        except LaunchError:
            return ""

    def refusal(self) -> str | None:
        """gcloud's error output, when it has already failed without reaching a host: the slice is gone, for example."""
        if self._abandoned or not self._result.done() or self._result.exception() is not None:
            return None
        result = self._result.result()
        return None if result.ok or "tpu-launch " in result.stdout else result.stderr

    def abandon(self) -> None:
        """Ends the call. The commands on the hosts end by themselves, as they are never released."""
        self._abandoned = True
        if self._terminate is not None and not self._result.done():
            self._terminate()

    def _on_start(self, terminate: Callable[[], None]) -> None:
        self._terminate = terminate
        if self._abandoned:
            terminate()
