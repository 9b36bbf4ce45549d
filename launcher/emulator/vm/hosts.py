"""Hosts at run time: the sockets that their agents hand over, what they may ask of Google, their deaths, cuts and
returns.

The state says which hosts there are and whether they are killed or cut off; host_containers.py moves their containers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from launcher.emulator import faults
from launcher.emulator.http_server import Acceptor, Request, Response, serve_http
from launcher.emulator.state import Host, Node, State, Store
from launcher.emulator.storage.tls import serve_tls
from launcher.emulator.vm.engine_client import LABEL, MACHINE_LABEL, EngineError, UnixConnection, filters
from launcher.emulator.vm.engine_view import Refused
from launcher.emulator.vm.host_containers import SHARED, HostContainers

log = logging.getLogger(__name__)

# (hostname, request) -> response
HostService = Callable[[str, Request], Response]


class Hosts:
    """All hosts of one emulator."""

    def __init__(
        self,
        store: Store,
        containers: HostContainers,
        acceptor: Acceptor,
        *,
        metadata: HostService,
        storage: HostService,
        context: ssl.SSLContext,
        engine: Callable[[str, socket.socket], None],
    ) -> None:
        self.store = store
        self.containers = containers
        self.acceptor = acceptor
        self._metadata, self._storage, self._context, self._engine = metadata, storage, context, engine
        self.handed_over: dict[str, list[socket.socket]] = {}  # hostname -> metadata, storage, storage over TLS, engine
        self.control_sockets: dict[str, socket.socket] = {}
        self.lock = threading.RLock()  # taken before the store's, never after

    def watch(self) -> None:
        """Starts what goes on for the server's life: bringing hosts back in time, and noticing deaths."""
        threading.Thread(target=self._watch_deaths, name="deaths", daemon=True).start()
        threading.Thread(target=self._tick, name="tick", daemon=True).start()

    def prepare(self, node: Node, host: Host) -> None:
        """Opens the socket on which the host's agent will hand its listeners over."""
        with self.lock:
            if host.hostname in self.control_sockets:
                return
            folder = self.containers.folder(host)
            folder.mkdir(mode=0o755, exist_ok=True)
            listener = unix_listener(folder / "agent.sock", 0o600)
            self.control_sockets[host.hostname] = listener
            self.acceptor.add(listener, lambda connection: self._agent(host.hostname, connection))

    def _agent(self, hostname: str, connection: socket.socket) -> None:
        """Takes a host's listeners and serves on them until the agent goes away."""
        connection.setblocking(True)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 4)
        if len(descriptors) != 4:
            return
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        with self.lock:
            self.handed_over[hostname] = listeners
            with self.store.read() as state:
                found = find_host(state, hostname)
                cut = found is None or found[1].cut
            self.acceptor.add(listeners[3], lambda each: self._engine(hostname, each))
            if not cut:
                self._serve_google(hostname)
        with contextlib.suppress(OSError):
            while connection.recv(64):
                pass
        with self.lock:
            if self.handed_over.get(hostname) is listeners:
                del self.handed_over[hostname]
        for listener in listeners:
            self.acceptor.remove(listener, close=True)

    def _serve_google(self, hostname: str) -> None:
        """Metadata and storage, for a host that has its network."""
        listeners = self.handed_over.get(hostname)
        if listeners:
            self.acceptor.add(
                listeners[0],
                lambda each: serve_http(each, lambda request: self._for_host(hostname, request, self._metadata)),
            )

            def storage(request: Request) -> Response:
                return self._for_host(hostname, request, self._storage)

            self.acceptor.add(listeners[1], lambda each: serve_http(each, storage))
            self.acceptor.add(listeners[2], lambda each: serve_tls(each, self._context, storage))

    def _for_host(self, hostname: str, request: Request, answer: HostService) -> Response:
        """A cut-off host gets no answer at all until its network is back."""
        self.store.wait(lambda state: (found := find_host(state, hostname)) is None or not found[1].cut, timeout=3600)
        return answer(hostname, request)

    def kill(self, host: Host) -> None:
        self.containers.kill(host)

    def cut(self, host: Host) -> None:
        with self.lock:
            for listener in self.handed_over.get(host.hostname, [])[:3]:
                self.acceptor.remove(listener, close=False)
        self.containers.cut(host)

    def hang(self, host: Host) -> None:
        self.containers.hang(host)

    def restore(self, host: Host) -> None:
        """Undoes kill, cut and hang, and starts a host that somebody else killed."""
        with self.store.change():
            cut, hung = host.cut, host.hung
            host.killed, host.cut, host.hung, host.restore_at = False, False, False, None
        if hung:
            self.containers.wake(host)
        if cut:
            self.containers.join(host)
            with self.lock:
                self._serve_google(host.hostname)
        self.containers.start(host)

    def return_from_reboot(self, nodes: list[Node]) -> None:
        """Starts hosts that went down with the workstation, which nobody meant as a fault."""
        for node in nodes:
            for host in node.hosts if node.state == "READY" else []:
                if not host.killed:
                    try:
                        self.containers.start(host)
                    except EngineError:
                        log.exception("starting %s after a reboot", host.hostname)

    def bind(self, hostname: str, path: str) -> str:
        """A folder of a host, as the workstation's engine knows it. Raises Refused."""
        with self.store.read() as state:
            found = find_host(state, hostname)
        if found is None:
            raise Refused(409, f"host {hostname} is gone")
        real = self._real_path(hostname, path)
        for shared in SHARED:
            if real == shared or real.startswith(shared + "/"):
                return str(self.containers.volume_folder(found[1], shared)) + real.removeprefix(shared)
        raise Refused(
            400, f"invalid bind source {path}: an emulated TPU VM shares only {', '.join(SHARED)} with its containers"
        )

    def _real_path(self, hostname: str, path: str) -> str:
        """The path without symbolic links, as the host sees it: a link must not lead out of what is shared."""
        body = {"AttachStdout": True, "Tty": True, "Cmd": ["realpath", "-m", "--", path]}
        identifier = self.containers.engine.call("POST", f"/containers/{hostname}/exec", body=body)["Id"]
        _, data = self.containers.engine.raw("POST", f"/exec/{identifier}/start", body={"Tty": True})
        return data.decode(errors="replace").strip()

    def _tick(self) -> None:
        """Brings hosts back whose time has come, and forgets sockets of hosts that are gone."""
        while True:
            time.sleep(0.25)
            try:
                now = time.time()
                with self.store.read() as state:
                    due = [host for host in all_hosts(state) if host.restore_at is not None and host.restore_at <= now]
                    names = {host.hostname for host in all_hosts(state)}
                    over = [
                        node
                        for node in state.nodes.values()
                        if node.outage_until is not None and node.outage_until <= now
                    ]
                for host in due:
                    self.restore(host)
                if over:
                    with self.store.change():
                        for node in over:
                            faults.end_outage(node)
                with self.lock:
                    gone = [name for name in self.control_sockets if name not in names]
                    for name in gone:
                        self.acceptor.remove(self.control_sockets.pop(name), close=True)
                        shutil.rmtree(self.containers.sockets / name, ignore_errors=True)
            except (OSError, EngineError):
                log.exception("tick")

    def _watch_deaths(self) -> None:
        """What runs on a host dies with it, whoever killed it; also what died while no server was there."""
        with self.store.read() as state:
            emulator = state.id
        query = {"filters": filters(label=[f"{LABEL}={emulator}", MACHINE_LABEL], event=["die"], type=["container"])}
        while True:
            try:
                connection = UnixConnection(self.containers.engine.path, timeout=None)
                connection.request("GET", "/events?" + urlencode(query))
                response = connection.getresponse()
                for each in self.containers.engine.containers(f"{LABEL}={emulator}", MACHINE_LABEL):
                    if each["State"] != "running":
                        self.containers.kill_own(each["Names"][0].removeprefix("/"))
                while line := response.readline():
                    name = json.loads(line)["Actor"]["Attributes"]["name"]
                    threading.Thread(target=self.containers.kill_own, args=(name,), daemon=True).start()
            except (OSError, ValueError, KeyError, EngineError, http.client.HTTPException):
                log.exception("watching the engine's events")
            time.sleep(0.5)


def all_hosts(state: State) -> list[Host]:
    return [host for node in state.nodes.values() for host in node.hosts]


def find_host(state: State, hostname: str) -> tuple[Node, Host] | None:
    for node in state.nodes.values():
        for host in node.hosts:
            if host.hostname == hostname:
                return node, host
    return None


def unix_listener(path: Path, mode: int) -> socket.socket:
    """A listening unix socket; one that a killed server left behind is replaced."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen(512)
    return listener
