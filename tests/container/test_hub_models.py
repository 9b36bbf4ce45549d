"""A run starts from a model on the Hub: a local server that answers as the Hub does to downloads."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container import small_runs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, org/model: what is in a folder. Others are not found."""

    folder: Path

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        place = self.path.partition("?")[0]
        if place in ("/api/models/org/model/revision/main", "/api/models/org/model"):
            files = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            self._send(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": files}).encode(), body)
        elif place.startswith((f"/org/model/resolve/{COMMIT}/", "/org/model/resolve/main/")):
            self._send((self.folder / place.rpartition("/")[2]).read_bytes(), body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        for name, value in (
            ("ETag", f'"{hashlib.sha1(data).hexdigest()}"'),
            ("X-Repo-Commit", COMMIT),
            ("Content-Length", str(len(data))),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_runs.prepare(tmp_path)


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    Hub.folder = folder / "model"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.nightly
def test_a_run_starts_from_a_name_on_the_hub(folder: Path, hub: str) -> None:
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "cache")}
    first = small_runs.document(folder, train__steps=8, checkpoint__every_steps=None)
    assert small_runs.start(folder, "first", first)[0].finish() == 0
    shutil.copytree(folder / "runs" / "first" / "model", folder / "model")
    second = {**first, "model": {"path": "org/model"}, "data": {**first["data"], "tokenizer": "org/model"}}
    [host] = small_runs.start(folder, "second", second, **environment)
    assert host.finish() == 0, host.text()
    before, after = small_runs.summary(folder, "first"), small_runs.summary(folder, "second")
    assert after["first_loss"] < before["first_loss"] - 0.3, "it goes on from the trained weights"
    assert {file.name for file in (folder / "runs" / "second" / "model").iterdir()} == {
        file.name for file in (folder / "model").iterdir()
    }


def test_a_model_that_the_hub_does_not_give_is_named_with_what_to_do(folder: Path, hub: str) -> None:
    program = (
        "import sys; from training import errors\nfrom training.storage import hub as hub_names\n"
        "try: hub_names.model_folder(sys.argv[1])\nexcept errors.BadInput as error: print(error)"
    )
    for endpoint in (hub, "http://127.0.0.1:9"):  # not there; no Hub there
        ended = subprocess.run(
            [sys.executable, "-c", program, "org/other"],
            env={
                "PATH": "",
                "PYTHONPATH": ":".join(sys.path),
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(folder / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.stdout.startswith(
            "model.path org/other: there is no such folder, and the Hub did not give a model of that name: "
        ), ended.stderr
        assert "give its folder (local or gs://)" in ended.stdout
