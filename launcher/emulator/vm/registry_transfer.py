"""Images between the workstation's engine and the emulated registry, in bytes, by the engine's own push and pull.

The engine reaches the registry at 127.0.0.1, where engines accept a certificate that they don't know. What it pulled
keeps a name there, so that it stays in the engine's store until the emulator is stopped.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from urllib.parse import quote

from launcher.emulator.vm.engine_client import Engine, EngineError
from launcher.emulator.vm.engine_view import Refused
from launcher.emulator.vm.registry import Reference

_USER = "oauth2accesstoken"
_SECONDS = 3600.0


class RegistryTransfer:
    """Pushes to the registry and pulls from it."""

    def __init__(self, engine: Engine, port: Callable[[], int], token: str) -> None:
        """Connects nothing yet.

        Args:
            engine: the workstation's.
            port: of the registry on 127.0.0.1.
            token: with which the registry lets the engine in.
        """
        self._engine, self._port = engine, port
        login = json.dumps({"username": _USER, "password": token}).encode()
        self._login = {"X-Registry-Auth": base64.urlsafe_b64encode(login).decode()}

    def push(self, image: str, repository: str, tag: str) -> str:
        """Pushes an image of the engine's store under repository:tag; returns its digest. Raises Refused."""
        name = f"{_address(self._port())}{repository}"
        query = {"repo": name, "tag": tag}
        self._engine.call("POST", f"/images/{quote(image, safe=':')}/tag", query)
        try:
            lines = self._transfer(f"/images/{quote(name, safe='/:')}/push", {"tag": tag})
        finally:
            with contextlib.suppress(EngineError):
                self._engine.call("DELETE", f"/images/{quote(f'{name}:{tag}', safe='/:')}")
        digests = [line["aux"]["Digest"] for line in lines if "Digest" in line.get("aux", {})]
        if not digests:
            raise Refused(500, f"the engine pushed {repository}:{tag} and named no digest")
        return str(digests[-1])

    def pull(self, reference: Reference, digest: str) -> str:
        """Pulls an image by its digest, as far as the engine's store lacks its layers; returns its id there. Raises
        Refused."""
        name = f"{_address(self._port())}{reference.repository}"
        self._transfer("/images/create", {"fromImage": name, "tag": digest})
        image = self._engine.call("GET", f"/images/{quote(f'{name}@{digest}', safe='/:@')}/json")
        return str(image["Id"])

    def _transfer(self, path: str, query: dict[str, str]) -> list[dict[str, dict[str, str]]]:
        """The records of a push or pull; its failure is a record too."""
        status, data = self._engine.raw("POST", path, query, headers=self._login, timeout=_SECONDS)
        records = [json.loads(line) for line in data.splitlines() if line.strip()]
        failures = [str(record["error"]) for record in records if "error" in record]
        if status >= 400 or failures:
            raise Refused(500, failures[-1] if failures else data.decode(errors="replace")[:300])
        return records


def remove_pulled(engine: Engine, port: int) -> None:
    """Removes the names of what was pulled from a registry at this port, and the images that have no other one."""
    for image in engine.call("GET", "/images/json"):
        for name in image.get("RepoDigests") or []:
            if name.startswith(_address(port)):
                with contextlib.suppress(EngineError):
                    engine.call("DELETE", f"/images/{quote(name, safe='/:@')}")


def _address(port: int) -> str:
    return f"127.0.0.1:{port}/"
