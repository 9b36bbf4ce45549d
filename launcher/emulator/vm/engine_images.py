"""Artifact Registry as container engines see it: pushes, pulls and inspections of images with names of its hosts.

Image names on hosts of Google's registries belong to the emulated registry, all others to the engine. `docker push`
enters only a name in the state's `pushed` (repository -> tag or digest -> image id): the image stays in the
workstation's store, and its digest is its id. With `EmulatorState.full_pushes` the engine also pushes the bytes into
launcher/emulator/registry.py. Hosts can pull what was pushed either way, and nothing else.

The engine reaches the registry at 127.0.0.1, where engines accept any certificate. A pulled image keeps a name there,
so that it stays in the engine's store until the emulator stops.
"""

import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from launcher.emulator import faults
from launcher.emulator.http_server import HttpResponse
from launcher.emulator.registry import USER, EmulatedRegistry, repository_is_missing
from launcher.emulator.state import Store
from launcher.emulator.vm.engine_client import Engine, EngineError
from launcher.images.repositories import Reference, is_google, parse_reference

_SECONDS = 3600.0  # for a push or a pull
_MANIFEST_BYTES = 2000  # shown after a push of a name; any size will do


def is_registry(name: str) -> bool:
    """Returns whether an image name has a host of Google's registries, and so belongs to the emulated registry."""
    host, slash, _ = name.partition("/")
    return bool(slash) and is_google(host)


