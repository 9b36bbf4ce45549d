"""Named barriers with time-outs for all hosts, over their own network. No framework, no device, no object store.

`meet("checkpoint 40", payload)` returns all payloads, in worker order, when all hosts have called it; if one does not
arrive within the time-out, every host gets LostPeer, which names the missing hosts and the phase they last reported. A
server thread in host 0's process keeps the state (`server_protocol.py`); every host, also host 0, holds one TCP
connection to it for the whole run and reports its phase on it.

The kernel notices a lost host, because a long compilation could starve a heartbeat in Python: a killed process closes
its connection at once, and a vanished machine stops acknowledging keep-alive probes (`lost_seconds`). The time-outs of
the barriers catch a process that hangs.

On the wire, after the handshake (`handshake.py`), are the messages of `messages.py`, one JSON object a line.

Partial failure: a server may die after it answered some hosts. Those hosts continue until their connection breaks,
moments later. So callers must tolerate that only some hosts know that a barrier completed (a checkpoint is committed by
its manifest, not by a barrier).
"""

import contextlib
import faulthandler
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from training.distributed import messages
from training.distributed.cluster import Cluster
from training.distributed.config import RendezvousSection
from training.distributed.handshake import Refusal, describe_error, host_credentials, perform_handshake
from training.distributed.messages import FROM_SERVER, LineBuffer, Malformed, Message, decode, encode
from training.distributed.rendezvous_server import RendezvousServer
from training.distributed.server_protocol import summarize
from training.distributed.shutdown import ShutdownRequest
from training.errors import Exit, LostPeer, StopRequested, TrainError
from training.machine import SYSTEM, Connection, Machine, tell

STOP_PATIENCE = 10.0  # seconds that a host at start-up waits for other hosts after it was asked to stop
GRACE = 1.0  # seconds in which the main thread may end by itself after a peer is lost
ANSWER_MARGIN = 10.0  # seconds beyond a barrier's time-out, because the server's message says more than the client's
PHASE_INTERVAL = 0.5  # seconds between reports of a changed phase, with up to PHASES_A_SECOND / 2 hosts
PHASES_A_SECOND = 128  # that host 0 reads in total: with 512 hosts, each host reports every 4 s
CONNECT_INTERVAL = 0.2  # seconds between attempts to connect
TRY_SECONDS = 10.0  # time-out of one attempt to connect for the gradient exchange
# A framework that blocks with the interpreter's lock held stops the thread of `limit` too: then faulthandler, which
# needs no lock, prints the stack traces and ends the process with code 1, this many seconds later.
WITHOUT_LOCK_SECONDS = 30.0


class Rendezvous:
    """Barriers of all hosts of an attempt. The methods do here what a single host needs, most of them nothing."""

    _machine: Machine | None = None  # whose process `limit` ends

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        """Waits for all hosts at barrier `name`. Returns their payloads (JSON values) in worker order. Raises LostPeer
        if a host is lost or does not arrive within `seconds` (None: the default of `join`), StopRequested if another
        host's stop ended the attempt or this host is to stop before any training."""
        return [payload]

    def set_phase(self, name: str) -> None:
        """Reports to host 0 what this host is doing, from a thread: does not wait."""

    def set_background_phase(self, name: str) -> None:
        """Reports what a background thread is doing, beside the phase; "" when it is done. Does not wait."""

    def check(self) -> None:
        """Raises LostPeer if another host is lost, StopRequested if its stop or this host's ends the attempt."""

    def phases(self) -> str:
        """Returns the last known phase of each host in one line, for messages; "" for a single host."""
        return ""

    def connect_hosts(self, seconds: float) -> list[Connection]:
        """Connects all hosts for a gradient exchange; every host must call it. Returns on host 0 the connections to the
        others, by worker, on others that to host 0, all with time-out `seconds`, which also limits the wait. Raises
        OSError or LostPeer if a host did not connect, LostPeer or StopRequested as `check`, TrainError for a refusal
        by host 0 of another attempt."""
        return []

    @contextlib.contextmanager
    def limit(self, what: str, seconds: float) -> Iterator[None]:
        """Ends this process with exit code FAILED if the block takes longer than `seconds`, as a framework may wait
        forever for a device or a host: prints the stack traces of all threads and a message that names `what`, for
        example "opening the devices", and tells the other hosts. Without effect in a notebook."""
        machine = self._machine
        if machine is None:
            yield
            return
        left = machine.threads.event()

        def watch() -> None:
            """Waits for the end of the block, at most `seconds`, or else ends the process. Runs in a thread."""
            if left.wait(seconds):
                return
            hosts = f" (hosts: {phases})" if (phases := self.phases()) else ""
            message = (
                f"{what} took longer than {seconds:g} s{hosts}, so this attempt ends: a host or a link of the slice "
                "does not answer, or another process holds the TPU; `tpu-launch doctor --devices` tries every host in "
                "seconds. If it finds nothing, recreate the slice (`tpu-launch down`, `up`), or raise "
                "rendezvous.start_seconds"
            )
            if machine is SYSTEM:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            tell(f"error: {message}")
            self.close(int(Exit.FAILED), message)
            machine.exit(int(Exit.FAILED))

        if machine is SYSTEM:
            faulthandler.dump_traceback_later(seconds + WITHOUT_LOCK_SECONDS, exit=True, file=sys.__stderr__ or 2)
        watcher = machine.threads.start(watch, name="time-limit")
        try:
            yield
        finally:
            left.set()
            if machine is SYSTEM:
                faulthandler.cancel_dump_traceback_later()
            watcher.join()

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        """Reports that this host exits with `code`, and closes the connection. A failure ends the other hosts too; so
        does an orderly exit with `overdue`: this host could not save before its stop's deadline."""


