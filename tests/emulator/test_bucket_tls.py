"""Cloud Storage under Google's own names: with the emulator's certificate alone, and the paths that TensorFlow asks."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launcher.emulator import storage, tls
from launcher.emulator.bucket import Buckets
from launcher.emulator.storage import NAMES
from tests.servers import LoopbackServer


class Google(LoopbackServer):
    """The server on a loopback port, as a name of Google's would lead to it."""

    def __init__(self, folder: Path) -> None:
        self.buckets, self.context = Buckets(folder / "buckets"), tls.tls_context(folder, NAMES)
        self.buckets.ensure("bucket")
        self.ca = folder / tls.CA_FILE
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        tls.serve_tls(connection, self.context, partial(storage.answer, self.buckets))

    def ask(
        self, name: str, method: str, path: str, body: bytes = b"", ca: Path | None = None, **headers: str
    ) -> tuple[int, bytes, str]:
        trusting = ssl.create_default_context(cafile=str(ca or self.ca))
        trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
        with socket.create_connection(self.listener.getsockname(), timeout=30) as plain:
            connection = http.client.HTTPConnection(name)
            connection.sock = trusting.wrap_socket(plain, server_hostname=name)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(), response.headers.get("Location", "")


@pytest.fixture
def google(tmp_path: Path) -> Iterator[Google]:
    service = Google(tmp_path)
    yield service
    service.close()


def test_objects_are_written_and_read_as_tensorflow_does(google: Google) -> None:
    place = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a%2Fb%20c"
    begun = google.ask("www.googleapis.com", "POST", place)
    assert begun[0] == 200
    assert begun[2].startswith("https://www.googleapis.com/upload/")
    path = begun[2].removeprefix("https://www.googleapis.com")
    assert google.ask("www.googleapis.com", "PUT", path, b"0123456789", **{"Content-Range": "bytes 0-9/10"})[0] == 200
    assert google.ask("storage.googleapis.com", "GET", "/bucket/a%2Fb%20c", Range="bytes=2-4")[:2] == (206, b"234")
    assert google.ask("storage.googleapis.com", "GET", "/bucket/a/b%20c")[:2] == (200, b"0123456789")
    path = "/storage/v1/b/bucket/o/a%2Fb%20c?fields=size%2Cgeneration%2Cupdated"
    status, text, _ = google.ask("www.googleapis.com", "GET", path)
    assert (status, json.loads(text)["size"]) == (200, "10")
    assert google.ask("storage.googleapis.com", "GET", "/bucket/none")[0] == 404


def test_only_the_emulators_certificate_and_googles_storage_names_are_believed(google: Google, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    tls.tls_context(other, NAMES)
    for name, ca in (("storage.googleapis.com", other / tls.CA_FILE), ("oauth2.googleapis.com", google.ca)):
        with pytest.raises(ssl.SSLCertVerificationError):
            google.ask(name, "GET", "/bucket/o", ca=ca)
    assert google.ask("storage.googleapis.com", "GET", "/bucket/o")[0] == 404


def test_no_key_is_left_on_the_disk_and_the_machines_own_cas_stay_believed(tmp_path: Path) -> None:
    tls.tls_context(tmp_path, NAMES)
    assert [path.name for path in tmp_path.iterdir()] == [tls.CA_FILE]
    text = (tmp_path / tls.CA_FILE).read_text()
    assert "PRIVATE" not in text
    assert text.count("BEGIN CERTIFICATE") > 1