@dataclass(eq=False)
class EngineImages:
    """The images of the emulated registry, for the engines of the hosts and of the workstation."""

    store: Store
    engine: Engine
    registry: EmulatedRegistry

    # -- names

    def image_on_workstation(self, name: str) -> str:
        """Returns the id of the image that was pushed under a registry's digest; any other name unchanged: a tag is the
        workstation's engine's own, pushed or not. Raises BadInput for a malformed name."""
        return (self._pushed(parse_reference(name)) or name) if is_registry(name) and "@" in name else name

    def image_on_host(self, hostname: str, name: str) -> str:
        """Returns the id of a registry's image that the host has pulled; a name outside of the registry unchanged.
        Raises EngineError (404, no such image) if it has not, or while a fault affects its engine or the registry;
        BadInput for a malformed name."""
        if not is_registry(name):
            return name
        image = self._pushed(parse_reference(name))
        with self.store.read() as state:
            entry = state.find_host(hostname)
            trouble = faults.engine_trouble(state, hostname, registry=True)
        if image is None or entry is None or image not in entry[1].pulled or trouble:
            raise EngineError(404, f"No such image: {name}")
        return image

    def _pushed(self, reference: Reference, version: str = "") -> str | None:
        """Returns the id of the image that was pushed as `version` ("": the reference's own); None if none was."""
        with self.store.read() as state:
            return state.pushed.get(reference.repository, {}).get(version or reference.version)

    def _enter(self, repository: str, version: str, image: str, digest: str) -> None:
        """Enters an image id in the state's `pushed`: under `version`, a tag or digest, and under `digest`."""
        with self.store.change() as state:
            state.pushed.setdefault(repository, {}).update({version: image, digest: image})

    def add_digests(self, image: dict[str, Any]) -> dict[str, Any]:
        """Returns an image's inspection, with the digests under which it was pushed added to its RepoDigests."""
        with self.store.read() as state:
            ours = [
                f"{repository}@{version}"
                for repository, versions in sorted(state.pushed.items())
                for version, known in versions.items()
                if known == image["Id"] and version.startswith("sha256:")
            ]
        others = [digest for digest in image.get("RepoDigests") or [] if digest not in ours]
        return {**image, "RepoDigests": others + ours}

    def refuse_when_broken(self, hostname: str, *, image: str = "") -> None:
        """Raises EngineError while a fault affects a host's engine ("": the workstation's) or `image`'s registry."""
        with self.store.read() as state:
            message = faults.engine_trouble(state, hostname, registry=is_registry(image))
        if message:
            raise EngineError(500, message)

    # -- pushes

    def push(self, reference: Reference, tag: str) -> HttpResponse:
        """Enters an image of the workstation as pushed, under `tag` ("": the reference's); with `full_pushes` first
        sends its bytes to the registry. Returns the progress that docker shows. Raises EngineError for an unknown
        image, no tag, a missing repository, a full disk or registry that is down (faults), or a push that fails;
        OSError when the engine is down or silent."""
        repository, tag = reference.repository, tag or reference.tag
        self.refuse_when_broken("", image=f"{reference}")
        with self.store.read() as state:
            full = state.full_pushes
            if repository_is_missing(state, repository):
                raise EngineError(404, f'name unknown: Repository "{repository.split("/")[2]}" not found')
        if not tag:
            raise EngineError(400, "docker push --all-tags is not emulated: push one tag")
        status, data = self.engine.raw("GET", f"/images/{quote(f'{repository}:{tag}', safe='/:')}/json")
        if status != 200:
            raise EngineError(404, f"An image does not exist locally with the tag: {repository}")
        image = json.loads(data)["Id"]
        digest = self._push_bytes(image, repository, tag) if full else image
        self._enter(repository, tag, image, digest)
        return _progress(
            {"status": f"The push refers to repository [{repository}]"},
            {"status": f"{tag}: digest: {digest} size: {_MANIFEST_BYTES}"},
            {"progressDetail": {}, "aux": {"Tag": tag, "Digest": digest, "Size": _MANIFEST_BYTES}},
        )

    def _push_bytes(self, image: str, repository: str, tag: str) -> str:
        """Has the engine push an image into the registry, by a name that is removed again. Returns the digest. Raises
        EngineError, or OSError when the engine is down or silent."""
        name = f"{self._engine_prefix()}{repository}"
        self.engine.call("POST", f"/images/{quote(image, safe=':')}/tag", {"repo": name, "tag": tag})
        try:
            records = self._transfer(f"/images/{quote(name, safe='/:')}/push", {"tag": tag})
        finally:
            with contextlib.suppress(EngineError):
                self.engine.call("DELETE", f"/images/{quote(f'{name}:{tag}', safe='/:')}")
        digests = [record["aux"]["Digest"] for record in records if "Digest" in record.get("aux", {})]
        if not digests:
            raise EngineError(500, f"the engine pushed {repository}:{tag} without reporting a digest")
        return str(digests[-1])

    # -- pulls

    def pull(self, hostname: str, name: str, tag: str, login: str) -> HttpResponse:
        """Enters an image as pulled by the host; moves bytes only if the workstation's store lacks it and a full push
        sent them. `tag`: a tag or digest, "" if in `name`; `login`: the X-Registry-Auth header. Raises EngineError for
        a wrong token, or an image that was not pushed, or was removed from the store since; BadInput for a malformed
        name; OSError when the engine is down or silent."""
        separator = "@" if tag.startswith("sha256:") else ":"
        reference = parse_reference(f"{name}{separator}{tag}" if tag else name)
        with self.store.read() as state:
            entry = state.find_host(hostname)
            token = entry[1].token if entry else ""
        if _password(login) != token:
            raise EngineError(
                500,
                f'Head "https://{reference.host}/v2/{reference.path}/manifests/{reference.version}": denied: '
                "Unauthenticated request. Unauthenticated requests do not have permission "
                f'"artifactregistry.repositories.downloadArtifacts" on resource "{reference.path}" (or it may not '
                "exist)",
            )
        unknown = f'manifest for {reference} not found: manifest unknown: Failed to fetch "{reference.version}"'
        image = self._fetch(reference)
        if image is None:
            raise EngineError(404, unknown)
        if not self._is_stored(image):
            reason = "it was pushed, and then removed from the workstation's store; push it again"
            raise EngineError(404, f"{unknown} ({reason})")
        with self.store.change() as state:
            if (entry := state.find_host(hostname)) and image not in entry[1].pulled:
                entry[1].pulled.append(image)
        return _progress(
            {"status": f"Pulling from {reference.path}", "id": reference.version},
            {"status": f"Digest: {image}"},
            {"status": f"Status: Image is up to date for {reference}"},
        )

    def _fetch(self, reference: Reference) -> str | None:
        """Returns the id of a registry's image, which the store may lack, or None if it was not pushed. The engine
        pulls it if only the registry has its bytes. Raises EngineError, OSError."""
        held = self.registry.manifest(reference.repository, reference.version)
        image = self._pushed(reference, held[0] if held else "")
        if held is None or (image is not None and self._is_stored(image)):
            return image
        name, digest = f"{self._engine_prefix()}{reference.repository}", held[0]
        self._transfer("/images/create", {"fromImage": name, "tag": digest})
        image = str(self.engine.call("GET", f"/images/{quote(f'{name}@{digest}', safe='/:@')}/json")["Id"])
        self._enter(reference.repository, reference.version, image, digest)
        return image

    def _is_stored(self, image: str) -> bool:
        return self.engine.raw("GET", f"/images/{image}/json")[0] == 200

    # -- bytes

    def _engine_prefix(self) -> str:
        """Returns "127.0.0.1:PORT/", which begins the engine's names of images in the emulated registry."""
        with self.store.read() as state:
            return f"127.0.0.1:{state.registry_port}/"

    def _transfer(self, path: str, query: dict[str, str]) -> list[dict[str, dict[str, str]]]:
        """Has the engine push or pull. Returns its records. Raises EngineError for a failure, OSError when the engine
        is down, or silent for an hour."""
        with self.store.read() as state:
            login = json.dumps({"username": USER, "password": state.token}).encode()
        headers = {"X-Registry-Auth": base64.urlsafe_b64encode(login).decode()}
        status, data = self.engine.raw("POST", path, query, headers=headers, timeout=_SECONDS)
        records = [json.loads(line) for line in data.splitlines() if line.strip()]
        failures = [str(record["error"]) for record in records if "error" in record]
        if status >= 400 or failures:
            raise EngineError(500, failures[-1] if failures else data.decode(errors="replace")[:300])
        return records


def remove_pulled(engine: Engine, port: int) -> None:
    """Removes the names of images pulled from the registry at this port, and the images that have no other name."""
    for image in engine.call("GET", "/images/json"):
        for name in image.get("RepoDigests") or []:
            if name.startswith(f"127.0.0.1:{port}/"):
                with contextlib.suppress(EngineError):
                    engine.call("DELETE", f"/images/{quote(name, safe='/:@')}")


def _password(header: str) -> str | None:
    """Returns the password in an X-Registry-Auth header, or None when it has none."""
    try:
        return str(json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))["password"])
    except (ValueError, KeyError, TypeError):
        return None


def _progress(*lines: dict[str, Any]) -> HttpResponse:
    """Returns the JSON lines that an engine streams during a push or a pull."""
    body = "".join(json.dumps(line) + "\r\n" for line in lines)
    return HttpResponse(200, body.encode(), {"Content-Type": "application/json"})
