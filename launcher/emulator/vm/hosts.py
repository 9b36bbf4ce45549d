"""TPU VMs as containers of the workstation's engine: their life, the services on the listeners that their agents hand
over, and injected failures of hosts.

A host is one container of images/host on the emulator's own network, with a fixed address. Its /home, /tmp, /run and
/dev/shm are volumes, so that containers which run on the host can bind-mount from them (engine_view.py); a kill loses
/run and /dev/shm, as a reboot does. The host needs no privilege but NET_ADMIN in its own namespace, for the metadata
server's address on its loopback interface.

The state lists the hosts and whether they are killed, cut off or hung. Every function may be repeated.
"""

import contextlib
import http.client
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from launcher.emulator import faults
from launcher.emulator.http_server import Disconnected, accept, accept_in_thread
from launcher.emulator.state import EmulatorState, Host, Node, Store
from launcher.emulator.storage import NAMES as STORAGE_NAMES
from launcher.emulator.vm import engine_client
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, MACHINE_LABEL, Engine, EngineError

log = logging.getLogger(__name__)

# Folder of a host -> options of its volume. The tmpfs volumes are lost when the host goes down.
SHARED = {
    "/home": {},
    "/tmp": {},
    "/run": {"type": "tmpfs", "device": "tmpfs", "o": "mode=755,size=1g"},
    "/dev/shm": {"type": "tmpfs", "device": "tmpfs", "o": "mode=1777,size=8g"},
}
_REMOVE = {"force": "1", "v": "1"}  # kills a container that runs, and removes its anonymous volumes
_DISCONNECTED_SECONDS = 3600.0  # how long a request of a disconnected host waits