class SingleHost(Rendezvous):
    """The rendezvous of a single host."""

    def __init__(self, machine: Machine | None = None) -> None:
        """`machine`: whose process `limit` ends; None in a notebook, whose process is the user's."""
        self._machine = machine


def join(
    cluster: Cluster, shutdown: ShutdownRequest, limits: RendezvousSection, machine: Machine = SYSTEM
) -> Rendezvous:
    """Starts the server on host 0 and connects to it, retrying for `limits.start_seconds`; a single host needs neither.
    Does not wait for hosts other than host 0.

    Raises:
        BadInput: The hosts have no shared secret.
        LostPeer: Host 0 did not accept this host in time.
        TrainError: Host 0 refused this host for good, or this is host 0 and it can't listen.
        StopRequested: This host was asked to stop, and then waited STOP_PATIENCE.
    """
    if cluster.hosts == 1:
        return SingleHost(machine)
    server = RendezvousServer(cluster, limits.lost_seconds, machine) if cluster.is_first else None
    check = _limit_patience(shutdown, machine.clock.monotonic, "host 0")
    try:
        connection, lines = _connect(cluster, limits.start_seconds, check, machine, limits.lost_seconds)
        connection.settimeout(None)  # the kernel's limit applies, also to a host 0 that takes no bytes
    except BaseException:
        if server:
            server.close(0)
        raise
    return RendezvousClient(cluster, server, shutdown, connection, lines, seconds=limits.seconds, machine=machine)


