"""Answers Docker Engine API requests on the sockets of the hosts and of the workstation.

Each request is rewritten (engine_view.py), checked against the emulated registry (engine_images.py) and against
injected faults, and sent to the workstation's engine. A host sees the workstation's images, and of all containers only
its own.

Attach, exec, `logs -f` and BuildKit's h2c sessions turn the connection into a stream; `_forward` passes the bytes
through unchanged. If either side disconnects, it closes both connections, and the engine keeps what it has done.
"""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response, serve_http
from launcher.emulator.state import Store
from launcher.emulator.vm import engine_view, virtual_tpu
from launcher.emulator.vm.engine_client import HOST_LABEL, Engine, EngineError
from launcher.emulator.vm.engine_images import EngineImages, is_registry
from launcher.emulator.vm.engine_view import EngineView
from launcher.errors import BadInput
from launcher.images.repositories import parse_reference

_CALL_SECONDS = 600.0
_JSON = {"Content-Type": "application/json"}  # docker reads an error of no other type
_BLOCK = 1 << 18


Reply = HttpResponse | None  # None: the request was forwarded, and the engine has answered


@dataclass(eq=False)
class EngineProxy:
    """The engines of all hosts and of the workstation, in front of the workstation's real engine."""

    store: Store
    engine: Engine
    images: EngineImages
    bind: Callable[[str, str], str]  # maps (hostname, folder of the host) to the workstation's; may raise EngineError
    ca: Path  # a file of certificates that containers of hosts trust
    emulator: str  # its id
    tpu_volume: str  # for containers that get virtual TPU devices

    # -- the workstation

    def serve_workstation(self, connection: socket.socket) -> None:
        """Answers the requests of the workstation's docker client, and ends, as `serve_host`."""
        _serve(connection, self._answer_workstation)

    def _answer_workstation(self, request: HttpRequest) -> Reply:
        """Answers pushes to Google's registries and image inspections; changes new containers as
        `create_on_workstation`; forwards the rest. Raises EngineError, BadInput, and OSError without the engine."""
        match (request.method, _split_path(request.path)[1]):
            case ("POST", ["containers", "create"]):
                body = request.json()
                image = self.images.image_on_workstation(str(body.get("Image", "")))
                with self.store.read() as state:
                    body = engine_view.create_on_workstation(body, state.id, state.storage, image=image)
                return self._call(request, "/containers/create", body)
            case ("POST", ["images", *name, "push"]) if is_registry("/".join(name)):
                return self.images.push(parse_reference("/".join(name)), request.query.get("tag", ""))
            case ("GET", ["images", *name, "json"]) if name:
                return self._inspect_image(request, self.images.image_on_workstation("/".join(name)))
        return self._forward(request)

    # -- a host

    def serve_host(self, hostname: str, connection: socket.socket) -> None:
        """Answers the requests of a host's docker client, failures as errors, until it closes the connection or is
        silent for an hour, or a request was forwarded. Leaves the connection for the caller to close."""
        view = EngineView(self.emulator, hostname)
        _serve(connection, lambda request: self._answer_host(request, view))

    def _answer_host(self, request: HttpRequest, view: EngineView) -> Reply:
        """Answers about the engine, the host's containers, or images (to read and pull); else raises EngineError.
        Raises BadInput for a malformed name, OSError without the engine."""
        match (request.method, _split_path(request.path)[1]):
            case ("GET" | "HEAD", ["_ping" | "version"]) | ("GET", ["images", "json"]):
                return self._forward(request)
            case ("GET", ["info"]):
                return self._call(request, "/info", None, lambda value: {**value, "Name": view.hostname})
            case ("POST", ["auth"]):
                return json_response({"Status": "Login Succeeded", "IdentityToken": ""})
            case (_, ["exec", identifier, _]):
                process = self.engine.call("GET", f"/exec/{quote(identifier, safe='')}/json")
                self._own_container(process["ContainerID"], view)
                return self._forward(request)
            case ("POST", ["images", "create"]):
                name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
                self.images.refuse_when_broken(view.hostname, image=name)
                if not is_registry(name):
                    return self._forward(request)
                return self.images.pull(view.hostname, name, tag, request.headers.get("X-Registry-Auth", ""))
            case ("GET", ["images", *name, "json"]):
                return self._inspect_image(request, self.images.image_on_host(view.hostname, "/".join(name)))
            case ("DELETE" | "POST", ["images", *_]):
                raise EngineError(
                    409, "the images of an emulated TPU VM are the workstation's: remove, tag or push them there"
                )
            case ("GET", ["containers", "json"]):
                request.query = engine_view.listing_query(request.query, view)
                return self._call(request, "/containers/json", None, partial(engine_view.present_listing, view=view))
            case ("POST", ["containers", "create"]):
                return self._create_container(request, view)
            case (_, ["containers", name, *action]):
                return self._answer_container(request, view, name, action)
        raise _unavailable(request)

    def _answer_container(self, request: HttpRequest, view: EngineView, name: str, action: list[str]) -> Reply:
        """Answers a request about a container of the host. Raises EngineError for others, and for an `action`, the
        path after the container, that is not emulated."""
        path = f"/containers/{self._own_container(name, view)}"
        match (request.method, action):
            case ("DELETE", []):
                return self._forward(request, path)
            case ("GET", ["json"]):
                return self._call(request, f"{path}/json", None, lambda value: self._present_container(value, view))
            case ("POST", ["rename"]):
                request.query["name"] = view.prefix + request.query.get("name", "").removeprefix("/")
                return self._call(request, f"{path}/rename", None, view=view)
            case (_, [_, *_]):
                return self._forward(request, "/".join([path, *(quote(part, safe="") for part in action)]))
        raise _unavailable(request)

    def _create_container(self, request: HttpRequest, view: EngineView) -> Reply:
        """Creates a container for the host, and volumes that it names. Raises EngineError if the host's engine is
        broken, the image was not pulled, or a setting is not emulated; BadInput for a malformed name."""
        body = request.json()
        name = request.query.get("name", "")
        self.images.refuse_when_broken(view.hostname)
        # The engine makes up a name where none is given. It gets no prefix, and none is stripped when it is shown.
        if name:
            request.query["name"] = view.prefix + name.removeprefix("/")
        image = self.images.image_on_host(view.hostname, str(body.get("Image", "")))
        new = engine_view.create_on_host(
            body,
            view,
            find_source=lambda source: self._find_source(source, view),
            image=image,
            ca=str(self.ca),
            tpu_volume=self.tpu_volume if self._has_virtual_tpu(view.hostname, image) else None,
        )
        return self._call(request, "/containers/create", new, view=view)

    def _has_virtual_tpu(self, hostname: str, image: str) -> bool:
        """Returns whether a container of the image gets TPU devices on this host: its framework can load them on a
        slice of as many hosts. False for a host that is gone."""
        with self.store.read() as state:
            entry = state.find_host(hostname)
        if entry is None:
            return False
        labels = self.engine.call("GET", f"/images/{image}/json")["Config"].get("Labels")
        return virtual_tpu.serves(labels, len(entry[0].hosts))

    def _find_source(self, source: str, view: EngineView) -> str:
        """Returns the workstation's path of a host's folder, as `bind`, or its name of a host's volume, which it makes
        if missing. Raises EngineError."""
        if source.startswith("/"):
            return self.bind(view.hostname, source)
        labels = dict(label.split("=", 1) for label in view.labels)
        self.engine.call("POST", "/volumes/create", body={"Name": view.prefix + source, "Labels": labels})
        return view.prefix + source

    def _own_container(self, name: str, view: EngineView) -> str:
        """Returns the id of a container of the host. Raises EngineError when the host has none of that name or id."""
        for known in (view.prefix + name.removeprefix("/"), name):
            try:
                container = self.engine.call("GET", f"/containers/{quote(known, safe='')}/json")
            except EngineError as error:
                if error.status not in (400, 404):  # 400: it begins the ids of several containers
                    raise
            else:
                if (container["Config"].get("Labels") or {}).get(HOST_LABEL) == view.hostname:
                    return str(container["Id"])
        raise EngineError(404, f"No such container: {name}")

    def _present_container(self, value: dict[str, Any], view: EngineView) -> dict[str, Any]:
        """Returns the inspection of a container as its host sees it. For a container that has exited, asks the engine
        whether the host went down with it."""
        host: dict[str, Any] | None = None
        if value["State"]["Status"] == "exited":
            host = self.engine.call("GET", f"/containers/{view.hostname}/json")["State"]
        return engine_view.present_container(value, view, host)

    # -- both

    def _inspect_image(self, request: HttpRequest, image: str) -> Reply:
        """Returns an image's inspection, with the digests under which it was pushed."""
        return self._call(request, f"/images/{quote(image, safe='/:@')}/json", None, self.images.add_digests)

    def _call(
        self,
        request: HttpRequest,
        path: str,
        body: Any,
        present: Callable[[Any], Any] = lambda value: value,
        view: EngineView | None = None,
    ) -> HttpResponse:
        """Sends the request's method and query with `body` (None: empty) to the engine's `path`. Returns its answer:
        JSON, changed by `present`, or its error, whose names lose `view`'s prefix."""
        method, query = request.method, request.query
        path = _split_path(request.path)[0] + path
        status, data = self.engine.raw(method, path, query, body, timeout=_CALL_SECONDS)
        if status < 300 and data.strip():
            data = json.dumps(present(json.loads(data))).encode()
        elif view is not None:
            data = data.replace(view.prefix.encode(), b"")
        return HttpResponse(status, data, _JSON)

    def _forward(self, request: HttpRequest, path: str = "") -> Reply:
        """Sends the request, whose body is still unread, to the engine, with another path (percent-encoded, without the
        version) if one is given; then copies bytes both ways until the engine has ended, and ends the client's stream.
        Returns None. Raises OSError if the engine does not answer."""
        client = request.connection
        assert client is not None
        upgrade = "upgrade" in request.headers.get("Connection", "").lower()
        _, mark, query = request.target.partition("?")  # `docker save A B` repeats a name, which `query` has once
        path = _split_path(request.path)[0] + path if path else request.path
        head = [f"{request.method} {path}{mark}{query} HTTP/1.1"]
        for name, value in request.headers.items():
            if upgrade or name.lower() not in ("connection", "keep-alive"):
                head.append(f"{name}: {value}")
        if not upgrade:
            head.append("Connection: close")
        client.settimeout(None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as upstream:
            upstream.connect(self.engine.path)
            upstream.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
            client_side = threading.Thread(target=_copy, args=(client, upstream), daemon=True)
            client_side.start()
            _copy(upstream, client)
            # The engine has sent everything; nothing reads what the client still sends.
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            client_side.join(60)
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until the source ends or fails, then ends the stream to the target: stdin may end before stdout."""
    with contextlib.suppress(OSError):
        while data := source.recv(_BLOCK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _serve(connection: socket.socket, answer: Callable[[HttpRequest], Reply]) -> None:
    """Answers the requests of a connection; refusals and a missing engine become errors in the engine's format."""

    def handle(request: HttpRequest) -> Reply:
        try:
            return answer(request)
        except EngineError as error:
            status, text = error.status, error.message
        except BadInput as error:
            status, text = 400, str(error)
        except OSError as error:
            status, text = 503, f"the workstation's engine does not answer: {error}"
        return json_response({"message": text}, status, _JSON)

    serve_http(connection, handle, read_ahead=False)  # `_forward` passes on what the connection still holds


def _split_path(path: str) -> tuple[str, list[str]]:
    """Splits a request's path into the API's version ("/v1.41" or "") and the other parts, decoded."""
    version, rest = re.fullmatch(r"(/v\d+\.\d+(?=/))?(.*)", path).groups("")  # type: ignore[union-attr]
    return version, [unquote(part) for part in rest.strip("/").split("/")]


def _unavailable(request: HttpRequest) -> EngineError:
    """Returns the refusal of a request: 404 for a GET of one object, so that docker tries the next kind; else 403."""
    parts = _split_path(request.path)[1]
    if request.method == "GET" and len(parts) > 1:
        # `docker inspect NAME` tries every kind of object in turn, and goes on only after a 404.
        kind, name = parts[0].removesuffix("s"), parts[1]
        return EngineError(404, f"no such {kind}: {name} (an emulated TPU VM has containers and images)")
    return EngineError(403, f"{request.method} /{'/'.join(parts)} is not available on an emulated TPU VM")
