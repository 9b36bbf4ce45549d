"""TPU VMs as containers of the workstation's engine: creates, starts, kills, disconnects and removes them.

A host is one container of images/host on the emulator's own network, with a fixed address. Its /home, /tmp, /run and
/dev/shm are volumes, so that containers which run on the host can bind-mount from them (engine_view.py); a kill loses
/run and /dev/shm, as a reboot does. The host needs no privilege but NET_ADMIN in its own namespace, for the metadata
server's address on its loopback interface.

Every function may be repeated.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launcher.emulator.state import Host, Node
from launcher.emulator.storage import NAMES as STORAGE_NAMES
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, MACHINE_LABEL, Engine, EngineError, filters

T = TypeVar("T")
log = logging.getLogger(__name__)

# Folder of a host -> options of its volume. The tmpfs volumes are lost when the host goes down.
SHARED = {
    "/home": {},
    "/tmp": {},
    "/run": {"type": "tmpfs", "device": "tmpfs", "o": "mode=755,size=1g"},
    "/dev/shm": {"type": "tmpfs", "device": "tmpfs", "o": "mode=1777,size=8g"},
}


_REMOVE = {"force": "1", "v": "1"}  # kills a container that runs, and removes its anonymous volumes


class HostContainers:
    """The containers, the volumes and the network of one emulator's hosts."""

    def __init__(self, engine: Engine, emulator: str, image: str, sockets: Path) -> None:
        self.engine = engine
        self.emulator = emulator
        self.image = image
        self.sockets = sockets

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

    def folder(self, host: Host) -> Path:
        """Returns the workstation's folder of the host's control socket."""
        return self.sockets / host.hostname

    def ensure(self, node: Node, host: Host) -> None:
        """Creates the host and its volumes, and starts it, if need be; does not await its boot. Raises EngineError."""
        with contextlib.suppress(EngineError):
            container = self.engine.call("GET", f"/containers/{host.hostname}/json")
            if not container["State"]["Running"]:
                self.engine.call("POST", f"/containers/{host.hostname}/start")
            return
        volumes = {path: f"{host.hostname}{path.replace('/', '-')}" for path in SHARED}
        for path, name in volumes.items():
            body = {
                "Name": name,
                "Driver": "local",
                "DriverOpts": SHARED[path],
                "Labels": {LABEL: self.emulator, HOST_LABEL: host.hostname},
            }
            self.engine.call("POST", "/volumes/create", body=body)
        peers = [f"{peer.hostname}:{peer.address}" for peer in node.hosts if peer is not host]
        body = {
            "Image": self.image,
            "Hostname": host.hostname,
            "Labels": {LABEL: self.emulator, MACHINE_LABEL: f"{node.short_name}-{host.index}"},
            "HostConfig": {
                "Init": True,
                "CapAdd": ["NET_ADMIN"],
                "NetworkMode": self.network,
                "Binds": [f"{self.folder(host)}:/.emulator", *(f"{name}:{path}" for path, name in volumes.items())],
                "ExtraHosts": [
                    "metadata.google.internal:169.254.169.254",
                    "metadata:169.254.169.254",
                    *(f"{name}:127.0.0.1" for name in STORAGE_NAMES),
                    *peers,
                ],
                "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m"}},
            },
            "NetworkingConfig": {"EndpointsConfig": {self.network: {"IPAMConfig": {"IPv4Address": host.address}}}},
        }
        try:
            self.engine.call("POST", "/containers/create", {"name": host.hostname}, body)
        except EngineError as error:
            if error.status != 409:  # an earlier server created it
                raise
        self.engine.call("POST", f"/containers/{host.hostname}/start")

    def volume_folder(self, host: Host, path: str) -> Path:
        """Returns the workstation's path of a host's folder `path`, one of SHARED. Raises EngineError if it is gone."""
        volume = self.engine.call("GET", f"/volumes/{host.hostname}{path.replace('/', '-')}")
        return Path(volume["Mountpoint"])

    def kill(self, host: Host) -> None:
        """Kills the host, then its containers, with SIGKILL; logs refused kills. Raises EngineError if it can't list
        them."""
        self._act(host, "kill")
        self.kill_containers(host.hostname)

    def kill_containers(self, hostname: str) -> None:
        """Kills the containers that run on a host, not the host; logs what the engine refuses."""
        self._act_on_containers(hostname, "kill", "running", "restarting", "paused")

    def power_off(self, host: Host) -> None:
        """Stops the host as a shutdown does: first its containers (SIGTERM, 10 s later SIGKILL), then itself (5 s)."""
        self._act_on_containers(host.hostname, "stop?t=10", "running")
        self._act(host, "stop?t=5")

    def start(self, host: Host) -> None:
        """Starts a host that exists, else raises EngineError. Its containers stay ended, whatever restart policy."""
        self.engine.call("POST", f"/containers/{host.hostname}/start")

    def hang(self, host: Host) -> None:
        """Pauses all processes of the host and its containers: connections stay open, and nothing answers on them."""
        self._act_on_containers(host.hostname, "pause", "running")
        self._act(host, "pause")

    def wake(self, host: Host) -> None:
        """Continues the processes that `hang` has paused; logs what the engine refuses."""
        self._act(host, "unpause")
        self._act_on_containers(host.hostname, "unpause", "paused")

    def cut(self, host: Host) -> None:
        """Disconnects the host from the network: no ssh, no peers. Its processes continue."""
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

    def _act(self, host: Host, action: str) -> None:
        """Does an action of the engine's API on the host's own container; logs the engine's refusal."""
        _call(self.engine, "POST", f"/containers/{host.hostname}/{action}")

    def _act_on_containers(self, hostname: str, action: str, *states: str) -> None:
        """Does an action on the containers of a host that are in one of these states; logs what the engine refuses."""
        found = self.engine.containers(f"{LABEL}={self.emulator}", f"{HOST_LABEL}={hostname}")
        paths = [f"/containers/{each['Id']}/{action}" for each in found if each["State"] in states]
        in_parallel(lambda path: _call(self.engine, "POST", path), paths)


def in_parallel(act: Callable[[T], Any], items: Iterable[T]) -> None:
    """Calls `act` for all items, up to 16 at a time, and waits for all. Raises the first failed item's exception."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(act, items))


def remove_all(engine: Engine, *labels: str) -> None:
    """Removes every container, volume and network that has all `labels` ("key=value"). Lists them again after each
    removal: the engine may still be creating a container for a server that is gone. Raises EngineError when some remain
    after 20 passes, OSError when the engine is down."""
    query = {"filters": filters(label=list(labels))}
    for _ in range(20):
        containers = [f"/containers/{container['Id']}" for container in engine.containers(*labels)]
        in_parallel(lambda path: _call(engine, "DELETE", path, _REMOVE), containers)
        volumes, networks = engine.call("GET", "/volumes", query)["Volumes"], engine.call("GET", "/networks", query)
        rest = [f"/volumes/{volume['Name']}?force=1" for volume in volumes or []]
        rest += [f"/networks/{network['Id']}" for network in networks]
        in_parallel(lambda path: _call(engine, "DELETE", path), rest)
        if not containers and not rest:
            return
        time.sleep(0.1)
    raise EngineError(500, f"not removed in 20 attempts: {', '.join(containers + rest)}")


def _call(engine: Engine, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None) -> None:
    """Makes a call. Ignores errors that mean "already done" (gone, stopped, not connected) and logs others."""
    try:
        engine.call(method, path, query, body)
    except EngineError as error:
        if error.status not in (304, 404, 409):
            log.warning("%s", error)