class RendezvousClient(Rendezvous):
    """The rendezvous of a host among several."""

    def __init__(
        self,
        cluster: Cluster,
        server: RendezvousServer | None,
        shutdown: ShutdownRequest,
        connection: Connection,
        lines: LineBuffer,
        *,
        seconds: float,
        machine: Machine = SYSTEM,
    ) -> None:
        """Takes over a connection that host 0 has accepted, and starts two threads that read it and report phases.
        `lines` holds the bytes received after the handshake; `server` is this process's, closed with the client (None
        except on host 0); `seconds` is the default time-out of a barrier."""
        self._cluster = cluster
        self._server = server
        self._shutdown = shutdown
        self._socket = connection
        self._seconds = seconds
        self._machine: Machine = machine
        self._clock = machine.clock.monotonic
        self._changed = machine.threads.condition()
        self._sending = machine.threads.lock()
        self._answers: dict[str, list[Any]] = {}
        self._lost: str | None = None
        self._lost_code = int(Exit.LOST_PEER)
        self._closing = machine.threads.event()
        self._main_phase, self._background_phase = "connected", ""
        self._phase_changed = machine.threads.event()
        self._news, self._phase_of_host_0 = "", "unknown"
        machine.threads.start(self._listen, lines, name="rendezvous-listener")
        machine.threads.start(self._report_phases, name="rendezvous-phase")

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        """As `Rendezvous.meet`; `seconds` None: those of the constructor. Waits ANSWER_MARGIN more for host 0's
        answer."""
        wait = self._seconds if seconds is None else seconds
        self._post({"phase": self._phase}, {"arrive": name, "payload": payload, "seconds": wait})
        deadline = self._clock() + wait + ANSWER_MARGIN
        check_patience = _limit_patience(self._shutdown, self._clock, f"the other hosts at {name!r}")
        with self._changed:
            while name not in self._answers:
                self._raise_if_lost()
                self._changed.wait(timeout=0.5)
                check_patience()
                if self._clock() >= deadline:
                    raise LostPeer(
                        f"rendezvous {name!r}: host 0 did not answer within {wait + ANSWER_MARGIN:g} s; last known "
                        f"phases: {self.phases()}"
                    )
            return self._answers.pop(name)

    def set_phase(self, name: str) -> None:
        """As `Rendezvous.set_phase`: a thread reports it, with the background phase."""
        self._main_phase = name
        self._phase_changed.set()

    def set_background_phase(self, name: str) -> None:
        """As `Rendezvous.set_background_phase`: a thread reports it, after the phase; "" when it is done."""
        self._background_phase = name
        self._phase_changed.set()

    @property
    def _phase(self) -> str:
        """Returns the main phase and, if there is one, the background phase."""
        phase = f"{self._main_phase}, {self._background_phase}" if self._background_phase else self._main_phase
        return messages.clip(phase)

    def check(self) -> None:
        """Raises LostPeer or StopRequested if the attempt is over; does not wait."""
        if self._lost:
            with self._changed:
                self._raise_if_lost()

    def connect_hosts(self, seconds: float) -> list[Connection]:
        """As `Rendezvous.connect_hosts`; host 0 takes the connections that its server has accepted."""
        if self._server:
            return self._server.take_exchange(seconds)
        connection, _ = _connect(self._cluster, seconds, self.check, self._machine)
        connection.settimeout(seconds)
        return [connection]

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        """Sends host 0 a goodbye with `code` and the first line of `reason`, and closes the connection; nothing the
        second time. On host 0, closes the server first, which waits until the other hosts have left: at most 5 s after
        an orderly exit (FINISHED, SAVED), otherwise 1 s."""
        if self._closing.is_set():
            return
        why = messages.clip(reason.splitlines()[0]) if reason else ""
        self._post({"phase": self._phase}, {"goodbye": int(code), "reason": why, "overdue": overdue})
        self._closing.set()
        self._phase_changed.set()
        if self._server:
            self._server.close(5 if code in (Exit.FINISHED, Exit.SAVED) else 1)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _raise_if_lost(self) -> None:  # with `_changed` held
        """Does nothing while the attempt goes on. Else raises StopRequested, if a stop ended it or was requested before
        any training, or LostPeer."""
        if self._lost and self._shutdown.may_exit_now:
            raise StopRequested(f"asked to stop before training began ({self._lost}); nothing is lost")
        if self._lost:
            raise StopRequested(self._lost) if self._lost_code == Exit.SAVED else LostPeer(self._lost)

    def phases(self) -> str:
        """Returns the phases from the server on host 0, from its last news on other hosts; "none" before any."""
        return (summarize(self._server.phases()) if self._server else self._news) or "none"

    def _post(self, *posts: Message) -> None:
        """Sends messages to host 0. On failure, shuts down the connection, whose end the listening thread reports."""
        data = b"".join(map(encode, posts))
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:  # nothing may follow half a message: the listener notices the end, and reports it
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _report_phases(self) -> None:
        """Tells host 0 the phase each time that it was set, at a bounded rate, until closed. Runs in a thread."""
        while not self._closing.wait(max(PHASE_INTERVAL, self._cluster.hosts / PHASES_A_SECOND)):
            self._phase_changed.wait()
            self._phase_changed.clear()
            if self._closing.is_set():
                return
            self._post({"phase": self._phase})  # even if it is back to the last one: `meet` reports phases too

    def _listen(self, lines: LineBuffer) -> None:
        """Reads and records messages from host 0 until the connection ends or one is malformed; then records that the
        attempt is lost, unless this client has closed it. Runs in a thread."""
        lines.limit = messages.SERVER_BYTES
        data = b""  # the bytes after the handshake are in `lines`
        try:
            while True:
                for line in lines.feed(data):
                    self._handle(*decode(line, FROM_SERVER))
                if not (data := self._socket.recv(1 << 16)):
                    raise ConnectionResetError
        except OSError:
            gone = f"host 0 is gone: its connection broke in phase {self._phase_of_host_0!r}"
        except Malformed as error:
            gone = f"host 0 sent a malformed message: {error}"
        except Exception as error:  # without this thread, the host would wait forever
            gone = f"the connection to host 0 can't be read: {describe_error(error)}"
        if self._cluster.is_first:
            gone = "this host, host 0, has lost its network"
        self._handle("lost", {"lost": gone, "code": int(Exit.LOST_PEER)})

    def _handle(self, kind: str, message: Message) -> None:
        """Records a message from host 0 and wakes waiters; after "lost", a thread ends the process if it is stuck."""
        with self._changed:
            if kind == "complete":
                self._answers[message["complete"]] = message["payloads"]
            elif kind == "news":
                self._news, self._phase_of_host_0 = message["news"], message["host_0"]
            elif self._lost is None and not self._closing.is_set():
                self._lost, self._lost_code = message["lost"], message["code"]
                self._machine.threads.start(self._end_if_stuck, self._lost, self._lost_code, name="rendezvous-lost")
            self._changed.notify_all()

    def _end_if_stuck(self, message: str, code: int) -> None:
        """Waits GRACE, 1 s, for `close`; without it, prints `message` and ends the process with `code`: the main thread
        may be stuck in a collective that never returns."""
        if not self._closing.wait(GRACE):
            tell(f"{'stopped' if code == Exit.SAVED else 'lost peer'}: {message}")
            self._machine.exit(code)


