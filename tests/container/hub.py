"""The Hugging Face Hub in memory, on loopback, as huggingface_hub 0.36 and datasets 5 speak to it: downloads, and
uploads by the LFS batch protocol and commits in NDJSON. Several names may have the same bytes.

https://huggingface.co/docs/hub/api and https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response
from tests.servers import LoopbackServer

LARGE = 4096  # bytes from which a file goes through LFS; the Hub decides by name and content
NAME = r"((?:datasets/)?[^/]+/[^/]+?)"


@dataclass
class Repository:
    private: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)  # of its commits


class Hub(LoopbackServer):
    """Serves repositories and LFS objects, records the requests, and fails as a test asks."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # "org/model" or "datasets/org/texts"
        self.objects: dict[str, bytes] = {}  # of LFS, by sha256
        self.token = ""  # demanded unless it is empty
        self.refused_tokens = 0
        self.requests: list[str] = []  # "METHOD /path"
        self.refusing = False  # answers 500 to everything
        self.release = threading.Event()  # commits wait for it
        self.release.set()
        self.commit = "0123456789abcdef0123456789abcdef01234567"  # of the branch main; older ones are answered too
        self.commits: set[str] = set()  # of the files that were asked for
        self.sent = 0  # bytes of files
        self.refuses_after: int | None = None  # bytes of files, after which every answer is 403
        super().__init__()

    def answer(self, request: HttpRequest) -> HttpResponse:
        path = unquote(request.path)
        self.requests.append(f"{request.method} {path}")
        if upload := re.fullmatch("/lfs/objects/(.+)", path):  # an address that needs no token
            data = request.body.read_all()
            self.objects[hashlib.sha256(data).hexdigest()] = data
            return json_response({}, 200 if upload[1] in self.objects else 400)
        if self.refusing:
            return json_response({"error": "out of order"}, 500)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused_tokens += 1
            return json_response({"error": "Invalid credentials"}, 401)
        match path:
            case "/api/repos/create":
                return self._create(request.json())
            case "/api/validate-yaml":
                return json_response({"errors": [], "warnings": []})
            case "/lfs/verify":
                wanted = request.json()
                return json_response({}, 200 if len(self.objects[wanted["oid"]]) == wanted["size"] else 404)
        if re.fullmatch(rf"/{NAME}\.git/info/lfs/objects/batch", path):
            return json_response({"transfer": "basic", "objects": [*map(self._action, request.json()["objects"])]})
        file = re.fullmatch(rf"/{NAME}/resolve/([^/]+)/(.+)", path)
        place = file or re.fullmatch(rf"/api/(?:models/)?{NAME}(?:/([\w-]+)(?:/[^/]+/?(.*))?)?", path)
        if place is None or place[1] not in self.repositories:
            return json_response({}, 404, {"X-Error-Code": "RepoNotFound"})
        repository = self.repositories[place[1]]
        if file:
            return self._send(request, repository, file[2], file[3])
        return self._describe(request, place[1], repository, place[2], place[3])

    def _create(self, wanted: Mapping[str, Any]) -> HttpResponse:
        name = f"{wanted['organization']}/{wanted['name']}"
        is_new = self.repositories.setdefault(name, own := Repository(private=bool(wanted.get("private")))) is own
        return json_response({"url": f"{self.url}/{name}", "name": name}, 200 if is_new else 409)

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns what a client must do with an LFS object: nothing if the server has it."""
        hrefs = {"upload": f"{self.url}/lfs/objects/{wanted['oid']}", "verify": f"{self.url}/lfs/verify"}
        actions = {name: {"href": href, "header": {}} for name, href in hrefs.items()}
        return wanted if wanted["oid"] in self.objects else {**wanted, "actions": actions}

    def _describe(
        self, request: HttpRequest, name: str, repository: Repository, what: str | None, below: str
    ) -> HttpResponse:
        """Answers for a repository itself, for a folder `below` and for some paths, and takes a commit."""
        files = repository.files
        match what:
            case None | "revision":
                siblings = [{"rfilename": file} for file in sorted(files)]
                return json_response({"id": name.removeprefix("datasets/"), "sha": self.commit, "siblings": siblings})
            case "tree":
                return json_response([self._entry(files, file) for file in sorted(files) if file.startswith(below)])
            case "paths-info":
                paths = parse_qs(request.body.read_all().decode())["paths"]
                folders = {file.rpartition("/")[0] for file in files}
                return json_response([self._entry(files, path) for path in paths if path in folders | files.keys()])
            case "preupload":
                modes = [(each["path"], each["size"] >= LARGE) for each in request.json()["files"]]
                entry = {"shouldIgnore": False}
                told = [{"path": path, "uploadMode": "lfs" if lfs else "regular", **entry} for path, lfs in modes]
                return json_response({"files": told})
            case "commit" if self.release.wait(60):
                return self._commit(name, repository, request.body.read_all())
        return json_response({"error": f"unknown: {request.path}"}, 404)

    def _entry(self, files: Mapping[str, bytes], path: str) -> dict[str, Any]:
        kind = {"type": "file", "size": len(files[path])} if path in files else {"type": "directory"}
        return {"path": path, "oid": self.commit, **kind}

    def _commit(self, name: str, repository: Repository, body: bytes) -> HttpResponse:
        for item in map(json.loads, body.decode().splitlines()):
            value = item["value"]
            match item["key"]:
                case "header":
                    repository.summaries.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.objects[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        return json_response({"success": True, "commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid})

    def _send(self, request: HttpRequest, repository: Repository, commit: str, name: str) -> HttpResponse:
        """A whole file, or the range that is asked for."""
        own = {"X-Repo-Commit": self.commit}
        if (data := repository.files.get(name)) is None:
            return json_response({}, 404, {"X-Error-Code": "EntryNotFound", **own})
        self.commits.add(commit)
        if self.refuses_after is not None and self.sent >= self.refuses_after:
            return json_response({"error": "access was revoked"}, 403)
        own |= {"ETag": f'"{hashlib.sha1(data[:64]).hexdigest()}-{len(data)}"', "Accept-Ranges": "bytes"}
        first, last = 0, len(data) - 1
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or last), last)
            own["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        part = data[first : last + 1]
        self.sent += len(part) if request.method == "GET" else 0
        return HttpResponse(206 if span else 200, part, own)
