"""The registry's HTTP interface: the OCI distribution protocol with bearer tokens, as Artifact Registry speaks it.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
https://distribution.github.io/distribution/spec/auth/token/
https://cloud.google.com/artifact-registry/docs/reference/docker-api: no uploads in pieces; a PATCH without a range,
which docker sends, is taken.
"""

import json
import re

from launcher.emulator import faults
from launcher.emulator.api import repositories
from launcher.emulator.http_server import FileRegion, HttpRequest, HttpResponse, json_response
from launcher.emulator.registry.blobs import BlobStore
from launcher.emulator.state import Store

NAMES = ("*.pkg.dev", "gcr.io", "*.gcr.io")
"""The names of its certificate. The engine, which does not trust it, connects to 127.0.0.1."""

_USER = "oauth2accesstoken"
_API_VERSION = {"Docker-Distribution-Api-Version": "registry/2.0"}  # docker 20.10 requires it
_NAME_ONLY = "docker pushed its name only: to push the bytes, `tpu-launch emulator start --full-pushes` first"
_PATH = re.compile(r"/v2/(.+)/(blobs|manifests)/(.+)")


class RegistryApi:
    """Answers requests to the registry. All but those for a token require a token."""

    def __init__(self, store: BlobStore, emulator: Store) -> None:
        """Connects the registry with its content and the emulator's state: tokens, faults, repositories, pushes."""
        self.store = store
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
        host = request.headers.get("Host", "")
        repository = match[1] if host.startswith("127.0.0.1:") else f"{host.partition(':')[0]}/{match[1]}"
        with self._emulator.read() as state:
            trouble = faults.engine_trouble(state, "", registry=True)
            missing = repositories.is_missing(state, repository)
        if trouble:
            return _error(503, "UNAVAILABLE", trouble)
        if missing:
            return _error(404, "NAME_UNKNOWN", f'Repository "{repository.split("/")[2]}" not found')
        if match[2] == "blobs" and match[3].startswith("uploads/"):
            return self._answer_upload(request, match[1], repository, match[3].removeprefix("uploads/"))
        if match[2] == "blobs":
            return self._answer_blob(request, repository, match[3])
        return self._answer_manifest(request, match[1], repository, match[3])

    def _token(self, request: HttpRequest) -> HttpResponse:
        """Answers a login with the token to use: its own password, which must be an access token; else 401."""
        user, password = request.login
        if user != _USER or not self._accepts(password):
            return _error(401, "UNAUTHORIZED", "Unauthenticated request: the login is not valid")
        return json_response({"token": password, "expires_in": 3599})

    def _accepts(self, token: str) -> bool:
        """Returns whether it is the access token of the workstation's account or of a host's."""
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

    # -- blobs

    def _answer_blob(self, request: HttpRequest, repository: str, digest: str) -> HttpResponse:
        """Answers GET and HEAD of a blob; 404 if the repository lacks it, and for other methods."""
        path = self.store.blob(repository, digest)
        if path is None or request.method not in ("GET", "HEAD"):
            return _error(404, "BLOB_UNKNOWN", digest)
        headers = {"Docker-Content-Digest": digest, "Content-Type": "application/octet-stream"}
        return HttpResponse(200, FileRegion(open(path, "rb"), 0, path.stat().st_size), headers)

    def _answer_upload(self, request: HttpRequest, path: str, repository: str, identifier: str) -> HttpResponse:
        """Begins (POST), continues (PATCH, in one piece) or ends (PUT) an upload of a blob. A POST that names a blob of
        another repository mounts it, or begins an upload if it isn't there."""
        if request.method == "POST" and not identifier:
            digest, source = request.query.get("mount", ""), request.query.get("from", "")
            origin = repository.removesuffix(path) + source
            if digest and source and self.store.link(repository, digest, origin):
                return _created(f"/v2/{path}/blobs/{digest}", digest)
            return self._upload_response(path, self.store.begin_upload())
        size = self.store.upload_size(identifier)
        if size is None:
            return _error(404, "BLOB_UPLOAD_UNKNOWN", identifier)
        match request.method:
            case "PATCH" if "Content-Range" in request.headers:
                text = "chunked uploads are not supported: send the blob in one piece"
                return _error(400, "UNSUPPORTED", text)
            case "PATCH":
                self.store.extend_upload(identifier, request.body.blocks())
                return self._upload_response(path, identifier)
            case "PUT":
                self.store.extend_upload(identifier, request.body.blocks())
                digest = request.query.get("digest", "")
                if not self.store.end_upload(repository, identifier, digest):
                    return _error(400, "DIGEST_INVALID", f"the bytes received are not {digest}")
                return _created(f"/v2/{path}/blobs/{digest}", digest)
        return _error(405, "UNSUPPORTED", request.method)

    def _upload_response(self, path: str, identifier: str) -> HttpResponse:
        """Returns a response that says how many bytes of an upload have arrived, and where to send the rest."""
        size = self.store.upload_size(identifier) or 0
        headers = {"Range": f"0-{max(0, size - 1)}", "Docker-Upload-UUID": identifier}
        # Some registries keep state in a query, which clients must not drop.
        return HttpResponse(202, b"", {**headers, "Location": f"/v2/{path}/blobs/uploads/{identifier}?_state={size}"})

    # -- manifests

    def _answer_manifest(self, request: HttpRequest, path: str, repository: str, version: str) -> HttpResponse:
        """Answers PUT, GET and HEAD of a manifest by tag or digest; 404 if there is none, and for other methods."""
        if request.method == "PUT":
            return self._put_manifest(request, path, repository, version)
        found = self.store.manifest(repository, version)
        if found is None or request.method not in ("GET", "HEAD"):
            with self._emulator.read() as state:
                hint = f" ({_NAME_ONLY})" if version in state.pushed.get(repository, {}) else ""
            return _error(404, "MANIFEST_UNKNOWN", f'Failed to fetch "{version}"{hint}')
        digest, media_type, data = found
        return HttpResponse(200, data, {"Docker-Content-Digest": digest, "Content-Type": media_type})

    def _put_manifest(self, request: HttpRequest, path: str, repository: str, version: str) -> HttpResponse:
        """Stores a manifest or index. Answers 400 if it is damaged or refers to content that the repository lacks."""
        data = request.body.read_all()
        try:
            fields = json.loads(data)
            index = "manifests" in fields
            entries = fields["manifests"] if index else [fields["config"], *fields["layers"]]
            needed = [str(entry["digest"]) for entry in entries]
        except (ValueError, KeyError, TypeError):
            return _error(400, "MANIFEST_INVALID", "not the manifest of an image")
        has = self.store.manifest if index else self.store.blob
        lacking = [digest for digest in needed if has(repository, digest) is None]
        if lacking:
            return _error(400, "MANIFEST_BLOB_UNKNOWN", ", ".join(lacking))
        media_type = request.headers.get("Content-Type") or str(fields.get("mediaType", ""))
        digest = self.store.put_manifest(repository, version, media_type, data)
        if ":" in version and version != digest:
            return _error(400, "DIGEST_INVALID", f"the manifest is {digest}")
        return _created(f"/v2/{path}/manifests/{digest}", digest)


def _created(location: str, digest: str) -> HttpResponse:
    return HttpResponse(201, b"", {"Location": location, "Docker-Content-Digest": digest})


def _error(status: int, code: str, text: str) -> HttpResponse:
    return json_response({"errors": [{"code": code, "message": text}]}, status)
