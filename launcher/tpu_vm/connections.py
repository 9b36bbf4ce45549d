"""Connections to the hosts of one slice, shared by all threads: finds the hosts' addresses, runs commands over
connections that stay open, and through gcloud where those can't be opened.

`.tpu-launch/slices/<project>.<name>.hosts.json` holds the last addresses of a READY slice, which saves a command two
gcloud calls. It is a hint: host keys are checked in any case. When hosts do not answer there, gcloud is asked once for
their current addresses, for which only threads that need them wait; when the slice was recreated, the hint is dropped.
A file that is cut short, or of another zone, type or network path, counts as missing.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import home
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud import call_gcloud, summarize_error
from launcher.provider import SliceState
from launcher.tpu_vm import commands, slice_hints, slices
from launcher.workstation import Address, ConnectionFailed, HostConnection, Workstation
from training.machine import Future

_STALE_SECONDS = 10.0  # without a command, after which a connection may be dead
_AT_ONCE = 64  # hosts
_GCLOUD_SECONDS = 40.0  # for one call, beside the time of the script that it runs
_GCLOUD_CALLS = 16  # at once
_ASK_AGAIN_SECONDS = 5.0  # from a failure of gcloud, whose calls cost a second of a core, until it is asked again


@dataclass(frozen=True)
class KnownSlice:
    """A slice when it was last seen READY."""

    created: str  # creation time: distinguishes it from a later slice of the same name
    internal: tuple[str, ...]  # the addresses by which hosts reach each other, in worker order
    addresses: tuple[Address, ...]


def parse_dry_run(text: str) -> list[Address]:
    """Returns the addresses in the output of `gcloud compute tpus tpu-vm ssh --worker=all --dry-run`, in its order: a
    line a host; [] for none. Ignores lines without a key file (` -i `). Raises LaunchError for an unknown format."""
    addresses: list[Address] = []
    for line in text.splitlines():
        if " -i " not in line:
            continue
        words = shlex.split(line.split(" -- ")[0])
        options = dict(
            word.split("=", 1) for before, word in itertools.pairwise(words) if before == "-o" and "=" in word
        )
        target = next((word for word in reversed(words) if "@" in word), None)
        if target is None or "HostKeyAlias" not in options:
            raise LaunchError(f"gcloud's dry run is not as expected, is this a new SDK? It printed: {line}")
        user, host = target.rsplit("@", 1)
        key_file, alias = words[words.index("-i") + 1], options["HostKeyAlias"]
        match = re.search(r"-(\d+)(?:-[^-]{6})?$", alias)
        worker = int(match.group(1)) if match else len(addresses)
        addresses.append(Address(worker, host, user, key_file, options.get("UserKnownHostsFile", ""), alias))
    return addresses


def load_addresses(config: Config) -> KnownSlice | None:
    """Reads the kept addresses of the slice; None if there are none for this configuration, or they are damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_addresses_file(config).read_text())
        if content["of"] == _fingerprint(config):
            addresses = tuple(Address(**address) for address in content["addresses"])
            known = KnownSlice(content["created"], tuple(content["internal"]), addresses)
            if len(known.internal) == len(known.addresses) == config.accelerator.hosts:
                return known
    return None


def save_addresses(config: Config, known: KnownSlice) -> None:
    """Writes the addresses to a local file for later commands. Ignores a full disk: later commands ask gcloud then."""
    with contextlib.suppress(OSError):
        home.write_private(_addresses_file(config), json.dumps({"of": _fingerprint(config), **asdict(known)}))


def forget_addresses(config: Config) -> None:
    """Deletes the local file of the slice's kept addresses."""
    _addresses_file(config).unlink(missing_ok=True)


