"""Hosts at run time: the sockets that their agents hand over, the services on them, and injected failures of hosts.

The state lists the hosts and whether they are killed or disconnected; host_containers.py acts on their containers.
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

_DISCONNECTED_SECONDS = 3600.0  # for which a disconnected host's request waits
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
        """Makes the hosts' services.

        Args:
            store: the emulator's state.
            containers: of the hosts.
            acceptor: accepts on what hosts hand over.
            metadata: answers requests to a host's metadata server.
            storage: answers requests for Cloud Storage.
            context: the server's side of TLS under the names of Cloud Storage.
            engine: (hostname, connection) -> answers a request to a host's container engine.
        """
        self.store = store
        self.containers = containers
        self.acceptor = acceptor
        self._metadata, self._storage, self._context, self._engine = metadata, storage, context, engine
        self.handed_over: dict[str, list[socket.socket]] = {}  # hostname -> metadata, storage, storage over TLS, engine
        self.control_sockets: dict[str, socket.socket] = {}
        self.lock = threading.RLock()  # taken before the store's, never after

    def watch(self) -> None:
        """Starts the threads that restore hosts in time and watch for hosts that died."""
        threading.Thread(target=self._watch_deaths, name="deaths", daemon=True).start()
        threading.Thread(target=self._tick, name="tick", daemon=True).start()

    def prepare(self, node: Node, host: Host) -> None:
        """Opens the socket on which the host's agent hands over its listeners."""
        with self.lock:
            if host.hostname in self.control_sockets:
                return
            folder = self.containers.folder(host)
            folder.mkdir(mode=0o755, exist_ok=True)
            listener = unix_listener(folder / "agent.sock", 0o600)
            self.control_sockets[host.hostname] = listener
            self.acceptor.add(listener, lambda connection: self._agent(host.hostname, connection))

    def _agent(self, hostname: str, connection: socket.socket) -> None:
        """Receives a host's listeners and serves on them until the agent disconnects."""
        connection.setblocking(True)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 4)
        if len(descriptors) != 4:
            return
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        with self.lock:
            self.handed_over[hostname] = listeners
            with self.store.read() as state:
                entry = find_host(state, hostname)
                cut = entry is None or entry[1].cut
            self.acceptor.add(listeners[3], lambda accepted: self._engine(hostname, accepted))
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
        """Accepts requests for metadata and storage from a host that is connected."""

        def metadata(request: Request) -> Response:
            return self._answer(hostname, request, self._metadata)

        def storage(request: Request) -> Response:
            return self._answer(hostname, request, self._storage)

        listeners = self.handed_over.get(hostname)
        if listeners:
            self.acceptor.add(listeners[0], lambda connection: serve_http(connection, metadata))
            self.acceptor.add(listeners[1], lambda connection: serve_http(connection, storage))
            self.acceptor.add(listeners[2], lambda connection: serve_tls(connection, self._context, storage))

    def _answer(self, hostname: str, request: Request, service: HostService) -> Response:
        """A response of `service`; a disconnected host gets it when its network is back."""

        def is_connected(state: State) -> bool:
            entry = find_host(state, hostname)
            return entry is None or not entry[1].cut

        self.store.wait(is_connected, timeout=_DISCONNECTED_SECONDS)
        return service(hostname, request)

    def kill(self, host: Host) -> None:
        """Kills the host and everything that runs on it."""
        self.containers.kill(host)

    def cut(self, host: Host) -> None:
        """Disconnects the host from its network and from Google's services."""
        with self.lock:
            for listener in self.handed_over.get(host.hostname, [])[:3]:
                self.acceptor.remove(listener, close=False)
        self.containers.cut(host)

    def hang(self, host: Host) -> None:
        """Pauses all processes of the host."""
        self.containers.hang(host)

    def restore(self, host: Host) -> None:
        """Undoes kill, cut and hang; starts a host that is down for another reason, too."""
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
        """Starts hosts that went down with the workstation and not by a fault."""
        for node in nodes:
            for host in node.hosts if node.state == "READY" else []:
                if not host.killed:
                    try:
                        self.containers.start(host)
                    except EngineError:
                        log.exception("starting %s after a reboot", host.hostname)

    def bind(self, hostname: str, path: str) -> str:
        """The path, as the workstation's engine knows it, of a folder of a host. Raises Refused."""
        with self.store.read() as state:
            entry = find_host(state, hostname)
        if entry is None:
            raise Refused(409, f"host {hostname} is gone")
        real = self._real_path(hostname, path)
        for shared in SHARED:
            if real == shared or real.startswith(shared + "/"):
                return str(self.containers.volume_folder(entry[1], shared)) + real.removeprefix(shared)
        raise Refused(
            400, f"invalid bind source {path}: an emulated TPU VM shares only {', '.join(SHARED)} with its containers"
        )

    def _real_path(self, hostname: str, path: str) -> str:
        """The path without symbolic links, as the host sees it: a link must not lead out of the shared folders."""
        body = {"AttachStdout": True, "Tty": True, "Cmd": ["realpath", "-m", "--", path]}
        identifier = self.containers.engine.call("POST", f"/containers/{hostname}/exec", body=body)["Id"]
        _, data = self.containers.engine.raw("POST", f"/exec/{identifier}/start", body={"Tty": True})
        return data.decode(errors="replace").strip()

    def _tick(self) -> None:
        """Restores hosts and ends outages that are due, and closes sockets of hosts that are gone."""
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
                    hidden = [node for node in state.nodes.values() if node.preempted_at is not None]
                for host in due:
                    self.restore(host)
                if over:
                    with self.store.change():
                        for node in over:
                            faults.end_outage(node)
                if hidden:
                    with self.store.change():
                        for node in hidden:
                            faults.show_preemption(node, now)
                with self.lock:
                    gone = [name for name in self.control_sockets if name not in names]
                    for name in gone:
                        self.acceptor.remove(self.control_sockets.pop(name), close=True)
                        shutil.rmtree(self.containers.sockets / name, ignore_errors=True)
            except (OSError, EngineError):
                log.exception("tick")

    def _watch_deaths(self) -> None:
        """Kills the containers of hosts that died by any cause, also of those that died while no server ran."""
        with self.store.read() as state:
            emulator = state.id
        query = {"filters": filters(label=[f"{LABEL}={emulator}", MACHINE_LABEL], event=["die"], type=["container"])}
        while True:
            try:
                connection = UnixConnection(self.containers.engine.path, timeout=None)
                connection.request("GET", "/events?" + urlencode(query))
                response = connection.getresponse()
                for container in self.containers.engine.containers(f"{LABEL}={emulator}", MACHINE_LABEL):
                    if container["State"] != "running":
                        self.containers.kill_own(container["Names"][0].removeprefix("/"))
                while line := response.readline():
                    name = json.loads(line)["Actor"]["Attributes"]["name"]
                    threading.Thread(target=self.containers.kill_own, args=(name,), daemon=True).start()
            except (OSError, ValueError, KeyError, EngineError, http.client.HTTPException):
                log.exception("watching the engine's events")
            time.sleep(0.5)


def all_hosts(state: State) -> list[Host]:
    """The hosts of all nodes."""
    return [host for node in state.nodes.values() for host in node.hosts]


def find_host(state: State, hostname: str) -> tuple[Node, Host] | None:
    """The host of this name with its node; None when there is none."""
    for node in state.nodes.values():
        for host in node.hosts:
            if host.hostname == hostname:
                return node, host
    return None


def unix_listener(path: Path, mode: int) -> socket.socket:
    """Listens on a unix socket, replacing one that a killed server left behind."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen(512)
    return listener
