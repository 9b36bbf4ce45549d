"""Hosts at run time: the sockets that their agents hand over, the services on them, and injected failures of hosts.

The state lists the hosts and whether they are killed or disconnected; host_containers.py acts on their containers.
"""

import contextlib
import http.client
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from launcher.emulator import faults
from launcher.emulator.http_server import Disconnected, accept, accept_in_thread
from launcher.emulator.state import EmulatorState, Host, Node, Store
from launcher.emulator.vm.engine_client import LABEL, MACHINE_LABEL, EngineError, UnixConnection, filters
from launcher.emulator.vm.host_containers import SHARED, HostContainers

log = logging.getLogger(__name__)

_DISCONNECTED_SECONDS = 3600.0  # how long a request of a disconnected host waits


@dataclass(eq=False)
class Hosts:
    """All hosts of one emulator."""

    store: Store
    containers: HostContainers
    services: Callable[[str], Sequence[Callable[[socket.socket], None]]]
    """Maps a hostname to what serves connections to its listeners: metadata, storage, storage over TLS, engine."""
    agent_sockets: dict[str, socket.socket] = field(default_factory=dict)
    """Maps a hostname to a socket that, when it is closed, ends the accepting on the host's agent socket."""
    lock: threading.RLock = field(default_factory=threading.RLock)  # taken before the store's, never after

    def watch(self) -> None:
        """Starts the threads that end outages and faults in time, and kill the containers of hosts that died."""
        threading.Thread(target=self._watch_deaths, name="deaths", daemon=True).start()
        threading.Thread(target=self._run_timers, name="timers", daemon=True).start()

    def open_agent_socket(self, host: Host) -> None:
        """Opens the socket on which the host's agent hands over its listeners, and serves it, unless it is open."""
        with self.lock:
            if host.hostname not in self.agent_sockets:
                folder = self.containers.folder(host)
                folder.mkdir(mode=0o755, exist_ok=True)
                listener = unix_listener(folder / "agent.sock")
                self.agent_sockets[host.hostname] = accept_in_thread(
                    listener, partial(self._serve_agent, host.hostname)
                )

    def _serve_agent(self, hostname: str, connection: socket.socket) -> None:
        """Receives a host's four listeners and serves on them until its agent disconnects; closes them then."""
        connection.setblocking(True)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 4)
        if len(descriptors) == 4:
            listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            accept(dict(zip(listeners, self.services(hostname), strict=True)), until=connection)

    def await_network(self, hostname: str) -> None:
        """Waits until a host that is cut off has its network again; after an hour returns without. Raises Disconnected
        for a host that is gone: a request of its last minutes must change nothing later."""

        def connected(state: EmulatorState) -> bool:
            if (entry := state.find_host(hostname)) is None:
                raise Disconnected(f"host {hostname} is gone")
            return not entry[1].cut

        self.store.wait(connected, _DISCONNECTED_SECONDS)

    def restore(self, host: Host) -> None:
        """Undoes kill, cut and hang; starts a host that is down, or raises EngineError. Its node's outage stays."""
        with self.store.change():
            cut, hung = host.cut, host.hung
            host.killed, host.cut, host.hung, host.restore_at = False, False, False, None
        if hung:
            self.containers.wake(host)
        if cut:
            self.containers.join(host)
        self.containers.start(host)

    def start_stopped(self, nodes: list[Node]) -> None:
        """Starts hosts of READY nodes that went down while no server ran, unless a fault took them; logs failures."""
        for host in (host for node in nodes if node.state == "READY" for host in node.hosts):
            if not host.killed and not host.hung:
                try:
                    self.containers.start(host)
                except EngineError:
                    log.exception("starting %s", host.hostname)

    def bind(self, hostname: str, path: str) -> str:
        """Returns the workstation's path of a host's `path`, whose links it resolves on the host. Raises EngineError
        for one outside of the shared folders, and for a host that is gone."""
        with self.store.read() as state:
            entry = state.find_host(hostname)
        if entry is None:
            raise EngineError(409, f"host {hostname} is gone")
        real = self._real_path(hostname, path)
        for shared in SHARED:
            if real == shared or real.startswith(shared + "/"):
                return str(self.containers.volume_folder(entry[1], shared)) + real.removeprefix(shared)
        text = f"an emulated TPU VM shares only {', '.join(SHARED)} with its containers"
        raise EngineError(400, f"invalid bind source {path}: {text}")

    def _real_path(self, hostname: str, path: str) -> str:
        """Returns a host's path with its symbolic links resolved, by running realpath on the host. The result may lie
        outside the shared folders, which `bind` refuses."""
        body = {"AttachStdout": True, "Tty": True, "Cmd": ["realpath", "-m", "--", path]}
        identifier = self.containers.engine.call("POST", f"/containers/{hostname}/exec", body=body)["Id"]
        _, data = self.containers.engine.raw("POST", f"/exec/{identifier}/start", body={"Tty": True})
        return data.decode(errors="replace").strip()

    def _run_timers(self) -> None:
        """Restores hosts and ends outages when they are due; closes gone hosts' agent sockets. Never returns."""
        while True:
            time.sleep(0.25)
            try:
                now = time.time()
                with self.store.read() as state:
                    hosts, nodes = state.hosts, list(state.nodes.values())
                    to_restore = [host for host in hosts if host.restore_at is not None and host.restore_at <= now]
                    overdue = [node for node in nodes if node.outage_until is not None and node.outage_until <= now]
                for host in to_restore:
                    self.restore(host)
                if overdue:
                    with self.store.change():
                        for node in overdue:
                            faults.end_outage(node)
                with self.lock:
                    for name in set(self.agent_sockets) - {host.hostname for host in hosts}:
                        self.agent_sockets.pop(name).close()
                        shutil.rmtree(self.containers.sockets / name, ignore_errors=True)
            except (OSError, EngineError):
                log.exception("timers")

    def _watch_deaths(self) -> None:
        """Kills the containers of hosts that die, or died unwatched; logs errors and goes on. Never returns."""
        with self.store.read() as state:
            emulator = state.id
        query = {"filters": filters(label=[f"{LABEL}={emulator}", MACHINE_LABEL], event=["die"], type=["container"])}
        while True:
            try:
                connection = UnixConnection(self.containers.engine.path, timeout=None)
                connection.request("GET", "/events?" + urlencode(query))
                response = connection.getresponse()
                for container in self.containers.engine.containers(f"{LABEL}={emulator}", MACHINE_LABEL):
                    if container["State"] not in ("running", "paused"):  # a paused host hangs, and may go on
                        self.containers.kill_containers(container["Names"][0].removeprefix("/"))
                while line := response.readline():
                    name = json.loads(line)["Actor"]["Attributes"]["name"]
                    threading.Thread(target=self.containers.kill_containers, args=(name,), daemon=True).start()
            except (OSError, ValueError, KeyError, EngineError, http.client.HTTPException):
                log.exception("watching the engine's events")
            time.sleep(0.5)


def unix_listener(path: Path) -> socket.socket:
    """Returns a listening unix socket for this user alone, in place of a socket file that a killed server left."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(512)
    return listener