@dataclass(eq=False)
class Hosts:
    """All hosts of one emulator, and their network."""

    store: Store
    engine: Engine
    emulator: str  # its id
    image: str  # of the hosts
    sockets: Path  # the folder of the hosts' folders
    services: Callable[[str], Sequence[Callable[[socket.socket], None]]]
    """Maps a hostname to what serves connections to its listeners: metadata, storage, storage over TLS, engine."""
    agent_sockets: dict[str, socket.socket] = field(default_factory=dict)
    """Maps a hostname to a socket that, when it is closed, ends the accepting on the host's agent socket."""
    lock: threading.RLock = field(default_factory=threading.RLock)  # taken before the store's, never after

    @property
    def network(self) -> str:
        return f"tpu-launch-{self.emulator}"

    def ensure_network(self, subnet: str) -> str:
        """Creates the network unless it exists: with `subnet` if that is free, else ("" too) with one that the engine
        chooses. Returns its subnet. Raises EngineError when none is free."""

        def create(name: str, **ipam: Any) -> None:
            body = {"Name": name, "CheckDuplicate": True, "Driver": "bridge", "Labels": {LABEL: self.emulator}}
            self.engine.call("POST", "/networks/create", body={**body, "IPAM": {"Driver": "default", **ipam}})

        def find(name: str) -> str:
            return str(self.engine.call("GET", f"/networks/{name}")["IPAM"]["Config"][0]["Subnet"])

        probe = f"{self.network}-probe"
        with contextlib.suppress(EngineError):
            return find(self.network)
        for _ in range(10):
            if subnet:
                with contextlib.suppress(EngineError):  # another network has taken it
                    create(self.network, Config=[{"Subnet": subnet}])
                    return subnet
            # The engine knows which subnets are free, but gives containers fixed addresses only in a requested one.
            _call(self.engine, "DELETE", f"/networks/{probe}")  # of a server that was killed
            create(probe)
            subnet = find(probe)
            _call(self.engine, "DELETE", f"/networks/{probe}")
        raise EngineError(500, "no free network for the emulated hosts")

    def ensure(self, node: Node, host: Host) -> None:
        """Opens the host's agent socket, creates host and volumes, and starts the host, if need be, unless it is
        paused; does not await its boot. Raises EngineError."""
        self.open_agent_socket(host)
        volumes = {path: f"{host.hostname}{path.replace('/', '-')}" for path in SHARED}
        labels = {LABEL: self.emulator, HOST_LABEL: host.hostname}
        for path, name in volumes.items():
            volume = {"Name": name, "DriverOpts": SHARED[path], "Labels": labels}
            self.engine.call("POST", "/volumes/create", body=volume)
        body = {
            "Image": self.image,
            "Hostname": host.hostname,
            "Labels": {LABEL: self.emulator, MACHINE_LABEL: f"{node.short_name}-{host.index}"},
            "HostConfig": {
                "Init": True,
                "CapAdd": ["NET_ADMIN"],
                "NetworkMode": self.network,
                "Binds": [
                    f"{self.sockets / host.hostname}:/.emulator",
                    *(f"{name}:{path}" for path, name in volumes.items()),
                ],
                "ExtraHosts": [
                    *(f"{name}:169.254.169.254" for name in ("metadata.google.internal", "metadata")),
                    *(f"{name}:127.0.0.1" for name in STORAGE_NAMES),
                    *(f"{peer.hostname}:{peer.address}" for peer in node.hosts if peer is not host),
                ],
                "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m"}},
            },
            "NetworkingConfig": {"EndpointsConfig": {self.network: {"IPAMConfig": {"IPv4Address": host.address}}}},
        }
        create = partial(self.engine.call, "POST", "/containers/create", {"name": host.hostname}, body)
        for act in (create, partial(self.start, host)):
            try:
                act()
            except EngineError as error:
                if error.status != 409:  # an earlier server created it; a fault has paused it
                    raise

    def kill(self, host: Host) -> None:
        """Kills the host, then its containers, with SIGKILL; logs refused kills. Raises EngineError if it can't list
        them."""
        self._act(host, "kill")
        self.kill_containers(host.hostname)

    def kill_containers(self, hostname: str) -> None:
        """Kills the containers that run on a host, not the host; logs what the engine refuses. Raises EngineError if it
        can't list them."""
        self._act_on_containers(hostname, "kill", "running", "restarting", "paused")

    def power_off(self, host: Host) -> None:
        """Stops the host as a shutdown does: first its containers (SIGTERM, 10 s later SIGKILL), then itself (5 s).
        Logs what the engine refuses. Raises EngineError if it can't list the containers."""
        self._act_on_containers(host.hostname, "stop?t=10", "running")
        self._act(host, "stop?t=5")

    def start(self, host: Host) -> None:
        """Starts a host, unless it runs. Its containers stay ended, whatever restart policy. Raises EngineError if it
        does not exist or is paused; OSError when the engine is down."""
        self.engine.call("POST", f"/containers/{host.hostname}/start")

    def hang(self, host: Host) -> None:
        """Pauses all processes of the host and its containers: connections stay open, and nothing answers on them. Logs
        what the engine refuses. Raises EngineError if it can't list the containers."""
        self._act_on_containers(host.hostname, "pause", "running")
        self._act(host, "pause")

    def wake(self, host: Host) -> None:
        """Continues the processes that `hang` has paused; logs what the engine refuses. Raises EngineError if it can't
        list the containers."""
        self._act(host, "unpause")
        self._act_on_containers(host.hostname, "unpause", "paused")

    def cut(self, host: Host) -> None:
        """Disconnects the host from the network: no ssh, no peers. Its processes continue. Logs a refusal."""
        body = {"Container": host.hostname, "Force": True}
        _call(self.engine, "POST", f"/networks/{self.network}/disconnect", body=body)

    def join(self, host: Host) -> None:
        """Reconnects the host with the same address, unless it is connected; logs the engine's refusal."""
        endpoint = {"IPAMConfig": {"IPv4Address": host.address}}
        body = {"Container": host.hostname, "EndpointConfig": endpoint}
        _call(self.engine, "POST", f"/networks/{self.network}/connect", body=body)

    def remove(self, host: Host) -> None:
        """Kills and removes the host, its containers and its volumes. Raises EngineError if some remain."""
        _call(self.engine, "DELETE", f"/containers/{host.hostname}", _REMOVE)
        remove_all(self.engine, f"{LABEL}={self.emulator}", f"{HOST_LABEL}={host.hostname}")

    # -- agents

    def open_agent_socket(self, host: Host) -> None:
        """Opens the socket on which the host's agent hands over its listeners, and serves it, unless it is open."""
        with self.lock:
            if host.hostname not in self.agent_sockets:
                folder = self.sockets / host.hostname
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

    # -- faults

    def restore(self, host: Host) -> None:
        """Undoes kill, cut and hang; starts a host that is down, or raises EngineError. Its node's outage stays. The
        host of a node that is gone or going, preempted, or stopped is not started."""
        with self.store.change() as state:
            entry = state.find_host(host.hostname)
            cut, hung = host.cut, host.hung
            host.killed, host.cut, host.hung, host.restore_at = False, False, False, None
        if hung:
            self.wake(host)
        if cut:
            self.join(host)
        if entry is not None and entry[0].state not in ("PREEMPTED", "STOPPING", "STOPPED", "DELETING"):
            self.start(host)

    def resume(self) -> None:
        """Opens the agent sockets of all hosts. Starts those of READY nodes that went down while no server ran, unless
        a fault took them; logs failures."""
        with self.store.read() as state:
            found = [(node.state, host) for node in state.nodes.values() for host in node.hosts]
        for node_state, host in found:
            self.open_agent_socket(host)
            if node_state == "READY" and not host.killed and not host.hung:
                try:
                    self.start(host)
                except EngineError:
                    log.exception("starting %s", host.hostname)

    def run_timers(self) -> None:
        """Restores hosts and ends outages that are due; closes gone hosts' agent sockets. Raises EngineError."""
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
            with self.store.read() as state:
                known = {host.hostname for host in state.hosts}  # also those made since this pass began
            for name in set(self.agent_sockets) - known:
                self.agent_sockets.pop(name).close()
                shutil.rmtree(self.sockets / name, ignore_errors=True)

    def watch_deaths(self) -> None:
        """Kills the containers of hosts that die, or died unwatched; logs errors. Never returns."""
        ours = [f"{LABEL}={self.emulator}", MACHINE_LABEL]
        query = {"filters": json.dumps({"label": ours, "event": ["die"], "type": ["container"]})}
        while True:
            try:
                connection = engine_client.UnixConnection(self.engine.path, timeout=None)
                connection.request("GET", "/events?" + urlencode(query))
                response = connection.getresponse()
                for container in self.engine.containers(*ours):
                    if container["State"] not in ("running", "paused"):  # a paused host hangs, and may go on
                        self.kill_containers(container["Names"][0].removeprefix("/"))
                while line := response.readline():
                    name = json.loads(line)["Actor"]["Attributes"]["name"]
                    threading.Thread(target=self.kill_containers, args=(name,), daemon=True).start()
            except (OSError, ValueError, KeyError, EngineError, http.client.HTTPException):
                log.exception("watching the engine's events")
            time.sleep(0.5)

    # -- containers' folders

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
                volume = self.engine.call("GET", f"/volumes/{hostname}{shared.replace('/', '-')}")
                return str(volume["Mountpoint"]) + real.removeprefix(shared)
        text = f"an emulated TPU VM shares only {', '.join(SHARED)} with its containers"
        raise EngineError(400, f"invalid bind source {path}: {text}")

    def _real_path(self, hostname: str, path: str) -> str:
        """Returns a host's path with its symbolic links resolved, by running realpath on the host. The result may lie
        outside the shared folders, which `bind` refuses."""
        body = {"AttachStdout": True, "Tty": True, "Cmd": ["realpath", "-m", "--", path]}
        identifier = self.engine.call("POST", f"/containers/{hostname}/exec", body=body)["Id"]
        _, data = self.engine.raw("POST", f"/exec/{identifier}/start", body={"Tty": True})
        return data.decode(errors="replace").strip()

    def _act(self, host: Host, action: str) -> None:
        """Does an action of the engine's API on the host's own container; logs the engine's refusal."""
        _call(self.engine, "POST", f"/containers/{host.hostname}/{action}")

    def _act_on_containers(self, hostname: str, action: str, *states: str) -> None:
        """Does an action on the containers of a host that are in one of these states; logs what the engine refuses."""
        found = self.engine.containers(f"{LABEL}={self.emulator}", f"{HOST_LABEL}={hostname}")
        paths = [f"/containers/{each['Id']}/{action}" for each in found if each["State"] in states]
        in_parallel(lambda path: _call(self.engine, "POST", path), paths)


