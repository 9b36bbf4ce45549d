"""Answers Docker Engine API requests on the sockets of the hosts and of the workstation.

Each request is rewritten (engine_view.py), checked against the emulated registry and against injected faults, and sent
to the workstation's engine. A host sees the workstation's images, and of all containers only its own.
"""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from launcher.emulator import faults
from launcher.emulator.registry import BlobStore, repository_is_missing
from launcher.emulator.state import Store
from launcher.emulator.vm import engine_view, image_registry, virtual_tpu
from launcher.emulator.vm.engine_client import Engine, EngineError
from launcher.emulator.vm.engine_request import EngineRequest, forward, receive, reply, reply_error
from launcher.emulator.vm.engine_view import EngineRefusal, EngineView
from launcher.emulator.vm.image_registry import ImageTransfer
from launcher.errors import BadInput
from launcher.images.distribution.reference import Reference, parse

_CALL_SECONDS = 600.0


@dataclass(eq=False)
class EngineProxy:
    """The engines of all hosts and of the workstation, in front of the workstation's real engine."""

    store: Store
    engine: Engine
    bind: Callable[[str, str], str]  # maps (hostname, folder of the host) to the workstation's; may raise EngineRefusal
    ca: Path  # a file of certificates that containers of hosts trust
    tpu_volume: str  # for containers that get virtual TPU devices
    blobs: BlobStore  # the registry's content
    transfer: ImageTransfer  # moves images to and from it

    def __post_init__(self) -> None:
        with self.store.read() as state:
            self._emulator, self._storage = state.id, state.storage

    # -- the workstation

    def serve_workstation(self, connection: socket.socket) -> None:
        """Answers a request of the workstation's docker client, with an error if it is refused or no engine answers."""
        _serve(connection, self._answer_workstation)

    def _answer_workstation(self, request: EngineRequest) -> None:
        """Labels new containers; answers pushes to Google's registries and image inspections; forwards the rest."""
        parts = request.path.strip("/").split("/")
        if request.method == "POST" and request.path == "/containers/create":
            body = request.json()
            image = self._image_id(str(body.get("Image", "")), only_pushed=False)
            body = engine_view.create_on_workstation(body, self._emulator, self._storage, image=image)
            return self._call(request, "/containers/create", body)
        if parts[0] == "images" and len(parts) > 2:
            name = unquote("/".join(parts[1:-1]))
            if request.method == "POST" and parts[-1] == "push" and image_registry.is_registry(name):
                return self._push(request, parse(name))
            if request.method == "GET" and parts[-1] == "json":
                return self._inspect_image(request, name, only_pushed=False)
        return self._forward(request)

    def _push(self, request: EngineRequest, reference: Reference) -> None:
        """Enters an image as pushed, under the request's tag; sends bytes to the registry if `full_pushes`. Raises
        EngineRefusal for an unknown image, a missing repository or a registry that is down."""
        repository = reference.repository
        self._refuse_when_broken("", image=f"{reference}")
        with self.store.read() as state:
            full = state.full_pushes
            if repository_is_missing(state, repository):
                raise EngineRefusal(404, f'name unknown: Repository "{repository.split("/")[2]}" not found')
        tag = request.query.get("tag") or reference.tag
        if not tag:
            raise EngineRefusal(400, "docker push --all-tags is not emulated: push one tag")
        status, data = self.engine.raw("GET", f"/images/{quote(f'{repository}:{tag}', safe='/:')}/json")
        if status != 200:
            raise EngineRefusal(404, f"An image does not exist locally with the tag: {repository}")
        image_id = json.loads(data)["Id"]
        digest = self.transfer.push(image_id, repository, tag) if full else image_id
        with self.store.change() as state:
            image_registry.enter(state.pushed, repository, tag, image_id, digest)
        reply(request.connection, 200, image_registry.push_progress(repository, tag, digest))

    # -- a host

    def serve_host(self, hostname: str, connection: socket.socket) -> None:
        """Answers a request of a host's docker client, with an error if it is refused or no engine answers."""
        view = EngineView(self._emulator, hostname)
        _serve(connection, lambda request: self._answer_host(request, view))

    def _answer_host(self, request: EngineRequest, view: EngineView) -> None:
        """Answers a request about the engine, images, or the host's own containers; else raises EngineRefusal."""
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        match (request.method, parts):
            case ("GET" | "HEAD", ["_ping" | "version"]) | ("GET", ["images", "json"]):
                self._forward(request)
            case ("GET", ["info"]):
                self._call(request, "/info", None, lambda value: {**value, "Name": view.hostname})
            case ("POST", ["auth"]):
                reply(request.connection, 200, b'{"Status": "Login Succeeded", "IdentityToken": ""}')
            case (_, ["exec", identifier, _]):
                process = self.engine.call("GET", f"/exec/{quote(identifier, safe='')}/json")
                self._own_container(process["ContainerID"], view)
                self._forward(request)
            case ("POST", ["images", "create"]):
                self._refuse_when_broken(view.hostname, image=request.query.get("fromImage", ""))
                self._pull(request, view.hostname)
            case ("GET", ["images", *name, "json"]):
                self._refuse_unless_pulled(view.hostname, "/".join(name))
                self._inspect_image(request, "/".join(name), only_pushed=True)
            case ("DELETE" | "POST", ["images", *_]):
                raise EngineRefusal(
                    409, "the images of an emulated TPU VM are the workstation's: remove, tag or push them there"
                )
            case ("GET", ["containers", "json"]):
                request.query, names = engine_view.listing_query(request.query, view)
                present = partial(engine_view.present_listing, view=view, names=names)
                self._call(request, "/containers/json", None, present)
            case ("POST", ["containers", "create"]):
                self._create_container(request, view)
            case (_, ["containers", name, *action]):
                self._answer_container(request, view, name, action)
            case _:
                raise _unavailable(request, parts)

    def _answer_container(self, request: EngineRequest, view: EngineView, name: str, action: list[str]) -> None:
        """Answers a request about a container of the host. Raises EngineRefusal if it is no container of this host."""
        path = f"/containers/{self._own_container(name, view)}"
        match (request.method, action):
            case ("DELETE", []):
                self._forward(request, path)
            case ("GET", ["json"]):
                self._call(request, f"{path}/json", None, lambda value: self._present_container(value, view))
            case ("POST", ["rename"]):
                request.query["name"] = view.prefix + request.query.get("name", "").removeprefix("/")
                self._call(request, f"{path}/rename", None, view=view)
            case (_, [verb, *rest]) if verb in engine_view.CONTAINER_ACTIONS:
                self._forward(request, "/".join([path, verb, *rest]))
            case _:
                raise _unavailable(request, ["containers", name])

    def _create_container(self, request: EngineRequest, view: EngineView) -> None:
        """Creates a container for the host. Raises EngineRefusal if its engine is broken or the image not pulled."""
        body = request.json()
        name, image_name = request.query.get("name", ""), str(body.get("Image", ""))
        self._refuse_when_broken(view.hostname)
        # The engine makes up a name where none is given. It gets no prefix, and none is stripped when it is shown.
        if name:
            request.query["name"] = view.prefix + name.removeprefix("/")
        image = self._image_id(image_name, only_pushed=True)
        self._refuse_unless_pulled(view.hostname, image_name)
        new = engine_view.create_on_host(
            body,
            view,
            bind=lambda path: self.bind(view.hostname, path),
            volume=lambda volume: self._create_volume(volume, view),
            image=image,
            ca=str(self.ca),
            tpu_volume=self.tpu_volume if self._has_virtual_tpu(view.hostname, image) else None,
        )
        self._call(request, "/containers/create", new, view=view)

    def _has_virtual_tpu(self, hostname: str, image: str) -> bool:
        """Returns whether a container of the image gets TPU devices on this host: its framework can load them on a
        slice of so many hosts."""
        with self.store.read() as state:
            entry = state.find_host(hostname)
        if entry is None:
            return False
        labels = self.engine.call("GET", f"/images/{image}/json")["Config"].get("Labels")
        return virtual_tpu.serves(labels, len(entry[0].hosts))

    def _create_volume(self, name: str, view: EngineView) -> str:
        """Creates a volume of the host unless it exists; returns its name on the workstation's engine."""
        labels = dict(label.split("=", 1) for label in view.labels)
        self.engine.call("POST", "/volumes/create", body={"Name": view.prefix + name, "Labels": labels})
        return view.prefix + name

    def _own_container(self, name: str, view: EngineView) -> str:
        """Returns the id of a container of the host. Raises EngineRefusal when the host has none of that name."""
        return engine_view.resolve_container(name, self.engine.containers(*view.labels), view)

    def _pull(self, request: EngineRequest, hostname: str) -> None:
        """Enters an image of Google's registries as pulled by the host; moves bytes only if the workstation's store
        lacks it. Forwards other pulls. Raises EngineRefusal for a wrong token, or an image that was not pushed."""
        name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
        if not image_registry.is_registry(name):
            return self._forward(request)
        reference = parse(name if not tag else f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}")
        with self.store.read() as state:
            entry = state.find_host(hostname)
            token = entry[1].token if entry else ""
        if image_registry.password(request.headers.get("X-Registry-Auth", "")) != token:
            raise EngineRefusal(500, image_registry.unauthenticated(reference))
        image = self._fetch(reference)
        if image is None:
            raise EngineRefusal(404, image_registry.unknown(reference))
        if not self._has_image(image):
            reason = "it was pushed, and then removed from the workstation's store; push it again"
            raise EngineRefusal(404, f"{image_registry.unknown(reference)} ({reason})")
        with self.store.change() as state:
            if (entry := state.find_host(hostname)) and image not in entry[1].pulled:
                entry[1].pulled.append(image)
        return reply(request.connection, 200, image_registry.pull_progress(reference, image))

    def _fetch(self, reference: Reference) -> str | None:
        """Returns the id of a registry's image, or None. The engine pulls it if only the registry has its bytes."""
        held = self.blobs.manifest(reference.repository, reference.version)
        with self.store.read() as state:
            image = state.pushed.get(reference.repository, {}).get(held[0] if held else reference.version)
        if held is None or (image is not None and self._has_image(image)):
            return image
        image = self.transfer.pull(reference, held[0])
        with self.store.change() as state:
            image_registry.enter(state.pushed, reference.repository, reference.version, image, held[0])
        return image

    def _has_image(self, image: str) -> bool:
        return self.engine.raw("GET", f"/images/{image}/json")[0] == 200

    # -- both

    def _fault_message(self, hostname: str, image: str = "") -> str | None:
        """Returns the injected error of a host's engine ("": the workstation's) or `image`'s registry; None if none."""
        with self.store.read() as state:
            return faults.engine_trouble(state, hostname, registry=image_registry.is_registry(image))

    def _refuse_when_broken(self, hostname: str, *, image: str = "") -> None:
        """Raises EngineRefusal while a fault affects this engine or the registry of `image`."""
        if message := self._fault_message(hostname, image):
            raise EngineRefusal(500, message)

    def _refuse_unless_pulled(self, hostname: str, name: str) -> None:
        """Raises EngineRefusal (404, no such image) for a registry's image that the host has not pulled, or while a
        fault affects the host's engine or the registry."""
        if image_registry.is_registry(name):
            if self._fault_message(hostname, name):
                raise EngineRefusal(404, f"No such image: {name}")
            with self.store.read() as state:
                entry = state.find_host(hostname)
                if entry is None or image_registry.resolve(state.pushed, name) not in entry[1].pulled:
                    raise EngineRefusal(404, f"No such image: {name}")

    def _image_id(self, name: str, *, only_pushed: bool) -> str:
        """Returns the image id for a registry's name (without `only_pushed` for a digest alone: a tag is the
        workstation's) and any other name unchanged. With it, raises EngineRefusal for a registry's name that was not
        pushed."""
        if not image_registry.is_registry(name):
            return name
        with self.store.read() as state:
            image = image_registry.resolve(state.pushed, name)
        if image is None and only_pushed:
            raise EngineRefusal(404, f"No such image: {name}")
        # On the workstation a tag is its own engine's, pushed or not; only a digest needs the registry.
        return image if image is not None and (only_pushed or "@" in name) else name

    def _inspect_image(self, request: EngineRequest, name: str, *, only_pushed: bool) -> None:
        """Replies with an image's inspection, and the digests under which it was pushed. Raises EngineRefusal for a
        name in a registry that must have been pushed (`only_pushed`) and was not."""
        image = self._image_id(name, only_pushed=only_pushed)
        with self.store.read() as state:
            pushed = {repository: dict(versions) for repository, versions in state.pushed.items()}
        path = f"/images/{quote(image, safe='/:@')}/json"
        self._call(request, path, None, lambda value: image_registry.with_digests(value, pushed))

    def _present_container(self, value: dict[str, Any], view: EngineView) -> dict[str, Any]:
        """Returns the inspection of a container as its host sees it. For a container that has exited, asks the engine
        whether the host went down with it."""
        host: dict[str, Any] | None = None
        if value["State"]["Status"] == "exited":
            host = self.engine.call("GET", f"/containers/{view.hostname}/json")["State"]
        return engine_view.present_container(value, view, host)

    def _call(
        self,
        request: EngineRequest,
        path: str,
        body: Any,
        present: Callable[[Any], Any] = lambda value: value,
        view: EngineView | None = None,
    ) -> None:
        """Calls the engine and replies with its JSON, changed by `present`. In errors, names lose the prefix of
        `view`."""
        method, query = request.method, request.query
        status, data = self.engine.raw(method, request.version + path, query, body, timeout=_CALL_SECONDS)
        if status < 300 and data.strip():
            data = json.dumps(present(json.loads(data))).encode()
        elif view is not None:
            data = data.replace(view.prefix.encode(), b"")
        reply(request.connection, status, data)

    def _forward(self, request: EngineRequest, path: str | None = None) -> None:
        """Passes a request through, with another path if one is given."""
        forward(request, self.engine.path, request.path if path is None else path)


