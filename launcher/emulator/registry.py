"""Artifact Registry, emulated: the calls of `gcloud artifacts repositories`, and the registry's own protocol.

`EmulatedRegistry` speaks the OCI distribution protocol with bearer tokens, as Artifact Registry does:
https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
https://distribution.github.io/distribution/spec/auth/token/
https://cloud.google.com/artifact-registry/docs/reference/docker-api: no uploads in pieces; a PATCH without a range,
which docker sends, is taken.

Its content is in a folder. vm/engine_images.py has the names that docker pushes without bytes.

    blobs/<hex>                           bytes by their sha256: layers, configurations, manifests
    repositories/<name>/blobs/<hex>       marks a blob of a repository (an empty file); <name> is percent-encoded
    repositories/<name>/manifests/<hex>   the media type of a manifest
    repositories/<name>/tags/<tag>        the digest of a manifest
    uploads/<id>                          bytes of unfinished uploads

Bytes get their name only when they are complete, and references are written after the bytes. An interrupted upload
stays as it is and can be continued.
"""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.emulator import faults
from launcher.emulator.api import catalogue
from launcher.emulator.api.catalogue import ApiError, bad_request
from launcher.emulator.http_server import FileRegion, HttpRequest, HttpResponse, json_response
from launcher.emulator.state import EmulatorState, Store
from launcher.home import write_private

NAMES = ("*.pkg.dev", "gcr.io", "*.gcr.io")
"""The names of its certificate. The engine, which does not trust it, connects to 127.0.0.1."""

USER = "oauth2accesstoken"
_API_VERSION = {"Docker-Distribution-Api-Version": "registry/2.0"}  # docker 20.10 requires it
_NAME_ONLY = "docker pushed its name only: to push the bytes, `tpu-launch emulator start --full-pushes` first"
_PATH = re.compile(r"/v2/(.+)/(blobs|manifests)/(.+)")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_UPLOAD = re.compile(r"[0-9a-f]{32}")


# -- repositories


def answer_repositories(
    state: EmulatorState, method: str, parent: str, rest: list[str], query: dict[str, str], body: dict[str, Any]
) -> dict[str, Any]:
    """Describes or creates a repository for a request below `parent`, projects/P/locations/L/repositories, whose path
    goes on with `rest`. Returns the response's JSON: the repository, or the operation of its creation, already done.
    Raises ApiError if it is missing, or exists, for a format other than DOCKER, and for other calls (not found)."""
    match (method, rest):
        case ("GET", [name]):
            return catalogue.find(state.repositories, f"{parent}/{name}")
        case ("POST", []):
            name = f"{parent}/{query.get('repositoryId', '')}"
            if body.get("format") != "DOCKER":
                raise bad_request("format: only DOCKER repositories are emulated")
            if name in state.repositories:
                raise ApiError(catalogue.ALREADY_EXISTS, "the repository already exists")
            state.repositories[name] = {"name": name, "format": "DOCKER", "description": body.get("description", "")}
            operation = name.replace("/repositories/", "/operations/")
            return {"name": operation, "done": True, "response": state.repositories[name]}
    raise ApiError(catalogue.NOT_FOUND, f"{method} is not emulated for repositories")


def repository_is_missing(state: EmulatorState, repository: str) -> bool:
    """Returns whether an injected "repository" fault demands that repositories are created first, and the one of the
    image `repository`, LOCATION-docker.pkg.dev/PROJECT/NAME/IMAGE, was not."""
    host, project, name = [*repository.split("/"), "", ""][:3]
    full_name = f"projects/{project}/locations/{host.removesuffix('-docker.pkg.dev')}/repositories/{name}"
    return full_name not in state.repositories and any(fault.kind == "repository" for fault in state.faults)


