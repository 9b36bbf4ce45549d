"""A pool of ssh connections that stay open, one a host. An unreachable host is a result, not an exception."""

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.workstation import Address, ConnectionFailed, HostConnection, Workstation

_STALE_SECONDS = 10.0
_AT_ONCE = 64  # hosts


@dataclass(frozen=True)
class HostResult:
    """The output of a command on a host, or why it could not be run (`problem`)."""

    worker: int

    returncode: int | None
    """None when the host was not reached."""

    stdout: str = ""
    stderr: str = ""
    problem: str = ""

    refused: bool = False
    """The host answers but refuses our connection (keys, host keys, a proxy): gcloud may get through."""

    timed_out: bool = False
    """The command started and did not end in time."""

    @property
    def reached(self) -> bool:
        """Returns whether the command ran to its end."""
        return self.returncode is not None


class ConnectionPool:
    """Open connections to the hosts of one slice. Threads may use the same or different hosts at once."""

    def __init__(self, addresses: Sequence[Address], machine: Workstation) -> None:
        self.addresses = {address.worker: address for address in addresses}
        self._machine = machine
        self._connections: dict[int, HostConnection] = {}
        self._used: dict[int, float] = {}  # time of the last command, by worker
        self._locks = {worker: machine.threads.lock() for worker in self.addresses}

    @property
    def workers(self) -> list[int]:
        return sorted(self.addresses)

    def run(self, worker: int, script: str, *, timeout: float, stdin: str | None = None) -> HostResult:
        """Runs a script on a host, again if a connection that was idle for 10 s proves dead. Failures of the network or
        the host are in the result.

        Args:
            script: Text for `sh -c`; must be safe to run twice.
            timeout: Seconds, for connecting and the command together.
        """
        # A connection that was idle for a while may be dead: retry it once.
        idle = self._machine.clock.monotonic() - self._used.get(worker, 0.0)
        stale = self._is_open(worker) and idle > _STALE_SECONDS
        result = self._run(worker, script, timeout, stdin)
        if stale and not result.reached and not result.timed_out:
            result = self._run(worker, script, timeout, stdin)
        self._used[worker] = self._machine.clock.monotonic()
        return result

    def _run(self, worker: int, script: str, timeout: float, stdin: str | None) -> HostResult:
        """Runs a script as `run` does, once. Closes the connection after a failure."""
        connection: HostConnection | None = None
        try:
            connection = self._connect(worker)
            # Saves report.sh a call of the metadata server.
            command = f"connected_worker={worker}\n{script}"
            code, out, err = connection.run(f"sh -c {shlex.quote(command)}", timeout=timeout, stdin=stdin)
        except TimeoutError:
            _close(connection)
            return HostResult(worker, None, problem=f"no answer within {timeout:.0f} s", timed_out=True)
        except ConnectionFailed as error:
            _close(connection)
            return HostResult(worker, None, problem=str(error), refused=error.refused)
        return HostResult(worker, code, out, err)

    def follow(self, worker: int, script: str, *, timeout: float, on_line: Callable[[str], None]) -> HostResult:
        """Runs a script on a host, once, and passes each line of its output to `on_line` as it comes; its standard
        input ends with the connection. Returns a result without output. Failures and `timeout` are as for `run`."""
        connection: HostConnection | None = None
        try:
            connection = self._connect(worker)
            code = connection.follow(f"sh -c {shlex.quote(script)}", timeout=timeout, on_line=on_line)
        except TimeoutError:
            _close(connection)
            return HostResult(worker, None, problem=f"no end within {timeout:.0f} s", timed_out=True)
        except ConnectionFailed as error:
            _close(connection)
            return HostResult(worker, None, problem=str(error), refused=error.refused and connection is None)
        return HostResult(worker, code)

    def run_all(
        self, script: str, *, timeout: float, workers: Sequence[int] | None = None, stdin: str | None = None
    ) -> list[HostResult]:
        """Runs a script, as `run` does, on all hosts or on `workers` at once. Returns the results in worker order."""
        chosen = self.workers if workers is None else sorted(workers)
        return self._machine.threads.map(
            lambda worker: self.run(worker, script, timeout=timeout, stdin=stdin), chosen, at_once=_AT_ONCE
        )

    @property
    def connected(self) -> bool:
        """Returns whether there is an open connection to every host."""
        return all(map(self._is_open, self.workers))

    def connect_all(self) -> None:
        """Opens the connections that can be opened, and raises nothing: the next command reports the others."""

        def connect(worker: int) -> None:
            with contextlib.suppress(ConnectionFailed):
                self._connect(worker)
                self._used[worker] = self._machine.clock.monotonic()

        self._machine.threads.map(connect, self.workers, at_once=_AT_ONCE)

    def close(self) -> None:
        """Closes all connections; the next command on a host opens its connection again."""
        for connection in list(self._connections.values()):
            connection.close()

    def _connect(self, worker: int) -> HostConnection:
        """Returns the host's connection, opening it if needed. Raises ConnectionFailed, also for a host that the slice
        does not have: its name may belong to a smaller slice by now."""
        if worker not in self.addresses:
            raise ConnectionFailed(f"the slice has no host {worker} now")
        with self._locks[worker]:
            if not self._is_open(worker):
                self._connections[worker] = self._machine.connect(self.addresses[worker])
            return self._connections[worker]

    def _is_open(self, worker: int) -> bool:
        connection = self._connections.get(worker)
        return connection is not None and connection.is_open


def _close(connection: HostConnection | None) -> None:
    if connection is not None:
        connection.close()
