"""The emulator's HTTP: bodies of every framing, listeners that pause, and uploads as gcloud writes them."""

import socket
import threading
from email import message_from_string
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from launcher.emulator.http_server import Body, Disconnected, HttpResponse, accept_in_thread, serve_http
from launcher.emulator.state import Store
from launcher.emulator.vm.engine_proxy import EngineProxy
from launcher.emulator.vm.hosts import Hosts, unix_listener
from tests.processes import wait_until

CHUNKED = message_from_string("Transfer-Encoding: chunked")
FIVE_BYTES = message_from_string("Content-Length: 5")


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), st.integers(1, 60))
def test_a_chunked_body_is_what_was_sent_however_it_is_read(chunks: list[bytes], size: int) -> None:
    wire = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    source = BytesIO(wire + b"0\r\nTrailer: x\r\n\r\nnext request")
    body = Body(source, CHUNKED)
    parts = []
    while data := body.read(size):
        assert len(data) <= size
        parts.append(data)
    assert b"".join(parts) == b"".join(chunks)
    assert body.read() == b""
    assert source.read() == b"next request"


def test_a_body_that_ends_early_is_noticed() -> None:
    for sent, headers in ((b"abc", FIVE_BYTES), (b"5\r\nabc", CHUNKED), (b"xyz\r\n", CHUNKED)):
        with pytest.raises(Disconnected):
            Body(BytesIO(sent), headers).read_all()


@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_client_that_expects_100_continue_gets_it_before_it_sends_the_body(read_ahead: bool) -> None:
    """TensorFlow's libcurl waits a second for it."""
    client, server = socket.socketpair()
    echo = partial(serve_http, server, lambda request: HttpResponse(200, request.body.read_all()))
    threading.Thread(target=partial(echo, read_ahead=read_ahead), daemon=True).start()
    client.settimeout(5)
    client.sendall(b"PUT / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"abc")
    assert client.recv(1000).endswith(b"\r\n\r\nabc")
    client.sendall(b"HEAD / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    assert client.recv(1000).endswith(b"Content-Length: 3\r\n\r\n")


def test_the_engine_gets_all_values_of_a_parameter(tmp_path: Path) -> None:
    client, server = socket.socketpair()
    with unix_listener(tmp_path / "engine") as engine:
        proxy = EngineProxy(Mock(), Mock(path=str(tmp_path / "engine")), *[Mock()] * 5)
        threading.Thread(target=proxy.serve_workstation, args=(server,), daemon=True).start()
        client.sendall(b"GET /v1.41/images/get?names=a&names=b HTTP/1.1\r\n\r\n")
        with engine.accept()[0] as upstream:
            assert upstream.recv(1000).startswith(b"GET /v1.41/images/get?names=a&names=b HTTP/1.1\r\n")


def test_a_host_that_was_cut_off_is_answered_when_its_network_is_back(api: Any) -> None:
    """Over the listeners that its agent hands over, until the agent disconnects."""
    store, host = Store(api.state, None), api.ready().hosts[0]

    def serve(connection: socket.socket) -> None:
        hosts.await_network(host.hostname)
        connection.sendall(b"x")

    hosts = Hosts(store, None, "", "", Path(), lambda hostname: [serve] * 4)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    agent, emulator = socket.socketpair()
    socket.send_fds(agent, [b"listeners"], [listener.fileno() for listener in listeners])
    serving = threading.Thread(target=hosts._serve_agent, args=(host.hostname, emulator))
    serving.start()
    assert socket.create_connection(listeners[3].getsockname(), timeout=5).recv(1) == b"x"
    with store.change():
        host.cut = True
    waiting = socket.create_connection(listeners[0].getsockname(), timeout=0.1)
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    with store.change():
        host.cut = False
    waiting.settimeout(5)
    assert waiting.recv(1) == b"x"
    with pytest.raises(Disconnected, match="gone"):
        hosts.await_network("deleted-host")
    agent.close()
    serving.join(5)
    assert not serving.is_alive()


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("data", [b"", b"plain", b"\r\n--almost\r\n\n", b"x" * 3_000_000])
def test_multipart_uploads_arrive_with_either_line_end(storage: Any, bucket: Any, newline: bytes, data: bytes) -> None:
    """gcloud ends lines with a bare newline, the client libraries with CRLF."""
    resource = [b"--===b==", b"content-type: application/json", b"", b'{"name": "a/b"}']
    body = newline.join([*resource, b"--===b==", b"Content-Type: text/x", b"", data, b"--===b==--"])
    url = f"{storage.url}/upload/storage/v1/b/{bucket.name}/o?uploadType=multipart"
    answer = requests.post(url, body, headers={"Content-Type": "multipart/related; boundary='===b=='"}, timeout=10)
    assert answer.status_code == 200, answer.text
    assert answer.json()["contentType"] == "text/x"
    assert bucket.blob("a/b").download_as_bytes() == data


def test_a_multipart_body_that_is_cut_off_makes_no_object(storage: Any, bucket: Any) -> None:
    url = f"{storage.url}/upload/storage/v1/b/{bucket.name}/o?uploadType=multipart"
    for body in (b"", b"--b\r\n\r\n{}\r\n", b'--b\r\n\r\n{"name": "x"}\r\n--b\r\n\r\ndata without an end'):
        answer = requests.post(url, body, headers={"Content-Type": "multipart/related; boundary=b"}, timeout=10)
        assert answer.status_code == 400
    assert not bucket.blob("x").exists()
    assert not list((storage.folder / bucket.name / "incoming").iterdir())


def test_an_upload_that_is_refused_at_once_still_gets_its_answer(storage: Any) -> None:
    """Without reading the body first, the connection would be reset and the client would see no status."""
    url = f"{storage.url}/upload/storage/v1/b/no-such-bucket/o?uploadType=media&name=x"
    with requests.Session() as session:
        for _ in range(3):
            answer = session.post(url, b"x" * 5_000_000, timeout=10)
            assert (answer.status_code, answer.headers.get("Connection")) == (404, None)


def test_a_server_without_threads_or_descriptors_loses_no_later_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was accepted and forgotten would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = accept_in_thread(listener, lambda connection: connection.sendall(b"x"))
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", accept := Mock(side_effect=OSError("too many open files")))
            waiting = socket.create_connection(listener.getsockname(), timeout=5)
            wait_until(lambda: accept.called)
        assert waiting.recv(1) == b"x"
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            assert socket.create_connection(listener.getsockname(), timeout=5).recv(1) == b""
        assert socket.create_connection(listener.getsockname(), timeout=5).recv(1) == b"x"
        end.close()