def unix_listener(path: Path) -> socket.socket:
    """Returns a listening unix socket for this user alone, in place of a socket file that a killed server left."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(512)
    return listener


def in_parallel(act: Callable[[Any], Any], items: Iterable[Any], at_once: int = 16) -> None:
    """Calls `act` for all items, up to `at_once` at a time, and waits for all; then raises the first exception."""
    with ThreadPoolExecutor(at_once) as pool:
        calls = [pool.submit(act, item) for item in items]  # `map` would cancel the others after a failure
    for call in calls:
        call.result()


def remove_all(engine: Engine, *labels: str) -> None:
    """Removes every container, volume and network that has all `labels` ("key=value"). Lists them again after each
    removal: the engine may still be creating a container for a server that is gone. Raises EngineError when some remain
    after 20 passes, OSError when the engine is down."""
    query = {"filters": json.dumps({"label": labels})}
    for attempt in range(20):
        containers = [f"/containers/{container['Id']}" for container in engine.containers(*labels)]
        in_parallel(lambda path: _call(engine, "DELETE", path, _REMOVE), containers)
        volumes, networks = engine.call("GET", "/volumes", query)["Volumes"], engine.call("GET", "/networks", query)
        rest = [f"/volumes/{volume['Name']}?force=1" for volume in volumes or []]
        rest += [f"/networks/{network['Id']}" for network in networks]
        in_parallel(lambda path: _call(engine, "DELETE", path), rest)
        if not containers and not rest:
            return
        time.sleep(0.1 + attempt / 20)  # a busy engine takes seconds to remove a container
    raise EngineError(500, f"not removed in 20 attempts: {', '.join(containers + rest)}")


def _call(engine: Engine, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None) -> None:
    """Makes a call. Ignores errors that mean "already done" (gone, stopped, not connected) and logs others."""
    try:
        engine.call(method, path, query, body)
    except EngineError as error:
        if error.status not in (304, 404, 409):
            log.warning("%s", error)
