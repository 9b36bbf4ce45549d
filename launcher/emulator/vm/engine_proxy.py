"""The engine's sockets: one for each host, one for the workstation. Reads a request's head, rewrites it, and hands the
rest on as raw bytes.

Every answer closes its connection, so that one connection carries one request; attach, exec, `logs -f` and BuildKit's
h2c sessions, which turn a connection into a stream of their own, pass through unchanged in both directions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import BytesParser
from http.client import HTTPMessage, responses
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

from launcher.emulator import faults
from launcher.emulator.api import repositories
from launcher.emulator.state import Store
from launcher.emulator.vm import engine_view as engine
from launcher.emulator.vm import metadata, registry
from launcher.emulator.vm.engine_client import Engine, EngineError, UnixConnection
from launcher.emulator.vm.engine_view import Refused, View, split_version
from launcher.emulator.vm.hosts import find_host
from launcher.emulator.web import Body

log = logging.getLogger(__name__)


@dataclass
class EngineRequest:
    """One request to an engine, its body still on the wire (beginning with `rest`)."""

    connection: socket.socket
    method: str
    version: str  # "/v1.41" or ""
    path: str  # without the version, percent-encoded
    query: dict[str, str]
    headers: HTTPMessage
    rest: bytes

    def json(self) -> dict[str, Any]:
        """The body, read from the wire. Raises Refused."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = self.headers.get("Content-Length")
        chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        source = _Rest(self.rest, self.connection)
        data = Body(source, int(length) if length else None, chunked).all()  # type: ignore[arg-type]
        try:
            value = json.loads(data or b"{}")
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise Refused(400, "the body must be a JSON object")
        return value


class _Rest:
    """What was already received, then the connection."""

    def __init__(self, rest: bytes, connection: socket.socket) -> None:
        self._first, self._then = BytesIO(rest), connection.makefile("rb")

    def read(self, size: int) -> bytes:
        return self._first.read(size) or self._then.read1(size)

    def readline(self, limit: int) -> bytes:
        line = self._first.readline(limit)
        return line if line.endswith(b"\n") else line + self._then.readline(limit)


