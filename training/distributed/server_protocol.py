"""Host 0's side of the rendezvous as a pure function of bytes and times. `rendezvous_server.py` gives it sockets, a
thread and a clock.

A connection is a number that the caller chooses. Every event (opened, received, closed, time passes) is a method that
returns actions, in order: (connection, bytes to send), or (connection, None) to close it; the caller does not report a
close that it was told to do. Bad bytes cost at most the connection that sent them.

All hosts receive one summary of all phases, at most once a second, so what a host sends and receives does not grow with
the number of hosts.
"""

from collections.abc import Callable, Iterable

from training.distributed import messages
from training.distributed.barrier_state import BarrierState, Outgoing, name_hosts
from training.distributed.handshake import (
    SPARE_CONNECTIONS,
    HostCredentials,
    ServerHandshake,
    VerifiedHello,
    make_nonce,
)
from training.distributed.messages import FROM_HOST, LineBuffer, Malformed, Message, decode, encode

NEWS_SECONDS = 1.0
NEWS_CHARACTERS = 2000

Actions = list[tuple[int, bytes | None]]


class ServerProtocol:
    """Host 0's side of all connections of an attempt."""

    def __init__(self, own: HostCredentials, make_nonce: Callable[[], str] = make_nonce) -> None:
        self.state = BarrierState(own.identity)
        self.handshake = ServerHandshake(own, make_nonce)
        self._workers: dict[int, tuple[int, LineBuffer]] = {}  # by connection, of accepted peers
        self._connections: dict[int, int] = {}  # by worker
        self._news: Message = {}
        self._next_news = 0.0

    @property
    def workers(self) -> list[int]:
        """Returns the connected hosts."""
        return list(self._connections)

    @property
    def connections(self) -> int:
        """Returns the number of open connections, accepted and pending."""
        return len(self._workers) + len(self.handshake)

    def opened(self, connection: int, now: float) -> Actions:
        """Begins the handshake on a new connection, and closes pending ones that are too old or too many."""
        challenge = self.handshake.opened(connection, now)
        return [*self._close_overdue(now), (connection, challenge)]

    def received(self, connection: int, data: bytes, now: float) -> Actions:
        """Returns the actions for bytes of a handshake or of messages. Drops the connection if they are malformed."""
        actions: Actions = []
        try:
            if connection in self.handshake:
                hello = self.handshake.received(connection, data)
                return self._admit(connection, hello, now) if hello else []
            if connection in self._workers:  # it may be closed by now
                worker, lines = self._workers[connection]
                for line in lines.feed(data):
                    actions += self._handle(worker, *decode(line, FROM_HOST), now)
            return actions
        except Malformed:
            return [*actions, *self.drop(connection)]

    def drop(self, connection: int) -> Actions:
        """Closes a connection. If it is a host's that had not said goodbye, the attempt ends for all."""
        return [(connection, None), *self.closed(connection)]

    def closed(self, connection: int) -> Actions:
        """Forgets a broken connection. If its host had not said goodbye, the attempt ends for all."""
        self.handshake.forget(connection)
        worker, _ = self._workers.pop(connection, (None, None))
        if worker is None or self._connections.get(worker) != connection:
            return []
        del self._connections[worker]
        return self._address(self.state.disconnect(worker))

    def tick(self, now: float) -> Actions:
        """Ends the attempt if a barrier's deadline has passed, closes pending connections that are too old or too many,
        and sends changed phases to all hosts."""
        actions = self._close_overdue(now) + self._address(self.state.check_deadlines(now))
        if now < self._next_news:
            return actions
        self._next_news = now + NEWS_SECONDS
        phases = self.state.phases()
        news = {"news": summarize(phases)[:NEWS_CHARACTERS], "host_0": phases[0]}
        if news != self._news:
            self._news = news
            data = encode(news)
            actions += [(connection, data) for connection in self._workers]
        return actions

    def _close_overdue(self, now: float) -> Actions:
        """Closes pending connections that are too old or too many."""
        limit = self.state.identity.hosts - len(self._workers) + SPARE_CONNECTIONS
        actions: Actions = []
        for connection in self.handshake.overdue(now, limit):
            actions += self.drop(connection)
        return actions

    def _admit(self, connection: int, hello: VerifiedHello, now: float) -> Actions:
        """Ends a handshake: accepts the host, and tells it if the attempt is lost, or refuses it and closes."""
        refusal = self.state.connect(hello.worker, hello.identity, now)
        self.handshake.forget(connection)
        if refusal:
            reason = messages.clip(refusal.reason)
            return [(connection, self.handshake.refuse(hello, reason, refusal.final)), (connection, None)]
        self._workers[connection] = (hello.worker, LineBuffer(messages.HOST_BYTES))
        self._connections[hello.worker] = connection
        late = [(hello.worker, self.state.lost_message())] if self.state.lost else []
        return [(connection, self.handshake.welcome(hello)), *self._address(late)]

    def _handle(self, worker: int, kind: str, message: Message, now: float) -> Actions:
        """Records a host's phase, arrival at a barrier or goodbye, and returns the actions that follow."""
        if kind == "phase":
            self.state.set_phase(worker, message["phase"], now)
            return []
        if kind == "arrive":
            return self._address(
                self.state.arrive(worker, message["arrive"], message["payload"], message["seconds"], now)
            )
        return self._address(self.state.leave(worker, message["goodbye"], message["reason"], message["overdue"]))

    def _address(self, outgoing: Outgoing) -> Actions:
        """Encodes messages for their workers' connections, one to several hosts once; skips unconnected workers."""
        actions: Actions = []
        last: Message | None = None
        data = b""
        for worker, message in outgoing:
            if message is not last:
                last, data = message, encode(_compress(message))
            connection = self._connections.get(worker)
            if connection is not None:
                actions.append((connection, data))
        return actions


def _compress(message: Message) -> Message:
    """Returns the shorter "same" message if all payloads are equal, as most are; else the message itself."""
    payloads = message.get("payloads")
    if not payloads or any(payload != payloads[0] for payload in payloads) or len(payloads) == 1:
        return message
    return {"same": message["complete"], "payload": payloads[0]}


def summarize(phases: Iterable[str]) -> str:
    """Returns the phases of all hosts, given in worker order, as a text for the user: the rarest phase first."""
    workers: dict[str, list[int]] = {}
    for worker, phase in enumerate(phases):
        workers.setdefault(phase, []).append(worker)
    groups = sorted(workers.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{name_hosts(members)} {phase!r}" for phase, members in groups)
