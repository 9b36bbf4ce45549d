"""The rendezvous without sockets: one answer for all hosts, which peers it accepts, and what bad bytes cost."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from training.distributed import handshake
from training.distributed.handshake import ClientHandshake, HostCredentials, Identity, Refusal, make_nonce
from training.distributed.messages import HANDSHAKE_BYTES, HANDSHAKE_SECONDS, HOST_BYTES, LineBuffer, Malformed, encode
from training.distributed.server_protocol import (
    SPARE_CONNECTIONS,
    Actions,
    BarrierState,
    HandOver,
    ServerProtocol,
    summarize,
)


def state_of(hosts: int, connected: int | None = None, attempt: int = 0) -> BarrierState:
    """A state of some hosts, of which all or the first few have connected."""
    state = BarrierState(Identity("run", attempt, hosts))
    for worker in range(hosts if connected is None else connected):
        assert state.connect(worker, state.identity, 0.0) is None
    return state


def test_a_repeated_arrival_counts_once_with_its_first_payload() -> None:
    state = state_of(2)
    assert state.arrive(0, "p", "first", 10, 0.0) == []
    assert state.arrive(0, "p", "second", 10, 0.0) == []
    [(_, message), _] = state.arrive(1, "p", "other", 10, 0.0)
    assert message["payloads"] == ["first", "other"]
    assert state.arrive(0, "p", "third", 10, 99.0) == [], "a barrier of the same name"


def test_the_time_out_names_missing_hosts_and_their_last_phases() -> None:
    state = state_of(3, connected=2)
    state.set_phase(1, "step 39", 5.0)
    state.arrive(0, "checkpoint 40", None, 10, 6.0)
    assert state.check_deadlines(15.9) == []
    (first, message), (second, _) = state.check_deadlines(16.0)
    assert {first, second} == {0, 1}
    missing = "host 1 was last heard of 11 s ago in phase 'step 39'; host 2 never connected"
    assert message["lost"] == f"rendezvous 'checkpoint 40': not all hosts arrived within 10 s: {missing}"


def test_later_arrivals_do_not_move_the_deadline_of_a_barrier() -> None:
    state = state_of(3)
    state.arrive(0, "p", None, 10, 0.0)
    state.arrive(1, "p", None, 60, 9.0)
    assert state.check_deadlines(9.9) == []
    assert "within 10 s: host 2" in state.check_deadlines(10.0)[0][1]["lost"]


def test_hosts_of_another_run_attempt_or_size_are_refused() -> None:
    state = state_of(2, connected=0, attempt=1)
    for other, why, final in (
        (Identity("other", 1, 2), "host 0 is in run 'run', this host in run 'other'", False),
        (Identity("run", 0, 2), "host 0 is in attempt 1 of run 'run', this host in attempt 0", True),
        (Identity("run", 2, 2), "attempt 1", False),  # host 0 of that attempt may be about to start
        (Identity("run", 1, 4), "host 0 expects 2 hosts, this host was configured for 4", True),
    ):
        refusal = state.connect(0, other, 0.0)
        assert why in refusal.reason
        assert refusal.final == final
    assert state.connect(0, state.identity, 0.0) is None
    assert "already" in str(state.connect(0, state.identity, 0.0))


def test_a_broken_connection_ends_the_attempt_for_all() -> None:
    state = state_of(3)
    state.set_phase(2, "step 7", 1.0)
    message = {"lost": "host 2 is gone: its connection broke in phase 'step 7'", "code": 76}
    assert state.disconnect(2) == [(0, message), (1, message)]
    assert state.arrive(0, "later", None, 10, 2.0) == [(0, message)]
    assert state.disconnect(2) == [], "it is told once"
    assert state.connect(2, state.identity, 3.0) is None, "a host that comes late is told why the attempt is over"
    assert "already" in str(state.connect(1, state.identity, 3.0))
    assert state.disconnect(1) == [(0, message), (2, message)], "the first reason stays"


def test_an_orderly_exit_is_no_loss() -> None:
    state = state_of(2)
    assert state.leave(1, 0, "") == []
    assert state.disconnect(1) == []
    assert state.lost is None


@pytest.mark.parametrize(
    ("code", "reason", "overdue", "others"), [(2, "no such file", False, 76), (75, "out of time", True, 75)]
)
def test_a_failure_or_an_overdue_exit_ends_the_others(code: int, reason: str, overdue: bool, others: int) -> None:
    state = state_of(2)
    message = {"lost": f"host 1 stopped in phase 'connected' with exit code {code}: {reason}", "code": others}
    assert state.leave(1, code, reason, overdue) == [(0, message)]
    assert state.arrive(0, "checkpoint 4", None, 10, 2.0) == [(0, message)]


@pytest.mark.parametrize("waits_before", [True, False])
@pytest.mark.parametrize(("code", "others"), [(0, 76), (75, 75)])
def test_no_host_waits_at_a_barrier_for_one_that_has_left(code: int, others: int, waits_before: bool) -> None:
    state = state_of(2)
    messages = state.arrive(0, "p", None, 10, 0.0) if waits_before else []
    messages += state.leave(1, code, "")
    messages += [] if waits_before else state.arrive(0, "p", None, 10, 0.0)
    [(worker, message)] = messages
    assert (worker, message["code"]) == (0, others)


def test_many_missing_hosts_are_all_named_in_a_short_message() -> None:
    """It goes to every host and into every log."""
    state = state_of(512, connected=1)
    state.arrive(0, "start", None, 10, 0.0)
    [(_, message)] = state.check_deadlines(10.0)
    assert "host 1 never connected; host 2 never connected" in message["lost"]
    assert message["lost"].endswith("; and hosts 17-511")
    assert len(message["lost"]) < 600


OWN = HostCredentials(Identity("run", 1, 3), b"the secret of the attempt")
ARRIVAL = {"arrive": "start", "payload": None, "seconds": 10}


class Meeting:
    """Host 0's side, with the bytes sent on each connection. `hosts`: the connections of those that joined first."""

    def __init__(self, own: HostCredentials = OWN, joined: int = 0) -> None:
        self.own, self.server = own, ServerProtocol(own)
        self.sent: list[list[bytes | HandOver | None]] = []
        self.hosts = [self.join(worker)[0] for worker in range(joined)]

    def perform(self, actions: Actions) -> Actions:
        for connection, data in actions:
            self.sent[connection].append(data)
        return actions

    def open(self, now: float = 0.0) -> int:
        self.sent.append([])
        self.perform(self.server.opened(len(self.sent) - 1, now))
        return len(self.sent) - 1

    def send(self, connection: int, *posts: Any, now: float = 0.0) -> Actions:
        data = b"".join(post if isinstance(post, bytes) else encode(post) for post in posts)
        return self.perform(self.server.received(connection, data, now))

    def hello(self, connection: int) -> bytes:
        """Returns the hello of host 1 on an open connection."""
        return ClientHandshake(OWN, 1, make_nonce()).answer_challenge(self.line(connection, 0))

    def join(self, worker: int, own: HostCredentials | None = None) -> tuple[int, Refusal | None]:
        """Opens a connection and performs the handshake. Returns the connection and host 0's refusal, if any."""
        connection = self.open()
        handshake = ClientHandshake(own or self.own, worker, make_nonce())
        self.send(connection, handshake.answer_challenge(self.line(connection, 0)))
        return connection, handshake.check_answer(self.line(connection, 1))

    def line(self, connection: int, place: int) -> bytes:
        data = self.sent[connection][place]
        if not isinstance(data, bytes):
            raise Malformed("closed")
        return data.rstrip(b"\n")

    def is_closed(self, connection: int) -> bool:
        return self.sent[connection][-1] is None

    def read(self, connection: int) -> list[dict[str, Any]]:
        """Returns the messages sent to a host after its welcome."""
        return [json.loads(data) for data in self.sent[connection][2:] if isinstance(data, bytes)]


