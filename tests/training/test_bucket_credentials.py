"""`training.storage` on gs:// when credentials are refreshed: those of a VM, whose metadata server may misbehave."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.auth import compute_engine
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError
from google.cloud.storage import Client

from launcher.emulator.http_server import HttpResponse, json_response
from tests.servers import LoopbackServer
from training import storage
from training.storage import gcs as bucket
from training.storage import types

Answer = Callable[[], HttpResponse | None]


class MetadataServer(LoopbackServer):
    """A metadata server with one service account. `fault()` may return a response to send instead of the token."""

    def __init__(self) -> None:
        self.fault: Answer = lambda: None
        self.tokens = 0
        super().__init__()

    def answer(self, request: Any) -> HttpResponse:
        if fault := self.fault():
            return fault
        content: dict[str, object] = {"email": "tpu@project.iam.gserviceaccount.com", "scopes": ["storage"]}
        if request.path.partition("?")[0].endswith("/token"):
            self.tokens += 1
            content = {"access_token": f"token-{self.tokens}", "expires_in": 3600, "token_type": "Bearer"}
        return json_response(content)


@pytest.fixture
def metadata(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """A client whose credentials are those of a VM. They ask the metadata server for a token before each request."""
    server = MetadataServer()
    monkeypatch.setattr(compute_engine._metadata, "_GCE_METADATA_HOST", server.address)
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    credentials = compute_engine.Credentials(universe_domain="googleapis.com")
    client = Client(project="project", credentials=credentials, client_options={"api_endpoint": gcs.url})
    monkeypatch.setitem(bucket._clients, (os.getpid(), gcs.url), client)
    yield server
    server.close()


def test_a_metadata_server_that_answers_nonsense_for_a_moment_changes_nothing(metadata: MetadataServer) -> None:
    hiccups = [HttpResponse(200, b"{", {"Content-Type": "application/json"}), HttpResponse(404, b"not yet")]
    metadata.fault = lambda: hiccups.pop() if hiccups else None
    storage.write("gs://bucket/x", b"data")
    assert not hiccups
    assert storage.read("gs://bucket/x") == b"data"


def test_a_lost_metadata_server_is_a_storage_error(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "timeouts", bucket.Timeouts(deadline=1, first_delay=0.01, longest_delay=0.1))
    metadata.fault = lambda: HttpResponse(404, b"no such service account")
    why = r"^gs://bucket/x: reading it failed for \d s, \d+ times; last: RefreshError.*404"
    with pytest.raises(types.StorageError, match=why):
        storage.read("gs://bucket/x")


def test_credentials_that_google_refuses_are_a_storage_error_at_once(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = []

    class Revoked(Credentials):  # type: ignore[misc]  # google.auth has no types here
        """A user's credentials after `gcloud auth revoke`."""

        def refresh(self, request: object) -> None:
            """Fails as `google.oauth2.credentials` does."""
            refreshed.append(request)
            raise RefreshError("invalid_grant: Token has been expired or revoked.")

    client = Client(project="project", credentials=Revoked(), client_options={"api_endpoint": gcs.url})
    monkeypatch.setitem(bucket._clients, (os.getpid(), gcs.url), client)
    with pytest.raises(types.StorageError, match=r"^gs://bucket/x: reading it failed because .*invalid_grant.*login"):
        storage.read("gs://bucket/x")
    assert len(refreshed) < 4, "trying again changes nothing"