def _limit_patience(shutdown: ShutdownRequest, clock: Callable[[], float], awaited: str) -> Callable[[], None]:
    """Returns a function to call often while this host waits for what `awaited` names: it raises StopRequested once a
    stop with nothing to save was requested STOP_PATIENCE ago; the time counts from the last call that saw none."""
    end = clock() + STOP_PATIENCE

    def check() -> None:
        """Raises StopRequested if the patience has ended; else moves its end if no stop is requested."""
        nonlocal end
        if not shutdown.may_exit_now:
            end = clock() + STOP_PATIENCE
        if clock() >= end:
            raise StopRequested(f"asked to stop while waiting for {awaited}, before any training: nothing is lost")

    return check


def _connect(
    cluster: Cluster, seconds: float, check: Callable[[], None], machine: Machine, lost_seconds: float | None = None
) -> tuple[Connection, LineBuffer]:
    """Retries until host 0 accepts this host, and calls `check`, which may raise, before each attempt. Returns the
    connection, and the bytes received after the handshake. A connection for the rendezvous breaks after `lost_seconds`
    of silence; without them, it is for the gradient exchange, and breaks when TCP gives up. Raises LostPeer after
    `seconds`, TrainError for a final refusal, BadInput without the secret that hosts need unless all are loopback."""
    own = host_credentials(cluster, exchange=lost_seconds is None)
    host = f"host 0 ({cluster.addresses[0]}:{cluster.rendezvous_port})"
    try_seconds = min(TRY_SECONDS if lost_seconds is None else lost_seconds, seconds)
    deadline = machine.clock.monotonic() + seconds
    why = "no answer"
    while machine.clock.monotonic() < deadline:
        check()
        with contextlib.ExitStack() as closing:
            try:
                connection = machine.network.connect(cluster.addresses[0], cluster.rendezvous_port, try_seconds)
                closing.callback(connection.close)
                if lost_seconds is not None:
                    machine.network.detect_silence(connection, lost_seconds)
                answer = perform_handshake(connection, own, cluster.worker, try_seconds, machine)
                if not isinstance(answer, Refusal):
                    closing.pop_all()
                    return connection, answer
                why = f"refused: {answer.reason}"
                if answer.final:
                    raise TrainError(f"{host} refused this host (worker {cluster.worker}): {answer.reason}")
            except (OSError, Malformed) as error:
                why = describe_error(error)
        machine.clock.sleep(CONNECT_INTERVAL)
    raise LostPeer(f"{host} did not accept this host (worker {cluster.worker}) within {seconds:g} s: {why}")