@pytest.mark.parametrize("secret", [b"another attempt's", b""])
def test_a_peer_with_another_secret_gets_no_answer(secret: bytes) -> None:
    meeting = Meeting()
    with pytest.raises(Malformed, match="closed"):
        meeting.join(1, replace(OWN, secret=secret))
    assert meeting.server.state.members == {}
    assert meeting.join(1)[1] is None, "the seat is still free"


def test_a_connection_of_the_gradient_exchange_is_handed_over_and_is_no_host() -> None:
    meeting = Meeting()
    own = replace(OWN, identity=replace(OWN.identity, exchange=True))
    connection, refused = meeting.join(2, own)
    assert refused is None
    assert meeting.sent[connection][2:] == [HandOver(2)]
    assert meeting.server.state.members == {}
    connection, refused = meeting.join(3, own)
    assert "no worker 3 among 3" in refused.reason
    assert meeting.is_closed(connection)
    assert meeting.join(1, replace(own, identity=Identity("run", 0, 3, exchange=True)))[1].final


CHANGES = {"hello": 2, "run_id": "other", "attempt": 2, "hosts": 4, "exchange": True, "nonce": "0" * 64}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_hello_is_rejected(field: str) -> None:
    meeting = Meeting()
    connection = meeting.open()
    meeting.send(connection, {**json.loads(meeting.hello(connection)), field: CHANGES[field]})
    assert meeting.is_closed(connection)
    assert meeting.server.state.members == {}


