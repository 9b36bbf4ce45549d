"""The Hugging Face Hub as far as an upload uses it: repositories, the LFS batch protocol, commits in NDJSON. In memory,
on loopback.

https://huggingface.co/docs/hub/api and https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md, as
huggingface_hub 0.36 speaks them.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.container.hub_handler import HubHandler, serve_hub

LARGE = 4096  # bytes from which a file goes through LFS; the Hub decides by name and content


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # summaries


@dataclass
class Hub:
    """What the server holds, and how it misbehaves."""

    token: str
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # of LFS, by sha256
    requests: list[str] = field(default_factory=list)  # "METHOD /path"
    refusing: bool = False  # answers 500 to everything
    release: threading.Event = field(default_factory=threading.Event)  # commits wait for it
    refused_tokens: int = 0


class _Handler(HubHandler):
    hub: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._welcome():
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path.startswith("/api/models/") and "/preupload/" in path:
            sizes = [(file["path"], file["size"]) for file in json.loads(body)["files"]]
            modes = [(path, "lfs" if size >= LARGE else "regular") for path, size in sizes]
            self._json({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif path == "/lfs/verify":
            wanted = json.loads(body)
            self._json({}, 200 if len(self.hub.objects.get(wanted["oid"], b"")) == wanted["size"] else 404)
        elif path.startswith("/api/models/") and "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._json({"error": f"unknown: {path}"}, 404)

    def do_PUT(self) -> None:
        """An LFS object, at an address that needs no token."""
        self.hub.requests.append(f"PUT {self.path}")
        data, oid = self.rfile.read(int(self.headers["Content-Length"])), self.path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() != oid:
            self._json({"error": "not the content that was announced"}, 400)
            return
        self.hub.objects[oid] = data
        self._json({})

    def do_HEAD(self) -> None:
        if not self._welcome():
            return
        repository, _, name = self.path.lstrip("/").partition("/resolve/main/")
        found = self.hub.repositories.get(repository)
        data = found.files.get(name) if found else None
        if data is None:
            self._json({}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        self.begin(200, {"ETag": etag, "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))})

    def _welcome(self) -> bool:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.refusing:
            self._json({"error": "out of order"}, 500)
            return False
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.hub.refused_tokens += 1
            self._json({"error": "Invalid credentials"}, 401)
            return False
        return True

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": url}, 409)
            return
        self.hub.repositories[name] = Repository(private=bool(wanted.get("private")))
        self._json({"url": url, "name": name})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for each in wanted["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/objects/{each['oid']}", "header": {}}
            verify = {"href": f"{self.hub.url}/lfs/verify", "header": {}}
            missing = each["oid"] not in self.hub.objects
            objects.append({**each, "actions": {"upload": upload, "verify": verify}} if missing else each)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> None:
        if not self.hub.release.wait(60):
            self._json({"error": "too slow"}, 500)
            return
        repository = self.hub.repositories[name]
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                repository.commits.append(value["summary"])
            elif item["key"] == "file":
                assert value["encoding"] == "base64"
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        self._json({"success": True, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})


@contextlib.contextmanager
def serve(token: str) -> Iterator[Hub]:
    """A Hub for as long as the block runs; it lets commits through at once."""
    hub = Hub(token)
    hub.release.set()
    with serve_hub(hub, _Handler):
        yield hub
        hub.release.set()
