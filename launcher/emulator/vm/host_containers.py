"""TPU VMs as containers of the workstation's engine: creates, starts, kills, disconnects and removes them.

A host is one container of images/host on the emulator's own network, with a fixed address. Its /home, /tmp, /run and
/dev/shm are volumes, so that containers which run on the host can bind-mount from them (engine_view.py); a kill loses
/run and /dev/shm, as a reboot does. The host needs no privilege but NET_ADMIN in its own namespace, for the metadata
server's address on its loopback interface.

Every function may be repeated.
"""

import contextlib
import ipaddress
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
        """Creates the network unless it exists, with `subnet` if that is free, else ("" too) with another one. Returns
        its subnet, which may differ from `subnet`. Raises EngineError when no subnet is free."""
        with contextlib.suppress(EngineError):
            network = self.engine.call("GET", f"/networks/{self.network}")
            return str(network["IPAM"]["Config"][0]["Subnet"])
        error: EngineError | None = None
        for candidate in ([subnet] if subnet else []) + free_subnets(self.emulator, _routed_subnets()):
            body = {
                "Name": self.network,
                "CheckDuplicate": True,
                "Driver": "bridge",
                "IPAM": {"Driver": "default", "Config": [{"Subnet": candidate}]},
                "Labels": {LABEL: self.emulator},
            }
            try:
                self.engine.call("POST", "/networks/create", body=body)
                return candidate
            except EngineError as refused:
                error = refused
        raise EngineError(500, f"no free network for the emulated hosts: {error}")

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

    def _list_on(self, hostname: str, *states: str) -> list[str]:
        """Returns the ids of the containers of a host that are in one of these states; without any, of all."""
        found = self.engine.containers(f"{LABEL}={self.emulator}", f"{HOST_LABEL}={hostname}")
        return [container["Id"] for container in found if not states or container["State"] in states]

    def kill(self, host: Host) -> None:
        """Kills the host, then its containers, with SIGKILL; logs refused kills. Raises EngineError if it can't list
        them."""
        self._call("POST", f"/containers/{host.hostname}/kill")
        self.kill_containers(host.hostname)

    def kill_containers(self, hostname: str) -> None:
        """Kills the containers that run on a host, not the host; logs what the engine refuses."""
        alive = self._list_on(hostname, "running", "restarting", "paused")
        self._call_all("POST", [f"/containers/{container}/kill" for container in alive])

    def power_off(self, host: Host) -> None:
        """Stops the host as a shutdown does: first its containers (SIGTERM, 10 s later SIGKILL), then itself (5 s)."""
        running = self._list_on(host.hostname, "running")
        self._call_all("POST", [f"/containers/{container}/stop" for container in running], {"t": "10"})
        self._call("POST", f"/containers/{host.hostname}/stop", {"t": "5"})

    def start(self, host: Host) -> None:
        """Starts a host that exists, else raises EngineError. Its containers stay ended, whatever restart policy."""
        self.engine.call("POST", f"/containers/{host.hostname}/start")

    def hang(self, host: Host) -> None:
        """Pauses all processes of the host and its containers: connections stay open, and nothing answers on them."""
        for name in (*self._list_on(host.hostname, "running"), host.hostname):
            self._call("POST", f"/containers/{name}/pause")

    def wake(self, host: Host) -> None:
        """Continues the processes that `hang` has paused; logs what the engine refuses."""
        for name in (host.hostname, *self._list_on(host.hostname, "paused")):
            self._call("POST", f"/containers/{name}/unpause")

    def cut(self, host: Host) -> None:
        """Disconnects the host from the network: no ssh, no peers. Its processes continue."""
        self._call("POST", f"/networks/{self.network}/disconnect", body={"Container": host.hostname, "Force": True})

    def join(self, host: Host) -> None:
        """Reconnects the host with the same address, unless it is connected; logs the engine's refusal."""
        endpoint = {"IPAMConfig": {"IPv4Address": host.address}}
        self._call(
            "POST", f"/networks/{self.network}/connect", body={"Container": host.hostname, "EndpointConfig": endpoint}
        )

    def remove(self, host: Host) -> None:
        """Kills and removes the host, its containers and its volumes; logs what the engine refuses."""
        self._call("POST", f"/containers/{host.hostname}/kill")
        names = [*self._list_on(host.hostname), host.hostname]
        self._call_all("DELETE", [f"/containers/{name}" for name in names], {"force": "1", "v": "1"})
        own_volumes = filters(label=[f"{LABEL}={self.emulator}", f"{HOST_LABEL}={host.hostname}"])
        for volume in self.engine.call("GET", "/volumes", {"filters": own_volumes})["Volumes"] or []:
            self._call("DELETE", f"/volumes/{volume['Name']}", {"force": "1"})

    def _call(self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None) -> None:
        """Makes a call. Ignores errors that mean "already done" (gone, stopped, not connected) and logs others."""
        try:
            self.engine.call(method, path, query, body)
        except EngineError as error:
            if error.status not in (304, 404, 409):
                log.warning("%s", error)

    def _call_all(self, method: str, paths: list[str], query: dict[str, Any] | None = None) -> None:
        in_parallel(lambda path: self._call(method, path, query), paths)


def in_parallel(act: Callable[[T], Any], items: Iterable[T]) -> None:
    """Calls `act` for all items, up to 16 at a time, and waits for all. Raises the first failed item's exception."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(act, items))


def _routed_subnets() -> list[str]:
    """Returns the subnets to which the workstation has routes, those of the engine's networks included, as CIDR."""
    taken = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            _, destination, _, _, _, _, _, mask, *_ = line.split()
            if destination != "00000000":
                address = ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(destination)[::-1], "big"))
                taken.append(f"{address}/{bin(int(mask, 16)).count('1')}")
    return taken


def free_subnets(emulator: str, taken: list[str]) -> list[str]:
    """Returns those of 64 networks /22 in 10.128.0.0/9 (Google's default network) that overlap with no network in
    `taken` (CIDR). The emulator's id decides which 64, so that two emulators seldom try the same one."""
    used = [ipaddress.ip_network(network, strict=False) for network in taken]
    start = int(emulator, 16) % (128 * 64)
    candidates = []
    for offset in range(64):
        second, block = divmod((start + offset * 131) % (128 * 64), 64)
        network = ipaddress.ip_network(f"10.{128 + second}.{block * 4}.0/22")
        if not any(network.overlaps(other) for other in used if other.version == 4):
            candidates.append(str(network))
    return candidates


def remove_everything(engine: Engine, emulator: str) -> None:
    """Removes every container, volume and network of an emulator. Lists them again after each removal: the engine may
    still be creating a container for a server that is gone. Raises EngineError when some remain after 20 passes,
    OSError when the engine is down."""
    label = f"{LABEL}={emulator}"
    containers = HostContainers(engine, emulator, "", Path())
    for _ in range(20):
        names = [f"/containers/{container['Id']}" for container in engine.containers(label)]
        containers._call_all("DELETE", names, {"force": "1", "v": "1"})
        volumes = engine.call("GET", "/volumes", {"filters": filters(label=[label])})["Volumes"] or []
        networks = engine.call("GET", "/networks", {"filters": filters(label=[label])})
        rest = [f"/volumes/{volume['Name']}" for volume in volumes]
        rest += [f"/networks/{network['Id']}" for network in networks]
        for path in rest:
            containers._call("DELETE", path)
        if not names and not rest:
            return
        time.sleep(0.1)
    raise EngineError(500, f"not removed in 20 attempts: {', '.join(names + rest)}")