def test_a_hello_replayed_on_another_connection_is_rejected() -> None:
    meeting = Meeting()
    first, second = meeting.open(), meeting.open()
    meeting.send(second, meeting.hello(first))
    assert meeting.is_closed(second)


@pytest.mark.parametrize("forgery", ["host 0's answer to another host", "the host's own proof", "a refusal"])
def test_an_impostor_of_host_0_is_rejected(forgery: str) -> None:
    meeting = Meeting(joined=1)
    handshake = ClientHandshake(OWN, 2, make_nonce())
    hello = json.loads(handshake.answer_challenge(encode({"challenge": "0" * 64}).strip()))
    answer = {
        "host 0's answer to another host": meeting.line(meeting.hosts[0], 1),
        "the host's own proof": encode({"welcome": True, "proof": hello["proof"]}).strip(),
        "a refusal": encode({"refused": "go away", "final": True, "proof": "0" * 64}).strip(),
    }[forgery]
    with pytest.raises(Malformed, match="does not know the secret"):
        handshake.check_answer(answer)


@pytest.mark.parametrize(
    "noise",
    [
        b'{"hello": Infinity}\n',
        b'{"hello": 1e999, "run_id": "run"}\n',
        b"[" * (HANDSHAKE_BYTES - 1) + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"\n",
        b'{"hello": "1", "run_id": 3, "attempt": null, "hosts": true, "nonce": [], "proof": {}}\n',
        b'{"hello": ' + b"9" * 4000 + b"}\n",
        b"[" * 200_000 + b"\n",
        b'{"arrive": "p", "payload": ' + b"[" * 2000 + b"]" * 2000 + b', "seconds": 1}\n',
        b'{"arrive": "p", "payload": NaN, "seconds": 1}\n',
        b'{"arrive": "p", "payload": 1, "seconds": -1}\n',
        b'{"arrive": "p", "payload": "\\ud800", "seconds": 1}\n',
        b'{"phase": "' + b"x" * 601 + b'"}\n',
        b'{"phase": "x", "more": 1}\n',
        b'{"goodbye": 1.5, "reason": "", "overdue": false}\n',
        b"x" * (HOST_BYTES + 1),
    ],
)
def test_noise_of_an_accepted_host_ends_the_attempt_and_names_it(noise: bytes) -> None:
    meeting = Meeting(joined=2)
    meeting.send(meeting.hosts[1], noise)
    assert meeting.is_closed(meeting.hosts[1])
    for host in (meeting.hosts[0], meeting.join(2)[0]):  # one that comes later is told at once
        [message] = meeting.read(host)
        assert message["lost"].startswith("host 1 is gone")


def test_host_0_can_send_on_what_it_accepts_however_deep() -> None:
    for depth in range(600, 1000):  # the limit is Python's for recursion
        meeting = Meeting(joined=3)
        for host, payload in zip(meeting.hosts, (b"[" * depth + b"]" * depth, b"0", b"0"), strict=True):
            meeting.send(host, b'{"arrive": "p", "payload": %b, "seconds": 1}\n' % payload)
        assert [meeting.is_closed(host) for host in meeting.hosts[1:]] == [False, False]