def receive(connection: socket.socket) -> EngineRequest | None:
    """The next request's head, or None when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part or len(data) > 1 << 20:
            return None
        data += part
    head, rest = data.split(b"\r\n\r\n", 1)
    line, _, fields = head.partition(b"\r\n")
    method, target, _ = line.decode("latin-1").split(" ", 2)
    path, _, query = target.partition("?")
    version, path = split_version(path)
    headers: HTTPMessage = BytesParser(_class=HTTPMessage).parsebytes(fields + b"\r\n\r\n")
    values = {key: each[-1] for key, each in parse_qs(query, keep_blank_values=True).items()}
    return EngineRequest(connection, method, version, path, values, headers, rest)


class Views:
    """Answers engine requests, of hosts and of the workstation."""

    def __init__(self, store: Store, target: Engine, *, bind: Callable[[str, str], str], ca: Path) -> None:
        self._store = store
        self._engine = target
        self._ca = str(ca)
        self._bind = bind  # (hostname, folder of the host) -> folder of the workstation; raises Refused
        with store.read() as state:
            self._emulator, self._storage = state.id, f"http://127.0.0.1:{state.port}"

    # -- the workstation
    # ------------------------------------------------------------------------------------------------------------------

    def serve_workstation(self, connection: socket.socket) -> None:
        self._guarded(connection, self._workstation)

    def _workstation(self, request: EngineRequest) -> None:
        parts = request.path.strip("/").split("/")
        if request.method == "POST" and request.path == "/containers/create":
            body = request.json()
            image = self._image_id(str(body.get("Image", "")), only_pushed=False)
            body = engine.create_on_workstation(body, self._emulator, self._storage, image=image)
            return self._call(request, "/containers/create", body)
        if parts[0] == "images" and len(parts) > 2:
            name = unquote("/".join(parts[1:-1]))
            if request.method == "POST" and parts[-1] == "push" and registry.is_registry(name):
                return self._push(request, name)
            if request.method == "GET" and parts[-1] == "json":
                return self._inspect_image(request, name, only_pushed=False)
        return self._forward(request, request.path)

    def _push(self, request: EngineRequest, name: str) -> None:
        self._require("", registry_of=name)
        reference = registry.parse(name)
        with self._store.read() as state:
            if any(fault.kind == "repository" for fault in state.faults) and not repositories.is_there(
                state, reference.repository
            ):
                raise Refused(404, f'name unknown: Repository "{reference.repository.split("/")[2]}" not found')
        tag = request.query.get("tag") or reference.tag
        if tag:
            names = [f"{reference.repository}:{tag}"]
        else:
            listed = self._engine.call(
                "GET", "/images/json", {"filters": json.dumps({"reference": [reference.repository]})}
            )
            names = [each for image in listed for each in image.get("RepoTags") or []]
        status, data = self._engine.raw("GET", f"/images/{quote(names[0], safe='/:')}/json") if names else (404, b"")
        if status != 200:
            raise Refused(404, f"An image does not exist locally with the tag: {reference.repository}")
        image = json.loads(data)
        with self._store.change() as state:
            for each in names:
                found = self._engine.call("GET", f"/images/{quote(each, safe='/:')}/json")
                registry.push(state.pushed, reference.repository, registry.parse(each).tag, found["Id"])
        progress = registry.push_progress(reference.repository, [registry.parse(each).tag for each in names], image)
        reply(request.connection, 200, progress)

    # -- a host
    # ---------------------------------------------------------------------------------------------------------------------------

    def serve_host(self, hostname: str, connection: socket.socket) -> None:
        view = View(self._emulator, hostname)
        self._guarded(connection, lambda request: self._host(request, view))

    def _host(self, request: EngineRequest, view: View) -> None:
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        match (request.method, parts):
            case ("GET" | "HEAD", ["_ping" | "version"]):
                self._forward(request, request.path)
            case ("GET", ["info"]):
                self._call(request, "/info", None, lambda value: {**value, "Name": view.hostname, **self._counts(view)})
            case ("POST", ["auth"]):
                reply(request.connection, 200, json.dumps({"Status": "Login Succeeded", "IdentityToken": ""}).encode())
            case ("GET", ["events"]):
                self._events(request, view)
            case ("GET", ["containers", "json"]):
                request.query, names, limit = engine.listing_query(request.query, view)
                self._call(
                    request, "/containers/json", None, lambda value: engine.shown_listing(value, view, names, limit)
                )
            case ("POST", ["containers", "create"]):
                self._create(request, view)
            case ("POST", ["containers", "prune"]):
                wanted = engine.parse_filters(request.query.get("filters", ""))
                request.query["filters"] = json.dumps({**wanted, "label": [*wanted.get("label", []), *view.labels]})
                self._call(request, "/containers/prune", None)
            case (_, ["containers", name]) if request.method == "DELETE":
                self._forward(request, f"/containers/{self._own(name, view)}")
            case ("GET", ["containers", name, "json"]):
                path = f"/containers/{self._own(name, view)}/json"
                self._call(request, path, None, lambda value: engine.shown_inspect(value, view))
            case ("POST", ["containers", name, "rename"]):
                request.query["name"] = view.prefix + request.query.get("name", "").removeprefix("/")
                self._call(request, f"/containers/{self._own(name, view)}/rename", None, view=view)
            case (_, ["containers", name, action, *rest]) if action in engine.CONTAINER_ACTIONS:
                self._forward(request, "/".join(["/containers", self._own(name, view), action, *rest]))
            case (_, ["exec", identifier, _]):
                found = self._engine.call("GET", f"/exec/{quote(identifier, safe='')}/json")
                self._own(found["ContainerID"], view)
                self._forward(request, request.path)
            case ("GET", ["images", "json"]):
                self._forward(request, request.path)
            case ("GET", ["images", *name, "json"]) if name:
                self._require_pulled(view.hostname, "/".join(name))
                self._inspect_image(request, "/".join(name), only_pushed=True)
            case ("GET", ["images", *name, "history"]) if name:
                self._forward(
                    request, f"/images/{quote(self._image_id('/'.join(name), only_pushed=True), safe=':')}/history"
                )
            case ("POST", ["images", "create"]):
                self._require(view.hostname, registry_of=request.query.get("fromImage", ""))
                self._pull(request, view.hostname)
            case ("GET", ["distribution", *name, "json"]) if registry.is_registry("/".join(name)):
                image = self._image_id("/".join(name), only_pushed=True)
                descriptor = {
                    "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
                    "digest": image,
                    "size": 2000,
                }
                reply(request.connection, 200, json.dumps({"Descriptor": descriptor, "Platforms": []}).encode())
            case ("POST", ["images", "prune"]):
                reply(request.connection, 200, json.dumps({"ImagesDeleted": None, "SpaceReclaimed": 0}).encode())
            case ("DELETE" | "POST", ["images", *_]):
                raise Refused(
                    409, "the images of an emulated TPU VM are the workstation's: remove, tag or push them there"
                )
            case ("GET", ["networks"]):
                self._call(
                    request,
                    "/networks",
                    None,
                    lambda value: [each for each in value if each["Name"] in engine.NETWORKS],
                )
            case ("GET", ["networks", name]) if name in engine.NETWORKS:
                self._forward(request, request.path)
            case ("GET", ["volumes"]):
                wanted = engine.parse_filters(request.query.get("filters", ""))
                request.query["filters"] = json.dumps({**wanted, "label": [*wanted.get("label", []), *view.labels]})
                self._call(request, "/volumes", None, lambda value: engine.shown_volumes(value, view))
            case ("GET", ["volumes", name]):
                self._call(
                    request,
                    f"/volumes/{quote(view.prefix + name, safe='')}",
                    None,
                    lambda value: engine.shown_volume(value, view),
                    view,
                )
            case ("DELETE", ["volumes", name]):
                self._call(request, f"/volumes/{quote(view.prefix + name, safe='')}", None, view=view)
            case ("GET", [kind, name, *_]):
                # `docker inspect NAME` asks for every kind of object in turn, and goes on only after a 404.
                raise Refused(
                    404,
                    f"no such {kind.removesuffix('s')}: {name} (an emulated TPU VM has containers, images and volumes)",
                )
            case _:
                raise Refused(403, f"{request.method} {request.path} is not available on an emulated TPU VM")

    def _create(self, request: EngineRequest, view: View) -> None:
        body = request.json()
        self._require(view.hostname)
        name = request.query.get("name", "")
        # Without a name the engine would make one up that shows no prefix; the host's view strips only what is there.
        if name:
            request.query["name"] = view.prefix + name.removeprefix("/")
        image = self._image_id(str(body.get("Image", "")), only_pushed=True)
        self._require_pulled(view.hostname, str(body.get("Image", "")))
        new = engine.create_on_host(
            body,
            view,
            bind=lambda path: self._bind(view.hostname, path),
            volume=lambda volume: self._volume(volume, view),
            image=image,
            ca=self._ca,
        )
        self._call(request, "/containers/create", new, view=view)

    def _volume(self, name: str, view: View) -> str:
        labels = dict(label.split("=", 1) for label in view.labels)
        self._engine.call("POST", "/volumes/create", body={"Name": view.prefix + name, "Labels": labels})
        return view.prefix + name

    def _own(self, name: str, view: View) -> str:
        return engine.resolve_container(name, self._engine.containers(*view.labels), view)

    def _counts(self, view: View) -> dict[str, int]:
        states = [each["State"] for each in self._engine.containers(*view.labels)]
        running, paused = states.count("running"), states.count("paused")
        return {
            "Containers": len(states),
            "ContainersRunning": running,
            "ContainersPaused": paused,
            "ContainersStopped": len(states) - running - paused,
        }

    def _pull(self, request: EngineRequest, hostname: str) -> None:
        name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
        if not registry.is_registry(name):
            return self._forward(request, request.path)
        full = name if not tag else f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}"
        reference = registry.parse(full)
        with self._store.read() as state:
            image = registry.resolve(state.pushed, full)
            found = find_host(state, hostname)
            token = metadata.token(state, found[1]) if found else ""
        if registry.password(request.headers.get("X-Registry-Auth", "")) != token:
            raise Refused(500, registry.unauthenticated(reference))
        if image is None:
            raise Refused(404, registry.unknown(reference))
        if self._engine.raw("GET", f"/images/{image}/json")[0] != 200:
            raise Refused(
                404,
                f"{registry.unknown(reference)} (it was pushed, and then removed from the workstation's store; push it again)",
            )
        with self._store.change() as state:
            if (found := find_host(state, hostname)) and image not in found[1].pulled:
                found[1].pulled.append(image)
        return reply(request.connection, 200, registry.pull_progress(reference, image))

    def _events(self, request: EngineRequest, view: View) -> None:
        wanted = engine.parse_filters(request.query.get("filters", ""))
        query = {**request.query, "filters": json.dumps({**wanted, "label": [*wanted.get("label", []), *view.labels]})}
        upstream = UnixConnection(self._engine.path, timeout=None)
        upstream.request("GET", f"{request.version}/events?{urlencode(query)}")
        response = upstream.getresponse()
        socket_upstream = upstream.sock
        threading.Thread(target=_close_after, args=(request.connection, socket_upstream), daemon=True).start()
        request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while line := response.readline():
                request.connection.sendall(json.dumps(engine.shown_event(json.loads(line), view)).encode() + b"\n")
        upstream.close()

    # -- both
    # -----------------------------------------------------------------------------------------------------------------------------

    def _trouble(self, hostname: str, *, registry_of: str = "") -> str | None:
        with self._store.read() as state:
            return faults.engine_trouble(state, hostname, registry=registry.is_registry(registry_of))

    def _require(self, hostname: str, *, registry_of: str = "") -> None:
        """Raises Refused while a fault says so."""
        if trouble := self._trouble(hostname, registry_of=registry_of):
            raise Refused(500, trouble)

    def _require_pulled(self, hostname: str, name: str) -> None:
        """Raises Refused for a registry's image that this host's engine did not pull; with its registry down, it did
        not do so before either."""
        if registry.is_registry(name):
            if self._trouble(hostname, registry_of=name):
                raise Refused(404, f"No such image: {name}")
            with self._store.read() as state:
                found = find_host(state, hostname)
                if found is None or registry.resolve(state.pushed, name) not in found[1].pulled:
                    raise Refused(404, f"No such image: {name}")

    def _image_id(self, name: str, *, only_pushed: bool) -> str:
        """The image id of a registry's name; other names as they are. Raises Refused when only pushed ones count and it
        wasn't."""
        if not registry.is_registry(name):
            return name
        with self._store.read() as state:
            found = registry.resolve(state.pushed, name)
        if found is None and only_pushed:
            raise Refused(404, f"No such image: {name}")
        # On the workstation a tag is what it is there, pushed or not; only a digest needs the registry.
        return found if found is not None and (only_pushed or "@" in name) else name

    def _inspect_image(self, request: EngineRequest, name: str, *, only_pushed: bool) -> None:
        image = self._image_id(name, only_pushed=only_pushed)
        with self._store.read() as state:
            pushed = {repository: dict(versions) for repository, versions in state.pushed.items()}
        self._call(
            request,
            f"/images/{quote(image, safe='/:@')}/json",
            None,
            lambda value: registry.with_digests(value, pushed),
        )

    def _call(
        self,
        request: EngineRequest,
        path: str,
        body: Any,
        show: Callable[[Any], Any] = lambda value: value,
        view: View | None = None,
    ) -> None:
        """A call with a JSON answer, which `show` changes; error messages lose the host's prefix."""
        status, data = self._engine.raw(request.method, request.version + path, request.query, body, timeout=600)
        if status < 300 and data.strip():
            data = json.dumps(show(json.loads(data))).encode()
        elif view is not None:
            data = data.replace(view.prefix.encode(), b"")
        reply(request.connection, status, data)

    def _forward(self, request: EngineRequest, path: str) -> None:
        """The request as it is but for its path, then raw bytes both ways until both sides have ended."""
        upgrade = "upgrade" in request.headers.get("Connection", "").lower()
        head = [
            f"{request.method} {request.version}{path}{'?' + urlencode(request.query) if request.query else ''} HTTP/1.1"
        ]
        head += [
            f"{key}: {value}"
            for key, value in request.headers.items()
            if upgrade or key.lower() not in ("connection", "keep-alive")
        ]
        if not upgrade:
            head.append("Connection: close")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as upstream:
            upstream.connect(self._engine.path)
            upstream.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + request.rest)
            client_side = threading.Thread(target=pipe, args=(request.connection, upstream), daemon=True)
            client_side.start()
            pipe(upstream, request.connection)
            # The engine has said everything; a client that still sends has nobody to send to.
            with contextlib.suppress(OSError):
                request.connection.shutdown(socket.SHUT_RDWR)
            client_side.join(60)

    @staticmethod
    def _guarded(connection: socket.socket, serve: Callable[[EngineRequest], None]) -> None:
        """Reads the request and turns refusals and a missing engine into the engine's kind of error."""
        try:
            connection.setblocking(True)
            request = receive(connection)
            if request is not None:
                serve(request)
        except Refused as refused:
            _reply_error(connection, refused.status, str(refused))
        except EngineError as error:
            _reply_error(connection, error.status, str(error).split(": ", 1)[-1])
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:
            _reply_error(connection, 503, f"the workstation's engine does not answer: {error}")


def reply(connection: socket.socket, status: int, body: bytes) -> None:
    reason = responses.get(status, "")
    length = "" if status in (204, 304) else f"Content-Length: {len(body)}\r\n"
    head = f"HTTP/1.1 {status} {reason}\r\nApi-Version: 1.41\r\nOstype: linux\r\nContent-Type: application/json\r\n{length}Connection: close\r\n\r\n"
    connection.sendall(head.encode() + (b"" if status in (204, 304) else body))


def _reply_error(connection: socket.socket, status: int, text: str) -> None:
    with contextlib.suppress(OSError):
        reply(connection, status, json.dumps({"message": text}).encode())


def pipe(source: socket.socket, target: socket.socket) -> None:
    """Bytes from one to the other until the source ends; then the target's end is announced too (stdin may end before
    stdout)."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _close_after(client: socket.socket, upstream: socket.socket) -> None:
    """Ends a stream of events when the client goes away."""
    with contextlib.suppress(OSError):
        while client.recv(4096):
            pass
    with contextlib.suppress(OSError):
        upstream.shutdown(socket.SHUT_RDWR)