def _serve(connection: socket.socket, answer: Callable[[EngineRequest], None]) -> None:
    """Reads one request and answers it; refusals and a missing engine become errors in the engine's format."""
    try:
        connection.setblocking(True)
        request = receive(connection)
        if request is not None:
            answer(request)
    except EngineRefusal as refusal:
        reply_error(connection, refusal.status, str(refusal))
    except BadInput as error:
        reply_error(connection, 400, str(error))
    except EngineError as error:
        reply_error(connection, error.status, str(error).split(": ", 1)[-1])
    except (BrokenPipeError, ConnectionResetError):
        pass
    except OSError as error:
        reply_error(connection, 503, f"the workstation's engine does not answer: {error}")


def _unavailable(request: EngineRequest, parts: list[str]) -> EngineRefusal:
    """Returns the refusal of a request: 404 for a GET of one object, so that docker tries the next kind; else 403."""
    if request.method == "GET" and len(parts) > 1:
        # `docker inspect NAME` tries every kind of object in turn, and goes on only after a 404.
        kind, name = parts[0].removesuffix("s"), parts[1]
        return EngineRefusal(404, f"no such {kind}: {name} (an emulated TPU VM has containers and images)")
    return EngineRefusal(403, f"{request.method} {request.path} is not available on an emulated TPU VM")