def test_messages_before_noise_count() -> None:
    """The barrier is complete, though the last host to arrive is lost."""
    meeting = Meeting(joined=3)
    for host, noise in zip(meeting.hosts, (b"", b"", b"noise\n"), strict=True):
        meeting.send(host, ARRIVAL, noise)
    assert [next(iter(message)) for message in meeting.read(meeting.hosts[0])] == ["complete", "lost"]


def test_nothing_may_follow_a_hello_before_its_answer() -> None:
    meeting = Meeting()
    connection = meeting.open()
    meeting.send(connection, meeting.hello(connection), {"phase": "in"})
    assert meeting.is_closed(connection)


def test_a_silent_connection_is_closed_after_its_time_and_a_slow_host_is_not() -> None:
    meeting = Meeting()
    silent, slow = meeting.open(now=0.0), meeting.open(now=0.0)
    hello = meeting.hello(slow)
    for place in range(0, len(hello), 50):
        meeting.send(slow, hello[place : place + 50], now=HANDSHAKE_SECONDS / 2)
    meeting.perform(meeting.server.tick(HANDSHAKE_SECONDS - 0.01))
    assert not meeting.is_closed(silent)
    meeting.perform(meeting.server.tick(HANDSHAKE_SECONDS))
    assert meeting.is_closed(silent)
    assert not meeting.is_closed(slow)
    late = meeting.open(now=0.0)
    meeting.send(late, meeting.hello(late), now=HANDSHAKE_SECONDS)
    assert meeting.is_closed(late), "its host may have given up, and the end of an admitted host ends the attempt"
    host = Mock(recv=Mock(side_effect=[encode({"challenge": "0" * 64}), TimeoutError]))
    with pytest.raises(TimeoutError):
        handshake.perform_handshake(host, OWN, 1, 1.0)
    assert host.settimeout.call_args.args[0] > HANDSHAKE_SECONDS


def test_too_many_pending_connections_close_the_oldest() -> None:
    meeting = Meeting(joined=2)
    pending = [meeting.open() for _ in range(1000)]
    assert len(meeting.server.pending) == OWN.identity.hosts + SPARE_CONNECTIONS
    assert meeting.is_closed(pending[0])
    assert not meeting.is_closed(pending[-1])
    assert not any(meeting.is_closed(host) for host in meeting.hosts)
    assert meeting.join(2)[1] is None, "there is room for a host at any time"


@pytest.fixture
def crowd() -> Meeting:
    return Meeting(replace(OWN, identity=Identity("run", 1, 512)), joined=512)


def test_a_message_to_all_hosts_is_encoded_once(crowd: Meeting) -> None:
    for worker, host in enumerate(crowd.hosts):
        crowd.send(host, {**ARRIVAL, "payload": {"name": worker}})
    answers = [crowd.sent[host][-1] for host in crowd.hosts]
    assert all(answer is answers[0] for answer in answers)
    assert len(json.loads(answers[0] or b"")["payloads"]) == 512


def test_news_are_bounded_for_any_number_of_hosts(crowd: Meeting) -> None:
    for worker, host in enumerate(crowd.hosts):
        crowd.send(host, {"phase": f"step {worker}"})  # no two alike
    news = [data for _, data in crowd.server.tick(10.0)]
    assert len(news) == 512
    assert all(data is news[0] for data in news)
    assert len(news[0] or b"") < 2200
    assert crowd.server.tick(10.1) == []


def test_a_summary_names_the_rarest_phase_first() -> None:
    phases = ["step 7"] * 512
    phases[3], phases[200] = "saving", "asked to stop"
    assert summarize(phases) == "host 3 'saving', host 200 'asked to stop', hosts 0-2 4-199 201-511 'step 7'"


def test_lines_not_taken_are_kept() -> None:
    buffer = LineBuffer(100)
    assert next(buffer.feed(b"first\nsecond\nthi")) == b"first"
    assert [bytes(line) for line in buffer.feed(b"")] == [b"second"]
    assert [bytes(line) for line in buffer.feed(b"rd\n")] == [b"third"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_may_be_as_long_as_the_limit(end: bytes) -> None:
    assert [bytes(line) for line in LineBuffer(100).feed(b"x" * 100 + end)] == ([b"x" * 100] if end else [])
    with pytest.raises(Malformed, match="more than 100 bytes"):
        list(LineBuffer(100).feed(b"x" * 101 + end))