class EmulatedRegistry:
    """Answers requests to the registry. All but those for a token require a token."""

    def __init__(self, folder: Path, emulator: Store) -> None:
        """Connects the content in `folder` with the emulator's state: tokens, faults, repositories, pushes."""
        self._folder = folder
        self._emulator = emulator

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answers a request; 401 without a valid token, 503 while the registry is down, 404 for what is missing."""
        if request.path == "/v2/token":
            return self._token(request)
        if not self._accepts(request.headers.get("Authorization", "").removeprefix("Bearer ")):
            return self._challenge(request)
        match = _PATH.fullmatch(request.path)
        if request.path == "/v2/":
            return json_response({}, headers=_API_VERSION)
        if match is None:
            return _error(404, "NOT_FOUND", request.path)
        path, kind, name = match.groups()
        host = request.headers.get("Host", "")
        repository = path if host.startswith("127.0.0.1:") else f"{host.partition(':')[0]}/{path}"
        with self._emulator.read() as state:
            trouble = faults.engine_trouble(state, "", registry=True)
            missing = repository_is_missing(state, repository)
        if trouble:
            return _error(503, "UNAVAILABLE", trouble)
        if missing:
            return _error(404, "NAME_UNKNOWN", f'Repository "{repository.split("/")[2]}" not found')
        if kind == "manifests":
            return self._answer_manifest(request, path, repository, name)
        if name.startswith("uploads/"):
            return self._answer_upload(request, path, repository, name.removeprefix("uploads/"))
        return self._answer_blob(request, repository, name)

    def _token(self, request: HttpRequest) -> HttpResponse:
        """Answers a login with the token to use: its own password. 401 unless the user is USER, and the password an
        access token."""
        user, password = request.login
        if user != USER or not self._accepts(password):
            return _error(401, "UNAUTHORIZED", "Unauthenticated request: the login is not valid")
        return json_response({"token": password, "expires_in": 3599})

    def _accepts(self, token: str) -> bool:
        """Returns whether `token` is the access token of the workstation's account or of a host's."""
        with self._emulator.read() as state:
            return token == state.token or any(token == host.token for host in state.hosts)

    @staticmethod
    def _challenge(request: HttpRequest) -> HttpResponse:
        """Returns the 401 that tells the client where to get a token."""
        host = request.headers.get("Host", "")
        response = _error(401, "UNAUTHORIZED", "Unauthenticated request.")
        realm = f'Bearer realm="https://{host}/v2/token",service="{host}"'
        response.headers |= {"WWW-Authenticate": realm, **_API_VERSION}
        return response

    def _part(self, repository: str, kind: str) -> Path:
        """Returns the folder of a repository's "blobs", "manifests" or "tags"."""
        return self._folder / "repositories" / quote(repository, safe="") / kind

    # -- blobs

    def _blob(self, repository: str, digest: str) -> Path | None:
        """Returns the file of a repository's blob, None when the repository has none of that digest."""
        match = _DIGEST.fullmatch(digest)
        if match is None or not (self._part(repository, "blobs") / match[1]).exists():
            return None
        return self._folder / "blobs" / match[1]

    def _mark_blob(self, repository: str, name: str) -> None:
        """Makes a stored blob, <hex> `name`, visible in a repository."""
        folder = self._part(repository, "blobs")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def _answer_blob(self, request: HttpRequest, repository: str, digest: str) -> HttpResponse:
        """Answers GET and HEAD of a blob; 404 if the repository lacks it, and for other methods."""
        path = self._blob(repository, digest)
        if path is None or request.method not in ("GET", "HEAD"):
            return _error(404, "BLOB_UNKNOWN", digest)
        headers = {"Docker-Content-Digest": digest, "Content-Type": "application/octet-stream"}
        return HttpResponse(200, FileRegion(open(path, "rb"), 0, path.stat().st_size), headers)

    def _answer_upload(self, request: HttpRequest, path: str, repository: str, identifier: str) -> HttpResponse:
        """Begins (POST, see `_begin_upload`), continues (PATCH, in one piece) or ends (PUT) an upload of a blob; bytes
        that do not have the PUT's digest are deleted, with 400. `path`: the repository as in the URL."""
        if request.method == "POST" and not identifier:
            return self._begin_upload(request, path, repository)
        upload = self._folder / "uploads" / identifier
        if not _UPLOAD.fullmatch(identifier) or not upload.is_file():
            return _error(404, "BLOB_UPLOAD_UNKNOWN", identifier)
        if request.method not in ("PATCH", "PUT"):
            return _error(405, "UNSUPPORTED", request.method)
        if request.method == "PATCH" and "Content-Range" in request.headers:
            return _error(400, "UNSUPPORTED", "chunked uploads are not supported: send the blob in one piece")
        with open(upload, "ab") as file:  # bytes received before a client disconnects stay
            file.writelines(request.body.blocks())
        if request.method == "PATCH":
            return _upload_response(path, upload)
        digest = request.query.get("digest", "")
        with open(upload, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != f"sha256:{found}":
            upload.unlink()
            return _error(400, "DIGEST_INVALID", f"the bytes received are not {digest}")
        (self._folder / "blobs").mkdir(exist_ok=True)
        os.replace(upload, self._folder / "blobs" / found)
        self._mark_blob(repository, found)
        return _created(f"/v2/{path}/blobs/{digest}", digest)

    def _begin_upload(self, request: HttpRequest, path: str, repository: str) -> HttpResponse:
        """Answers a POST: mounts the blob that it names from another repository, else begins an empty upload. `path`:
        the repository as in the URL."""
        digest, source = request.query.get("mount", ""), request.query.get("from", "")
        mounted = self._blob(repository.removesuffix(path) + source, digest) if source else None
        if mounted is not None:
            self._mark_blob(repository, mounted.name)
            return _created(f"/v2/{path}/blobs/{digest}", digest)
        upload = self._folder / "uploads" / secrets.token_hex(16)
        upload.parent.mkdir(parents=True, exist_ok=True)
        upload.touch(0o600)
        return _upload_response(path, upload)

    # -- manifests

    def manifest(self, repository: str, version: str) -> tuple[str, str, bytes] | None:
        """Returns digest, media type and bytes of the manifest with a digest or tag; None when there is none."""
        tag = self._part(repository, "tags") / version
        digest = tag.read_text() if _TAG.fullmatch(version) and tag.is_file() else version
        match = _DIGEST.fullmatch(digest)
        path = self._part(repository, "manifests") / (match[1] if match else "")
        if match is None or not path.is_file():
            return None
        return digest, path.read_text(), (self._folder / "blobs" / match[1]).read_bytes()

    def _answer_manifest(self, request: HttpRequest, path: str, repository: str, version: str) -> HttpResponse:
        """Answers PUT, GET and HEAD of a manifest by tag or digest; 404 if there is none, and for other methods.
        `path`: the repository as in the URL."""
        if request.method == "PUT":
            return self._put_manifest(request, path, repository, version)
        found = self.manifest(repository, version)
        if found is None or request.method not in ("GET", "HEAD"):
            with self._emulator.read() as state:
                hint = f" ({_NAME_ONLY})" if version in state.pushed.get(repository, {}) else ""
            return _error(404, "MANIFEST_UNKNOWN", f'Failed to fetch "{version}"{hint}')
        digest, media_type, data = found
        return HttpResponse(200, data, {"Docker-Content-Digest": digest, "Content-Type": media_type})

    def _put_manifest(self, request: HttpRequest, path: str, repository: str, version: str) -> HttpResponse:
        """Stores a manifest or index under its digest, and under `version` if that is a tag. Answers 400 without
        storing if it is damaged, refers to content that the repository lacks, or `version` is another digest. `path`:
        the repository as in the URL."""
        data = request.body.read_all()
        found = hashlib.sha256(data).hexdigest()
        digest = f"sha256:{found}"
        if ":" in version and version != digest:
            return _error(400, "DIGEST_INVALID", f"the manifest is {digest}")
        try:
            fields = json.loads(data)
            index = "manifests" in fields
            entries = fields["manifests"] if index else [fields["config"], *fields["layers"]]
            needed = [str(entry["digest"]) for entry in entries]
        except (ValueError, KeyError, TypeError):
            return _error(400, "MANIFEST_INVALID", "not the manifest of an image")
        has = self.manifest if index else self._blob
        lacking = [digest for digest in needed if has(repository, digest) is None]
        if lacking:
            return _error(400, "MANIFEST_BLOB_UNKNOWN", ", ".join(lacking))
        write_private(self._folder / "blobs" / found, data)
        media_type = request.headers.get("Content-Type") or str(fields.get("mediaType", ""))
        write_private(self._part(repository, "manifests") / found, media_type)
        if _TAG.fullmatch(version):
            write_private(self._part(repository, "tags") / version, digest)
        return _created(f"/v2/{path}/manifests/{digest}", digest)


def _upload_response(path: str, upload: Path) -> HttpResponse:
    """Returns a response that says how many bytes of an upload have arrived, and where to send the rest."""
    size = upload.stat().st_size
    headers = {"Range": f"0-{max(0, size - 1)}", "Docker-Upload-UUID": upload.name}
    # Some registries keep state in a query, which clients must not drop.
    return HttpResponse(202, b"", {**headers, "Location": f"/v2/{path}/blobs/uploads/{upload.name}?_state={size}"})


def _created(location: str, digest: str) -> HttpResponse:
    return HttpResponse(201, b"", {"Location": location, "Docker-Content-Digest": digest})


def _error(status: int, code: str, text: str) -> HttpResponse:
    return json_response({"errors": [{"code": code, "message": text}]}, status)