def _fingerprint(config: Config) -> str:
    """Returns a hash of what the addresses depend on: the API, the candidate, $HOME (keys), and internal_ips."""
    parts = [
        os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", ""),
        os.environ.get("HOME", ""),
        asdict(slice_hints.current(config)),
        config.slice.internal_ips,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _addresses_file(config: Config) -> Path:
    return home.of_slice(config.project, config.slice.name, "hosts.json")


@dataclass(frozen=True)
class HostResult:
    """The output of a command on a host, or why it could not be run (`problem`)."""

    worker: int
    returncode: int | None  # None when the host was not reached
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    refused: bool = False  # the host answers but refuses us (keys, host keys, a proxy): gcloud may get through
    timed_out: bool = False  # the command started and did not end in time

    @property
    def reached(self) -> bool:
        """Returns whether the command ran to its end, with any exit code (through gcloud: with 0)."""
        return self.returncode is not None


class ConnectionPool:
    """Open connections to the hosts of one slice. Threads may use the same or different hosts at once."""

    def __init__(self, addresses: Sequence[Address], machine: Workstation, *, kept: bool = False) -> None:
        """`kept`: the addresses are an earlier command's, which gcloud has not confirmed since."""
        self.addresses, self.kept = {address.worker: address for address in addresses}, kept
        self._machine, self._closed = machine, False
        self._connections: dict[int, HostConnection] = {}
        self._used: dict[int, float] = {}  # time of the last command, by worker
        self._locks = {worker: machine.threads.lock() for worker in self.addresses}

    def run(self, worker: int, script: str, *, timeout: float, stdin: str | None = None) -> HostResult:
        """Runs a script (text for `sh -c` that is safe to run twice) on a host, again if a connection that was idle for
        10 s proves dead. Raises nothing: the result has failures of the network or the host, and time-outs. `timeout`:
        seconds of each try. `stdin`: the script's input; None: empty."""
        script = f"connected_worker={worker}\n{script}"  # saves report.sh a call of the metadata server

        def run(connection: HostConnection) -> HostResult:
            return HostResult(worker, *connection.run(f"sh -c {shlex.quote(script)}", timeout=timeout, stdin=stdin))

        idle = self._machine.clock.monotonic() - self._used.get(worker, 0.0)
        may_be_dead = self._is_open(worker) and idle > _STALE_SECONDS
        result = self._try(worker, run, f"no answer within {timeout:.0f} s")
        if may_be_dead and not result.reached and not result.timed_out:
            result = self._try(worker, run, f"no answer within {timeout:.0f} s")
        self._used[worker] = self._machine.clock.monotonic()
        return result

    def follow(self, worker: int, script: str, *, timeout: float, on_line: Callable[[str], None]) -> HostResult:
        """Runs a script on a host, once, and passes each line of its output to `on_line` as it comes; its standard
        input ends with the connection. Returns a result without output, `refused` only if nothing can have run.
        Failures and `timeout` are as for `run`."""

        def follow(connection: HostConnection) -> HostResult:
            code = connection.follow(f"sh -c {shlex.quote(script)}", timeout=timeout, on_line=on_line)
            return HostResult(worker, code)

        return self._try(worker, follow, f"no end within {timeout:.0f} s")

    def _try(self, worker: int, command: Callable[[HostConnection], HostResult], late: str) -> HostResult:
        """Runs a command once over a host's connection, which it opens if needed and closes after a failure. A result
        is `refused` only if the command can't have begun. `late`: the problem when it does not end in time."""
        connection: HostConnection | None = None
        try:
            connection = self._connect(worker)
            return command(connection)
        except TimeoutError:
            failed = HostResult(worker, None, problem=late, timed_out=True)
        except ConnectionFailed as error:
            failed = HostResult(worker, None, problem=str(error), refused=error.refused and connection is None)
        if connection is not None:
            connection.close()
        return failed

    def run_all(
        self, script: str, workers: Sequence[int], *, timeout: float, stdin: str | None = None
    ) -> list[HostResult]:
        """Runs a script, as `run` does, on `workers` at once. Returns the results in worker order."""
        return self._machine.threads.map(
            lambda worker: self.run(worker, script, timeout=timeout, stdin=stdin), sorted(workers), at_once=_AT_ONCE
        )

    def connect_all(self) -> bool:
        """Opens the connections that can be opened, and raises nothing: the next command reports the others. Returns
        whether there is an open connection to every host."""

        def connect(worker: int) -> None:
            with contextlib.suppress(ConnectionFailed):
                self._connect(worker)
                self._used[worker] = self._machine.clock.monotonic()

        self._machine.threads.map(connect, sorted(self.addresses), at_once=_AT_ONCE)
        return all(map(self._is_open, self.addresses))

    def close(self) -> None:
        """Closes all connections, and those that are being opened. Commands that run meanwhile, or later, fail."""
        self._closed = True
        for connection in list(self._connections.values()):
            connection.close()

    def _connect(self, worker: int) -> HostConnection:
        """Returns the host's connection, opening it if needed. Raises ConnectionFailed, also for a host that the slice
        does not have: its name may belong to a smaller slice by now."""
        if worker not in self.addresses:
            raise ConnectionFailed(f"the slice has no host {worker} now")
        with self._locks[worker]:
            if not self._closed and not self._is_open(worker):
                opened = self._connections[worker] = self._machine.connect(self.addresses[worker])
                if self._closed:  # while it was opened
                    opened.close()
            if self._closed:
                raise ConnectionFailed("the connections to the slice were closed")
            return self._connections[worker]

    def _is_open(self, worker: int) -> bool:
        connection = self._connections.get(worker)
        return connection is not None and connection.is_open


class SliceConnections:
    """The hosts of the slice that a configuration describes. Threads may run commands at once."""

    def __init__(self, config: Config, machine: Workstation) -> None:
        self._wanted = config
        self._machine = machine
        self.gcloud_only = config.run.transport == "gcloud" or config.slice.iap
        self._lock = machine.threads.lock()  # of the five that follow
        self._state: SliceState | None = None  # as last described
        self._created = ""  # when the slice that was last described was created
        self._known = None if self.gcloud_only else load_addresses(config)
        self._pool: ConnectionPool | None = None
        self._unlisted: tuple[float, LaunchError] | None = None  # when gcloud gave no addresses last, and why
        self._listing = machine.threads.lock()  # one thread finds the addresses, others wait for it
        self._replacing = machine.threads.lock()  # one thread asks for other ones, as above
        self._located = slice_hints.last_seen(config) is not None  # or described since
        self._connecting: Future[bool] | None = None

    @property
    def config(self) -> Config:
        """Returns the configuration of the candidate as which the slice was last seen, else of the first one."""
        return slice_hints.in_current_place(self._wanted)

    # -- the slice ----------------------------------------------------------------------------------------------------

    @property
    def has_known_slice(self) -> bool:
        """Returns whether addresses kept by an earlier command are not contradicted yet; False with `gcloud_only`."""
        with self._lock:
            return self._known is not None

    def note_state(self, state: SliceState | None) -> None:
        """Keeps the API's description (None: no slice). If it contradicts kept addresses (None does; else creation time
        or internal addresses), or an earlier description's creation time, forgets them (`forget`)."""
        with self._lock:
            self._state, known, self._located, self._unlisted = state, self._known, True, None
            another = state is not None and self._created not in ("", state.created)
            self._created = self._created if state is None else state.created
        if known is not None:
            another |= state is None or (state.created, state.hosts) != (known.created, known.internal)
        if another:
            self.forget()

    def identity(self) -> tuple[str, tuple[str, ...]]:
        """Returns when the slice was created, and the hosts' addresses for each other in worker order; "" and () if an
        earlier command left no knowledge and the slice must be described first."""
        with self._lock:
            if self._state is not None:
                return self._state.created, self._state.hosts
            return (self._known.created, self._known.internal) if self._known is not None else ("", ())

    def forget(self) -> None:
        """Drops the kept addresses, on disk too, and closes the connections."""
        with self._lock:
            pool, self._pool, self._known = self._pool, None, None
        forget_addresses(self.config)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """Waits for connections that are being opened, and closes all; the next command opens new ones."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            with contextlib.suppress(LaunchError):
                connecting.result()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    # -- commands -----------------------------------------------------------------------------------------------------

    def connect_in_background(self) -> None:
        """Starts to connect to all hosts, unless `gcloud_only`; returns at once. The next command retries failures."""
        if not self.gcloud_only:
            self._connecting = self._machine.threads.submit(lambda: self.pool().connect_all())

    def pool(self) -> ConnectionPool:
        """Returns all hosts' connections, each opened by its host's first command, at kept addresses or else gcloud's.
        Raises LaunchError if gcloud fails, and the same for 5 s afterwards: there may be a caller for each host."""
        clock = self._machine.clock
        with self._listing:
            with self._lock:
                if self._pool is not None:
                    return self._pool
                known, failed = self._known, self._unlisted
            if failed is not None and clock.monotonic() < failed[0] + _ASK_AGAIN_SECONDS:
                raise failed[1]
            try:
                current = known.addresses if known is not None else self._list_addresses()
            except LaunchError as error:
                with self._lock:
                    self._unlisted = clock.monotonic(), error
                raise
            with self._lock:
                self._pool = ConnectionPool(current, self._machine, kept=known is not None)
                return self._pool

    def open_pool(self) -> ConnectionPool:
        """Returns `pool` connected to every host that answers, for commands that must not run twice. Asks gcloud for
        the addresses when a host does not answer at its kept one. Raises as `pool`."""
        pool = self.pool()
        if not pool.connect_all() and (other := self.replacement_of(pool)):
            other.connect_all()
            return other
        return pool

    def run(self, worker: int, script: str, *, timeout: float, gcloud_timeout: float) -> HostResult:
        """Runs a script (it must be safe to run again) on one host, in this thread; again if it is not reached, or
        late, and gcloud knows another address; through gcloud if `gcloud_only`, or the host refuses ssh. `timeout`:
        seconds of each try; through gcloud `gcloud_timeout` and 40 more. Raises LaunchError if gcloud gives no
        addresses."""
        if not self.gcloud_only:
            pool = self.pool()
            result = pool.run(worker, script, timeout=timeout)
            if not result.reached and (other := self.replacement_of(pool)):
                result = other.run(worker, script, timeout=timeout)
            if not result.refused:
                return result
        return self.run_through_gcloud(worker, script, timeout=gcloud_timeout)

    def run_all(
        self, script: str, workers: Sequence[int], *, timeout: float, stdin: str | None = None, again: bool = False
    ) -> list[HostResult]:
        """Runs a script (it must be safe to run again) on `workers` as `run_all_over_ssh`, with `again` once more on
        hosts that were not reached; through gcloud if `gcloud_only`, and on hosts that refuse ssh. Returns the results
        in worker order. `timeout`: seconds of each try; through gcloud 40 more. Raises LaunchError if gcloud gives no
        addresses."""
        results, left = dict[int, HostResult](), workers
        if not self.gcloud_only:
            answers = self.run_all_over_ssh(script, workers, timeout=timeout, stdin=stdin)
            missed = [result.worker for result in answers if not result.reached and not result.refused]
            if again and missed:
                answers += self.pool().run_all(script, missed, timeout=timeout, stdin=stdin)
            results = {result.worker: result for result in answers}
            left = [worker for worker, result in results.items() if result.refused]
        for result in self.run_all_through_gcloud(script, left, stdin, timeout=timeout):
            results[result.worker] = result
        return [results[worker] for worker in sorted(results)]

    def run_all_over_ssh(
        self, script: str, workers: Sequence[int], *, timeout: float, stdin: str | None = None
    ) -> list[HostResult]:
        """Runs a script (it must be safe to run again) on `workers` at once, and again on all of them if one is not
        reached, or late, and gcloud knows other addresses. Returns the results in worker order. Raises as `pool`."""
        pool = self.pool()
        results = pool.run_all(script, workers, timeout=timeout, stdin=stdin)
        if not all(result.reached for result in results) and (other := self.replacement_of(pool)):
            return other.run_all(script, workers, timeout=timeout, stdin=stdin)
        return results

    def run_through_gcloud(
        self, worker: int, script: str, stdin: str | None = None, *, timeout: float = 0.0
    ) -> HostResult:
        """Runs a script, which gcloud may repeat, on one host through gcloud, for hosts that refuse our ssh. A script
        with another exit code than 0, or a late one, whose output is lost, counts as not reached. gcloud and the
        script together have 40 s plus `timeout`. Raises LaunchError if the slice can't be described."""
        with self._listing:
            self._locate()
        command = commands.ssh_command(self.config, script, worker=str(worker))
        try:
            result = self._machine.run(command, timeout=_GCLOUD_SECONDS + timeout, input=stdin)
        except CommandTimeout as error:
            return HostResult(worker, None, problem=str(error).splitlines()[0])
        if not result.ok:
            return HostResult(worker, None, result.stdout, problem=summarize_error(result.stderr))
        return HostResult(worker, 0, result.stdout, result.stderr)

    def run_all_through_gcloud(
        self, script: str, workers: Sequence[int], stdin: str | None = None, *, timeout: float
    ) -> list[HostResult]:
        """Runs a script as `run_through_gcloud` on `workers`, several at once; returns the results in that order."""
        return self._machine.threads.map(
            lambda worker: self.run_through_gcloud(worker, script, stdin, timeout=timeout),
            workers,
            at_once=_GCLOUD_CALLS,
        )

    def replacement_of(self, pool: ConnectionPool) -> ConnectionPool | None:
        """Returns connections to use instead of a pool with hosts that do not answer: another thread's, or new ones if
        gcloud, asked once, gives other addresses than the pool's kept ones (then forgets those and closes `pool`).
        Returns None if the pool's addresses are gcloud's already, or gcloud fails."""
        with self._replacing:
            with self._lock:
                if self._pool is not pool:
                    return self._pool  # another thread has replaced it
            if not pool.kept:
                return None
            pool.kept = False
            try:
                current = self._list_addresses()
            except LaunchError:
                return None
            if current == tuple(pool.addresses.values()):
                return None
            forget_addresses(self.config)
            with self._lock:
                if self._pool is not pool:
                    return self._pool
                # Internal addresses must be read again, too: hosts are given them.
                self._known, self._state = None, None
                self._pool = replacement = ConnectionPool(current, self._machine)
            pool.close()
            return replacement

    def _list_addresses(self) -> tuple[Address, ...]:
        """Returns gcloud's addresses of the hosts; keeps them on disk if the slice was READY when this process last
        described it. Raises LaunchError."""
        self._locate()
        command = commands.ssh_command(self.config, "true", dry_run=True)
        current = tuple(parse_dry_run(call_gcloud(self._machine, command, timeout=_GCLOUD_SECONDS)))
        with self._lock:
            state = self._state
        if state is not None and state.ready:
            save_addresses(self.config, KnownSlice(state.created, state.hosts, current))
        return current

    def _locate(self) -> None:
        """Describes the slice once, unless the zone of its candidate is known here. Raises LaunchError."""
        if not self._located:
            self.note_state(slices.describe(self._wanted, self._machine))
