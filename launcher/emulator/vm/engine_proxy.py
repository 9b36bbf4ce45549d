"""Answers Docker Engine API requests on the sockets of the hosts and of the workstation.

Each request is rewritten (engine_view.py), checked against the emulated registry and against injected faults, and sent
to the workstation's engine. A host sees its own containers and volumes, images that it pulled, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from launcher.emulator import faults
from launcher.emulator.api import repositories
from launcher.emulator.registry.blobs import BlobStore
from launcher.emulator.state import Store
from launcher.emulator.vm import engine_view, metadata, registry, virtual_tpu
from launcher.emulator.vm.engine_client import Engine, EngineError, UnixConnection
from launcher.emulator.vm.engine_request import (
    EngineRequest,
    close_after,
    forward,
    receive,
    reply,
    reply_error,
    reply_json,
)
from launcher.emulator.vm.engine_view import HostView, Refused
from launcher.emulator.vm.hosts import find_host
from launcher.emulator.vm.registry_transfer import RegistryTransfer

log = logging.getLogger(__name__)

_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFEST_BYTES = 2000  # any size will do: nobody fetches the manifest
_CALL_SECONDS = 600.0


class EngineProxy:
    """Answers engine requests, of hosts and of the workstation."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        bind: Callable[[str, str], str],
        ca: Path,
        tpu_volume: str,
        blobs: BlobStore,
        transfer: RegistryTransfer,
    ) -> None:
        """Makes a proxy.

        Args:
            store: the emulator's state: pushed images, hosts, faults.
            engine: the workstation's engine.
            bind: (hostname, folder of the host) -> folder of the workstation; raises Refused.
            ca: certificates that containers of hosts trust, a file of the workstation.
            tpu_volume: the volume of the virtual TPU, for containers on slices of one host.
            blobs: what the registry holds.
            transfer: moves images between the engine and the registry.
        """
        self._blobs, self._transfer = blobs, transfer
        self._store = store
        self._engine = engine
        self._ca = str(ca)
        self._tpu_volume = tpu_volume
        self._bind = bind
        with store.read() as state:
            self._emulator, self._storage = state.id, f"http://127.0.0.1:{state.port}"

    # -- the workstation

    def serve_workstation(self, connection: socket.socket) -> None:
        """Answers the one request of a connection to the workstation's socket."""
        _serve(connection, self._answer_workstation)

    def _answer_workstation(self, request: EngineRequest) -> None:
        parts = request.path.strip("/").split("/")
        if request.method == "POST" and request.path == "/containers/create":
            body = request.json()
            image = self._image_id(str(body.get("Image", "")), only_pushed=False)
            body = engine_view.create_on_workstation(body, self._emulator, self._storage, image=image)
            return self._call(request, "/containers/create", body)
        if parts[0] == "images" and len(parts) > 2:
            name = unquote("/".join(parts[1:-1]))
            if request.method == "POST" and parts[-1] == "push" and registry.is_registry(name):
                return self._push(request, name)
            if request.method == "GET" and parts[-1] == "json":
                return self._inspect_image(request, name, only_pushed=False)
        return self._forward(request)

    def _push(self, request: EngineRequest, name: str) -> None:
        self._refuse_when_broken("", registry_of=name)
        reference = registry.parse(name)
        with self._store.read() as state:
            repository_required = any(fault.kind == "repository" for fault in state.faults)
            if repository_required and not repositories.is_there(state, reference.repository):
                raise Refused(404, f'name unknown: Repository "{reference.repository.split("/")[2]}" not found')
        tag = request.query.get("tag") or reference.tag
        names = [f"{reference.repository}:{tag}"] if tag else self._tagged_names(reference.repository)
        status, data = self._engine.raw("GET", f"/images/{quote(names[0], safe='/:')}/json") if names else (404, b"")
        if status != 200:
            raise Refused(404, f"An image does not exist locally with the tag: {reference.repository}")
        with self._store.read() as state:
            full = state.full_pushes
        digest = ""
        for tagged in names:
            pushed_tag = registry.parse(tagged).tag
            image_id = self._engine.call("GET", f"/images/{quote(tagged, safe='/:')}/json")["Id"]
            digest = self._transfer.push(image_id, reference.repository, pushed_tag) if full else ""
            with self._store.change() as state:
                registry.push(state.pushed, reference.repository, pushed_tag, image_id, digest)
        tags = [registry.parse(tagged).tag for tagged in names]
        reply(request.connection, 200, registry.push_progress(reference.repository, tags, json.loads(data), digest))

    def _tagged_names(self, repository: str) -> list[str]:
        """All names with a tag that the workstation's engine has of a repository."""
        images = self._engine.call("GET", "/images/json", {"filters": json.dumps({"reference": [repository]})})
        return [name for image in images for name in image.get("RepoTags") or []]

    # -- a host

    def serve_host(self, hostname: str, connection: socket.socket) -> None:
        """Answers the one request of a connection to a host's engine socket."""
        view = HostView(self._emulator, hostname)
        _serve(connection, lambda request: self._answer_host(request, view))

    def _answer_host(self, request: EngineRequest, view: HostView) -> None:
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        answers = {
            "containers": self._answer_containers,
            "images": self._answer_images,
            "networks": self._answer_networks,
            "volumes": self._answer_volumes,
        }
        if parts[0] in answers:
            answers[parts[0]](request, view, parts[1:])
            return
        match (request.method, parts):
            case ("GET" | "HEAD", ["_ping" | "version"]):
                self._forward(request)
            case ("GET", ["info"]):
                self._call(request, "/info", None, lambda value: {**value, "Name": view.hostname, **self._counts(view)})
            case ("POST", ["auth"]):
                reply_json(request.connection, {"Status": "Login Succeeded", "IdentityToken": ""})
            case ("GET", ["events"]):
                self._stream_events(request, view)
            case (_, ["exec", identifier, _]):
                process = self._engine.call("GET", f"/exec/{quote(identifier, safe='')}/json")
                self._own_container(process["ContainerID"], view)
                self._forward(request)
            case ("GET", ["distribution", *name, "json"]) if registry.is_registry("/".join(name)):
                held = self._blobs.manifest(
                    registry.parse("/".join(name)).repository, registry.parse("/".join(name)).version
                )
                digest = held[0] if held else self._image_id("/".join(name), only_pushed=True)
                descriptor = {"mediaType": _MANIFEST_TYPE, "digest": digest, "size": _MANIFEST_BYTES}
                reply_json(request.connection, {"Descriptor": descriptor, "Platforms": []})
            case _:
                raise _unavailable(request, parts)

    def _answer_containers(self, request: EngineRequest, view: HostView, parts: list[str]) -> None:
        match (request.method, parts):
            case ("GET", ["json"]):
                request.query, names, limit = engine_view.listing_query(request.query, view)
                self._call(
                    request,
                    "/containers/json",
                    None,
                    lambda value: engine_view.present_listing(value, view, names, limit),
                )
            case ("POST", ["create"]):
                self._create_container(request, view)
            case ("POST", ["prune"]):
                request.query = engine_view.own_query(request.query, view)
                self._call(request, "/containers/prune", None)
            case ("DELETE", [name]):
                self._forward(request, f"/containers/{self._own_container(name, view)}")
            case ("GET", [name, "json"]):
                path = f"/containers/{self._own_container(name, view)}/json"
                self._call(request, path, None, lambda value: self._present_container(value, view))
            case ("POST", [name, "rename"]):
                request.query["name"] = view.prefix + request.query.get("name", "").removeprefix("/")
                self._call(request, f"/containers/{self._own_container(name, view)}/rename", None, view=view)
            case (_, [name, action, *rest]) if action in engine_view.CONTAINER_ACTIONS:
                self._forward(request, "/".join(["/containers", self._own_container(name, view), action, *rest]))
            case _:
                raise _unavailable(request, ["containers", *parts])

    def _answer_images(self, request: EngineRequest, view: HostView, parts: list[str]) -> None:
        match (request.method, parts):
            case ("GET", ["json"]):
                self._forward(request)
            case ("GET", [*name, "json"]) if name:
                self._refuse_unless_pulled(view.hostname, "/".join(name))
                self._inspect_image(request, "/".join(name), only_pushed=True)
            case ("GET", [*name, "history"]) if name:
                image = self._image_id("/".join(name), only_pushed=True)
                self._forward(request, f"/images/{quote(image, safe=':')}/history")
            case ("POST", ["create"]):
                self._refuse_when_broken(view.hostname, registry_of=request.query.get("fromImage", ""))
                self._pull(request, view.hostname)
            case ("POST", ["prune"]):
                reply_json(request.connection, {"ImagesDeleted": None, "SpaceReclaimed": 0})
            case ("DELETE" | "POST", _):
                raise Refused(
                    409, "the images of an emulated TPU VM are the workstation's: remove, tag or push them there"
                )
            case _:
                raise _unavailable(request, ["images", *parts])

    def _answer_networks(self, request: EngineRequest, view: HostView, parts: list[str]) -> None:
        match (request.method, parts):
            case ("GET", []):
                self._call(request, "/networks", None, engine_view.present_networks)
            case ("GET", [name]) if name in engine_view.NETWORKS:
                self._forward(request)
            case _:
                raise _unavailable(request, ["networks", *parts])

    def _answer_volumes(self, request: EngineRequest, view: HostView, parts: list[str]) -> None:
        match (request.method, parts):
            case ("GET", []):
                request.query = engine_view.own_query(request.query, view)
                self._call(request, "/volumes", None, lambda value: engine_view.present_volumes(value, view))
            case ("GET", [name]):
                path = f"/volumes/{quote(view.prefix + name, safe='')}"
                self._call(request, path, None, lambda value: engine_view.present_volume(value, view), view)
            case ("DELETE", [name]):
                self._call(request, f"/volumes/{quote(view.prefix + name, safe='')}", None, view=view)
            case _:
                raise _unavailable(request, ["volumes", *parts])

    def _create_container(self, request: EngineRequest, view: HostView) -> None:
        body = request.json()
        self._refuse_when_broken(view.hostname)
        name = request.query.get("name", "")
        # The engine makes up a name where none is given. It gets no prefix, and none is stripped when it is shown.
        if name:
            request.query["name"] = view.prefix + name.removeprefix("/")
        image = self._image_id(str(body.get("Image", "")), only_pushed=True)
        self._refuse_unless_pulled(view.hostname, str(body.get("Image", "")))
        new = engine_view.create_on_host(
            body,
            view,
            bind=lambda path: self._bind(view.hostname, path),
            volume=lambda volume: self._create_volume(volume, view),
            image=image,
            ca=self._ca,
            tpu_volume=self._tpu_volume if self._has_virtual_tpu(view.hostname, image) else None,
        )
        self._call(request, "/containers/create", new, view=view)

    def _has_virtual_tpu(self, hostname: str, image: str) -> bool:
        """Whether a container of the image has TPU devices on this host: the framework in it can load them, and the
        slice has one host, since the devices of several exchange nothing."""
        with self._store.read() as state:
            entry = find_host(state, hostname)
            alone = entry is not None and len(entry[0].hosts) == 1
        return alone and virtual_tpu.serves(self._engine.call("GET", f"/images/{image}/json")["Config"].get("Labels"))

    def _create_volume(self, name: str, view: HostView) -> str:
        """Makes a volume of the host unless it exists; returns its name at the workstation's engine."""
        labels = dict(label.split("=", 1) for label in view.labels)
        self._engine.call("POST", "/volumes/create", body={"Name": view.prefix + name, "Labels": labels})
        return view.prefix + name

    def _own_container(self, name: str, view: HostView) -> str:
        """The id of a container of the host. Raises Refused when it has none of that name."""
        return engine_view.resolve_container(name, self._engine.containers(*view.labels), view)

    def _counts(self, view: HostView) -> dict[str, int]:
        states = [container["State"] for container in self._engine.containers(*view.labels)]
        running, paused = states.count("running"), states.count("paused")
        return {
            "Containers": len(states),
            "ContainersRunning": running,
            "ContainersPaused": paused,
            "ContainersStopped": len(states) - running - paused,
        }

    def _pull(self, request: EngineRequest, hostname: str) -> None:
        """Enters a pushed image as pulled by the host. All hosts share the workstation's store: bytes move only when
        it lacks them, of what was pushed without it."""
        name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
        if not registry.is_registry(name):
            return self._forward(request)
        full_name = name if not tag else f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}"
        reference = registry.parse(full_name)
        with self._store.read() as state:
            entry = find_host(state, hostname)
            token = metadata.token(state, entry[1]) if entry else ""
        if registry.password(request.headers.get("X-Registry-Auth", "")) != token:
            raise Refused(500, registry.unauthenticated(reference))
        image = self._fetch(reference)
        if image is None:
            raise Refused(404, registry.unknown(reference))
        if self._engine.raw("GET", f"/images/{image}/json")[0] != 200:
            reason = "it was pushed, and then removed from the workstation's store; push it again"
            raise Refused(404, f"{registry.unknown(reference)} ({reason})")
        with self._store.change() as state:
            if (entry := find_host(state, hostname)) and image not in entry[1].pulled:
                entry[1].pulled.append(image)
        return reply(request.connection, 200, registry.pull_progress(reference, image))

    def _fetch(self, reference: registry.Reference) -> str | None:
        """The id of a registry's image, which the engine pulls when it was pushed without it; None when there is
        none."""
        held = self._blobs.manifest(reference.repository, reference.version)
        with self._store.read() as state:
            image = state.pushed.get(reference.repository, {}).get(held[0] if held else reference.version)
        if held is None or (image is not None and self._engine.raw("GET", f"/images/{image}/json")[0] == 200):
            return image
        image = self._transfer.pull(reference, held[0])
        with self._store.change() as state:
            registry.push(state.pushed, reference.repository, reference.version, image, held[0])
        return image

    def _stream_events(self, request: EngineRequest, view: HostView) -> None:
        query = engine_view.own_query(request.query, view)
        upstream = UnixConnection(self._engine.path, timeout=None)
        upstream.request("GET", f"{request.version}/events?{urlencode(query)}")
        response = upstream.getresponse()
        # http.client drops its reference to the socket at the end of a response; the thread keeps one.
        upstream_socket = upstream.sock
        threading.Thread(target=close_after, args=(request.connection, upstream_socket), daemon=True).start()
        request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while line := response.readline():
                event = engine_view.present_event(json.loads(line), view)
                request.connection.sendall(json.dumps(event).encode() + b"\n")
        upstream.close()

    # -- both

    def _fault_message(self, hostname: str, *, registry_of: str = "") -> str | None:
        with self._store.read() as state:
            return faults.engine_trouble(state, hostname, registry=registry.is_registry(registry_of))

    def _refuse_when_broken(self, hostname: str, *, registry_of: str = "") -> None:
        """Raises Refused while a fault affects this engine, or the registry of the image `registry_of`."""
        if message := self._fault_message(hostname, registry_of=registry_of):
            raise Refused(500, message)

    def _refuse_unless_pulled(self, hostname: str, name: str) -> None:
        """Raises Refused for a registry's image that this host's engine did not pull; while its registry is down, also
        for one that it did."""
        if registry.is_registry(name):
            if self._fault_message(hostname, registry_of=name):
                raise Refused(404, f"No such image: {name}")
            with self._store.read() as state:
                entry = find_host(state, hostname)
                if entry is None or registry.resolve(state.pushed, name) not in entry[1].pulled:
                    raise Refused(404, f"No such image: {name}")

    def _image_id(self, name: str, *, only_pushed: bool) -> str:
        """The image id of a registry's name; other names as they are. Raises Refused when it must have been pushed and
        was not."""
        if not registry.is_registry(name):
            return name
        with self._store.read() as state:
            image = registry.resolve(state.pushed, name)
        if image is None and only_pushed:
            raise Refused(404, f"No such image: {name}")
        # On the workstation a tag is its own engine's, pushed or not; only a digest needs the registry.
        return image if image is not None and (only_pushed or "@" in name) else name

    def _inspect_image(self, request: EngineRequest, name: str, *, only_pushed: bool) -> None:
        image = self._image_id(name, only_pushed=only_pushed)
        with self._store.read() as state:
            pushed = {repository: dict(versions) for repository, versions in state.pushed.items()}
        path = f"/images/{quote(image, safe='/:@')}/json"
        self._call(request, path, None, lambda value: registry.with_digests(value, pushed))

    def _present_container(self, value: dict[str, Any], view: HostView) -> dict[str, Any]:
        host: dict[str, Any] | None = None
        if value["State"]["Status"] == "exited":
            host = self._engine.call("GET", f"/containers/{view.hostname}/json")["State"]
        return engine_view.present_container(value, view, host)

    def _call(
        self,
        request: EngineRequest,
        path: str,
        body: Any,
        present: Callable[[Any], Any] = lambda value: value,
        view: HostView | None = None,
    ) -> None:
        """Makes a call with a JSON response, changes it with `present`, and replies; error messages lose the prefix of
        `view`."""
        method, query = request.method, request.query
        status, data = self._engine.raw(method, request.version + path, query, body, timeout=_CALL_SECONDS)
        if status < 300 and data.strip():
            data = json.dumps(present(json.loads(data))).encode()
        elif view is not None:
            data = data.replace(view.prefix.encode(), b"")
        reply(request.connection, status, data)

    def _forward(self, request: EngineRequest, path: str | None = None) -> None:
        """Passes a request through, with another path when one is given."""
        forward(request, self._engine.path, request.path if path is None else path)


def _serve(connection: socket.socket, answer: Callable[[EngineRequest], None]) -> None:
    """Reads the request and turns refusals and a missing engine into errors of the engine's shape."""
    try:
        connection.setblocking(True)
        request = receive(connection)
        if request is not None:
            answer(request)
    except Refused as refused:
        reply_error(connection, refused.status, str(refused))
    except EngineError as error:
        reply_error(connection, error.status, str(error).split(": ", 1)[-1])
    except (BrokenPipeError, ConnectionResetError):
        pass
    except OSError as error:
        reply_error(connection, 503, f"the workstation's engine does not answer: {error}")


def _unavailable(request: EngineRequest, parts: list[str]) -> Refused:
    """The refusal of what an emulated TPU VM does not have."""
    if request.method == "GET" and len(parts) > 1:
        # `docker inspect NAME` tries every kind of object in turn, and goes on only after a 404.
        kind, name = parts[0].removesuffix("s"), parts[1]
        return Refused(404, f"no such {kind}: {name} (an emulated TPU VM has containers, images and volumes)")
    return Refused(403, f"{request.method} {request.path} is not available on an emulated TPU VM")
