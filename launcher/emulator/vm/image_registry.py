"""Artifact Registry as container engines see it: the names of pushed images, and pushes and pulls of their bytes.

Image names on hosts of Google's registries belong to the emulated registry, all others to the engine. `docker push`
enters only a name in the state's `pushed` (repository -> tag or digest -> image id): the image stays in the
workstation's store, and its digest is its id. With `EmulatorState.full_pushes` the engine also pushes the bytes into
launcher/emulator/registry. Hosts can pull what was pushed either way, and nothing else.

The engine reaches the registry at 127.0.0.1, where engines accept any certificate. A pulled image keeps a name there,
so that it stays in the engine's store until the emulator stops.
"""

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from launcher.emulator.vm.engine_client import Engine, EngineError
from launcher.emulator.vm.engine_view import EngineRefusal
from launcher.images.distribution.reference import Reference, is_google, parse

_USER = "oauth2accesstoken"
_SECONDS = 3600.0  # for a push or a pull
_MANIFEST_BYTES = 2000  # shown after a push of a name; any size will do


def is_registry(name: str) -> bool:
    """Returns whether an image name belongs to the emulated registry."""
    host, slash, _ = name.partition("/")
    return bool(slash) and is_google(host)


def resolve(pushed: dict[str, dict[str, str]], name: str) -> str | None:
    """Returns the image id that a registry's image name stands for, or None when it was never pushed."""
    reference = parse(name)
    return pushed.get(reference.repository, {}).get(reference.version)


def enter(pushed: dict[str, dict[str, str]], repository: str, tag: str, image: str, digest: str = "") -> None:
    """Records in `pushed` an image id under a tag and a digest. Without a digest (no bytes pushed), the id is used."""
    pushed.setdefault(repository, {}).update({tag: image, digest or image: image})


def password(header: str) -> str | None:
    """Returns the password in an X-Registry-Auth header, or None when it has none."""
    try:
        credentials = json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))
        return str(credentials["password"])
    except (ValueError, KeyError, TypeError):
        return None


def unauthenticated(reference: Reference) -> str:
    """Returns Artifact Registry's message for a request without a service account's token."""
    return (
        f'Head "https://{reference.host}/v2/{reference.path}/manifests/{reference.version}": denied: Unauthenticated '
        'request. Unauthenticated requests do not have permission "artifactregistry.repositories.downloadArtifacts" on '
        f'resource "{reference.path}" (or it may not exist)'
    )


def unknown(reference: Reference) -> str:
    """Returns the message for a pull of an image that the registry does not have."""
    return f'manifest for {reference} not found: manifest unknown: Failed to fetch "{reference.version}"'


def push_progress(repository: str, tag: str, digest: str) -> bytes:
    """Returns what the engine streams during a push: JSON lines, the last an `aux` record of the digest."""
    return _json_lines(
        {"status": f"The push refers to repository [{repository}]"},
        {"status": f"{tag}: digest: {digest} size: {_MANIFEST_BYTES}"},
        {"progressDetail": {}, "aux": {"Tag": tag, "Digest": digest, "Size": _MANIFEST_BYTES}},
    )


def pull_progress(reference: Reference, image: str) -> bytes:
    """Returns what the engine streams during a pull of an image that is in its store."""
    return _json_lines(
        {"status": f"Pulling from {reference.path}", "id": reference.version},
        {"status": f"Digest: {image}"},
        {"status": f"Status: Image is up to date for {reference}"},
    )


def _json_lines(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(line) + "\r\n" for line in lines).encode()


def with_digests(image: dict[str, Any], pushed: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Returns an image's inspect response with the digests added under which it was pushed. `pushed`: image ids by
    repository and version (tag or digest)."""
    ours = [
        f"{repository}@{version}"
        for repository, versions in sorted(pushed.items())
        for version, known in versions.items()
        if known == image["Id"] and version.startswith("sha256:")
    ]
    others = [digest for digest in image.get("RepoDigests") or [] if digest not in ours]
    return {**image, "RepoDigests": others + ours}


class ImageTransfer:
    """Moves images between the workstation's engine and the emulated registry, by the engine's own push and pull."""

    def __init__(self, engine: Engine, port: Callable[[], int], token: str) -> None:
        """Takes a function that returns the registry's port on 127.0.0.1, and the engine's access token to it."""
        self._engine, self._port = engine, port
        login = json.dumps({"username": _USER, "password": token}).encode()
        self._login = {"X-Registry-Auth": base64.urlsafe_b64encode(login).decode()}

    def push(self, image: str, repository: str, tag: str) -> str:
        """Pushes an image of the engine's store as repository:tag. Returns its digest, or raises EngineRefusal."""
        name = f"{_engine_prefix(self._port())}{repository}"
        self._engine.call("POST", f"/images/{quote(image, safe=':')}/tag", {"repo": name, "tag": tag})
        try:
            records = self._transfer(f"/images/{quote(name, safe='/:')}/push", {"tag": tag})
        finally:
            with contextlib.suppress(EngineError):
                self._engine.call("DELETE", f"/images/{quote(f'{name}:{tag}', safe='/:')}")
        digests = [record["aux"]["Digest"] for record in records if "Digest" in record.get("aux", {})]
        if not digests:
            raise EngineRefusal(500, f"the engine pushed {repository}:{tag} without reporting a digest")
        return str(digests[-1])

    def pull(self, reference: Reference, digest: str) -> str:
        """Has the engine pull an image by digest from the emulated registry; returns its id. Raises EngineRefusal."""
        name = f"{_engine_prefix(self._port())}{reference.repository}"
        self._transfer("/images/create", {"fromImage": name, "tag": digest})
        image = self._engine.call("GET", f"/images/{quote(f'{name}@{digest}', safe='/:@')}/json")
        return str(image["Id"])

    def _transfer(self, path: str, query: dict[str, str]) -> list[dict[str, dict[str, str]]]:
        """Returns the records that a push or pull streams; a record of a failure raises EngineRefusal."""
        status, data = self._engine.raw("POST", path, query, headers=self._login, timeout=_SECONDS)
        records = [json.loads(line) for line in data.splitlines() if line.strip()]
        failures = [str(record["error"]) for record in records if "error" in record]
        if status >= 400 or failures:
            raise EngineRefusal(500, failures[-1] if failures else data.decode(errors="replace")[:300])
        return records


def remove_pulled(engine: Engine, port: int) -> None:
    """Removes the names of images pulled from the registry at this port, and the images that have no other name."""
    for image in engine.call("GET", "/images/json"):
        for name in image.get("RepoDigests") or []:
            if name.startswith(_engine_prefix(port)):
                with contextlib.suppress(EngineError):
                    engine.call("DELETE", f"/images/{quote(name, safe='/:@')}")


def _engine_prefix(port: int) -> str:
    return f"127.0.0.1:{port}/"
