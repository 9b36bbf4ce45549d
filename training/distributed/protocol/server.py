"""What host 0 does with the bytes of its connections: pure. `training.distributed.rendezvous_server` gives it sockets,
a thread and a clock.

A connection is a number that the caller chooses. Every event (opened, received, closed, time passes) is a method that
returns what to do, in order: (connection, bytes to send) or (connection, None) to close it; the caller does not report
a closing that it was told to do. Whatever a connection sends, it costs at most that connection.

News (what the hosts are doing) go to all hosts as one summary, at most once a second: what every host sends and
receives does not grow with the number of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from training.distributed.barrier_state import BarrierState, Outgoing, name_hosts
from training.distributed.protocol import messages
from training.distributed.protocol.greeting import SPARE_CONNECTIONS, Credentials, Doorkeeper, Greeting, make_nonce
from training.distributed.protocol.messages import FROM_HOST, LineBuffer, Malformed, Message, decode, encode

NEWS_SECONDS = 1.0
NEWS_CHARACTERS = 2000

Actions = list[tuple[int, bytes | None]]


class ServerProtocol:
    """Host 0's side of all connections of an attempt."""

    def __init__(self, own: Credentials, make_nonce: Callable[[], str] = make_nonce) -> None:
        self.state = BarrierState(own.identity)
        self._doorkeeper = Doorkeeper(own, make_nonce)
        self._workers: dict[int, tuple[int, LineBuffer]] = {}  # of the connections that were let in
        self._connections: dict[int, int] = {}  # by worker
        self._news: Message = {}
        self._next_news = 0.0

    @property
    def workers(self) -> list[int]:
        """The hosts that are connected."""
        return list(self._connections)

    @property
    def connections(self) -> int:
        """How many connections are open, of hosts and of strangers."""
        return len(self._workers) + len(self._doorkeeper)

    def oldest_stranger(self) -> int | None:
        """The connection that has longest not proved who it is."""
        return self._doorkeeper.oldest()

    def opened(self, connection: int, now: float) -> Actions:
        """Somebody connected."""
        challenge = self._doorkeeper.opened(connection, now)
        return [*self._close_unwanted(now), (connection, challenge)]

    def received(self, connection: int, data: bytes, now: float) -> Actions:
        """A connection sent something."""
        actions: Actions = []
        try:
            if connection in self._doorkeeper:
                greeting = self._doorkeeper.received(connection, data)
                return self._admit(connection, greeting, now) if greeting else []
            if connection in self._workers:  # or it was closed meanwhile
                worker, lines = self._workers[connection]
                for line in lines.feed(data):
                    actions += self._handle(worker, *decode(line, FROM_HOST), now)
            return actions
        except Malformed:
            return [*actions, *self.drop(connection)]

    def drop(self, connection: int) -> Actions:
        """Closes a connection; what the others are told of it."""
        return [(connection, None), *self.closed(connection)]

    def closed(self, connection: int) -> Actions:
        """A connection broke."""
        self._doorkeeper.forget(connection)
        worker, _ = self._workers.pop(connection, (None, None))
        if worker is None or self._connections.get(worker) != connection:
            return []
        del self._connections[worker]
        return self._address(self.state.disconnect(worker))

    def tick(self, now: float) -> Actions:
        """Time has passed: deadlines of barriers and of greetings, and news."""
        actions = self._close_unwanted(now) + self._address(self.state.check_deadlines(now))
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

    def _close_unwanted(self, now: float) -> Actions:
        limit = self.state.identity.hosts - len(self._workers) + SPARE_CONNECTIONS
        actions: Actions = []
        for connection in self._doorkeeper.unwanted(now, limit):
            actions += self.drop(connection)
        return actions

    def _admit(self, connection: int, greeting: Greeting, now: float) -> Actions:
        refusal = self.state.connect(greeting.worker, greeting.identity, now)
        self._doorkeeper.forget(connection)
        if refusal:
            reason = messages.clip(refusal.reason)
            return [(connection, self._doorkeeper.refuse(greeting, reason, refusal.final)), (connection, None)]
        self._workers[connection] = (greeting.worker, LineBuffer(messages.HOST_BYTES))
        self._connections[greeting.worker] = connection
        return [(connection, self._doorkeeper.welcome(greeting))]

    def _handle(self, worker: int, kind: str, message: Message, now: float) -> Actions:
        if kind == "phase":
            self.state.set_phase(worker, message["phase"], now)
            return []
        if kind == "arrive":
            return self._address(
                self.state.arrive(worker, message["arrive"], message["payload"], message["seconds"], now)
            )
        return self._address(self.state.leave(worker, message["goodbye"], message["reason"], message["overdue"]))

    def _address(self, outgoing: Outgoing) -> Actions:
        """The bytes of messages. One message to all hosts is encoded once, and its bytes are shared."""
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
    """Payloads that are all the same, as most are, are sent once."""
    payloads = message.get("payloads")
    if not payloads or any(payload != payloads[0] for payload in payloads) or len(payloads) == 1:
        return message
    return {"same": message["complete"], "payload": payloads[0]}


def summarize(phases: Iterable[str]) -> str:
    """What the hosts are doing, in worker order, for a person: the rarest phase first."""
    workers: dict[str, list[int]] = {}
    for worker, phase in enumerate(phases):
        workers.setdefault(phase, []).append(worker)
    groups = sorted(workers.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{name_hosts(members)} {phase!r}" for phase, members in groups)
