"""What a host of a slice sees of the workstation's engine: pure functions that rewrite Docker Engine API requests and
responses.

A host's containers are the workstation's, with the host's name as a prefix of theirs, labels that name their host, and
the network of the host's container for `--network host`. What can't be emulated is refused with a message that says so.
Requests are received in engine_proxy.py, image names resolved in registry.py.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.clock import parse_time
from launcher.emulator.vm import virtual_tpu
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, MACHINE_LABEL

# The settings that a container was created with, kept as a label so that inspect shows them.
REQUESTED_LABEL = "tpu-launch.emulator.asked"
# The emulated Cloud Storage, as a host reaches it.
HOST_STORAGE = "http://127.0.0.1:4443"
CONTAINER_CA = "/etc/tpu-launch-emulator-ca.pem"
# What an engine says, after a reboot, of a container whose end it did not see (moby #45800).
_LOST_EXIT_CODE = 255
_OURS = (LABEL, HOST_LABEL, MACHINE_LABEL, REQUESTED_LABEL)

# The networks that a host's containers can have.
NETWORKS = ("bridge", "host", "none")
# Calls on one container that are passed through.
CONTAINER_ACTIONS = frozenset((
    "logs", "start", "stop", "kill", "restart", "wait", "attach", "exec", "top", "stats", "archive", "pause", "unpause",
    "resize", "changes", "export", "update",
))  # fmt: skip


class Refused(Exception):
    """The emulated engine refuses a request; `status` is the HTTP status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class HostView:
    """One host of one emulator, for which requests and responses are rewritten."""

    emulator: str
    hostname: str

    @property
    def prefix(self) -> str:
        """Begins the names of the host's containers and volumes at the workstation's engine."""
        return f"{self.hostname}."

    @property
    def labels(self) -> list[str]:
        """The labels of the host's containers and volumes, as "key=value"."""
        return [f"{LABEL}={self.emulator}", f"{HOST_LABEL}={self.hostname}"]


def split_version(path: str) -> tuple[str, str]:
    """ "/v1.41/containers/json" -> ("/v1.41", "/containers/json")."""
    match = re.match(r"^(/v\d+\.\d+)?(/.*)$", path)
    return (match[1] or "", match[2]) if match else ("", path)


def create_on_host(
    body: dict[str, Any],
    view: HostView,
    *,
    bind: Callable[[str], str],
    volume: Callable[[str], str],
    image: str,
    ca: str,
    tpu_volume: str | None = None,
) -> dict[str, Any]:
    """The body of containers/create for the workstation's engine.

    Args:
        body: what the host sent.
        view: the host.
        bind: a folder of the host -> that folder on the workstation; may raise Refused.
        volume: the host's name of a volume -> its name at the workstation's engine; may raise Refused.
        image: what to run, an image id when the name is a registry's.
        ca: a file of the workstation with the certificates that the container trusts.
        tpu_volume: the volume of the virtual TPU, for a container that is to have TPU devices; else it gets the CPU.

    Raises:
        Refused: a setting is not emulated.
    """
    new = copy.deepcopy(body)
    host = new.setdefault("HostConfig", {}) or {}
    new["HostConfig"] = host
    requested = {
        "Image": body.get("Image", ""),
        "NetworkMode": host.get("NetworkMode", "default"),
        "Privileged": bool(host.get("Privileged")),
        "Binds": host.get("Binds"),
    }
    new["Image"] = image
    new["Env"] = container_environment(body.get("Env") or [], HOST_STORAGE, has_tpu=tpu_volume is not None)
    _network(new, host, view)
    _namespaces(host, view, bind)
    _privileges(host)
    for key in ("VolumesFrom", "Links", "CgroupParent"):
        if host.get(key):
            raise Refused(400, f"HostConfig.{key} is not supported on an emulated TPU VM")
    host["Binds"] = [*(host.get("Binds_") or []), *(_bind(text, bind, volume) for text in host.get("Binds") or [])]
    host.pop("Binds_", None)
    if tpu_volume is not None:
        host["Binds"].append(f"{tpu_volume}:{virtual_tpu.MOUNTED_AT}:ro")
    if not any(variable.split("=")[0] == "CURL_CA_BUNDLE" for variable in new["Env"]):
        host["Binds"].append(f"{ca}:{CONTAINER_CA}:ro")
        new["Env"].append(f"CURL_CA_BUNDLE={CONTAINER_CA}")
    for mount in host.get("Mounts") or []:
        if mount.get("Type") == "bind":
            mount["Source"] = bind(mount.get("Source", ""))
        elif mount.get("Type") == "volume" and mount.get("Source"):
            mount["Source"] = volume(mount["Source"])
    own = {LABEL: view.emulator, HOST_LABEL: view.hostname, REQUESTED_LABEL: json.dumps(requested)}
    new["Labels"] = {**{key: value for key, value in (body.get("Labels") or {}).items() if key not in _OURS}, **own}
    return new


def create_on_workstation(body: dict[str, Any], emulator: str, storage: str, *, image: str) -> dict[str, Any]:
    """The body of containers/create for a container that the user starts on the workstation with the emulator's
    environment."""
    new = copy.deepcopy(body)
    new["Image"] = image
    new["Labels"] = {**(body.get("Labels") or {}), LABEL: emulator}
    if (body.get("HostConfig") or {}).get("NetworkMode") == "host":
        new["Env"] = container_environment(body.get("Env") or [], storage)
    return new


def container_environment(environment: list[str], storage: str, *, has_tpu: bool = False) -> list[str]:
    """The variables ("NAME=value") with the emulator's storage, and with the virtual TPU, or the CPU, for the TPU;
    others stay as they are."""
    device = virtual_tpu.container_environment() if has_tpu else {"PJRT_DEVICE": "CPU"}
    for_tpu = [f"{name}={value}" for name, value in device.items()]
    new = []
    for variable in environment:
        new += for_tpu if variable == "PJRT_DEVICE=TPU" else [variable]
    if not any(variable.split("=")[0] == "STORAGE_EMULATOR_HOST" for variable in new):
        new.append(f"STORAGE_EMULATOR_HOST={storage}")
    return new


def _network(new: dict[str, Any], host: dict[str, Any], view: HostView) -> None:
    mode = host.get("NetworkMode") or "default"
    if mode in ("default", "bridge", "none"):
        if any(host.get("PortBindings") or {}) or host.get("PublishAllPorts"):
            raise Refused(
                400, "publishing ports is not supported on an emulated TPU VM: use --network host, as on a TPU slice"
            )
        return
    if mode != "host":
        raise Refused(404, f"network {mode} not found (an emulated TPU VM has host, bridge and none)")
    for key in ("ExtraHosts", "Dns", "DnsOptions", "DnsSearch"):
        if host.get(key):
            raise Refused(400, f"HostConfig.{key} together with --network host is not supported on an emulated TPU VM")
    host["NetworkMode"] = f"container:{view.hostname}"
    # The engine refuses these beside another container's network; with a real host network it ignores them.
    for key in ("Hostname", "Domainname", "ExposedPorts", "MacAddress", "NetworkingConfig"):
        new.pop(key, None)
    for key in ("PortBindings", "PublishAllPorts"):
        host.pop(key, None)


def _namespaces(host: dict[str, Any], view: HostView, bind: Callable[[str], str]) -> None:
    """--pid, --ipc, --uts of "host" mean the emulated host's."""
    if host.get("PidMode") == "host":
        host["PidMode"] = f"container:{view.hostname}"
    if host.get("IpcMode") == "host":
        host["IpcMode"] = "private"
        host["Binds_"] = [f"{bind('/dev/shm')}:/dev/shm"]
    for key in ("PidMode", "IpcMode"):
        if str(host.get(key, "")).startswith("container:") and host[key] != f"container:{view.hostname}":
            raise Refused(400, f"HostConfig.{key} of another container is not supported on an emulated TPU VM")
    for key in ("UTSMode", "UsernsMode", "CgroupnsMode"):
        if host.get(key) == "host":
            host[key] = ""


def _privileges(host: dict[str, Any]) -> None:
    """Privileged containers get every capability but one, and no devices: an emulated host has none."""
    for device in host.get("Devices") or []:
        path = device.get("PathOnHost", "")
        raise Refused(
            400,
            f'error gathering device information while adding custom device "{path}": '
            "an emulated TPU VM has no devices",
        )
    if host.pop("Privileged", False):
        host["CapAdd"] = ["ALL"]
        # Many sandboxes and rootless engines lack this one, and asking for it would fail there.
        host["CapDrop"] = ["SYS_RESOURCE"]
        host["SecurityOpt"] = ["seccomp=unconfined", "apparmor=unconfined"]
    host["Ulimits"] = [limit for limit in host.get("Ulimits") or [] if limit.get("Name") != "memlock"]


def _bind(text: str, bind: Callable[[str], str], volume: Callable[[str], str]) -> str:
    source, _, rest = text.partition(":")
    if not rest:
        return text
    return f"{bind(source) if source.startswith('/') else volume(source)}:{rest}"


# -- responses


def present_container(value: dict[str, Any], view: HostView, host: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET containers/{id}/json as the host sees it.

    Args:
        value: the engine's answer.
        view: the host.
        host: the state of the host's own container; None for a container that has not ended.
    """
    new = copy.deepcopy(value)
    if host is not None and _died_with_host(new["State"], host):
        new["State"] |= {"ExitCode": _LOST_EXIT_CODE, "FinishedAt": host["StartedAt"]}
    requested = _requested(new["Config"].get("Labels"))
    new["Name"] = _strip(new["Name"], view)
    new["Config"]["Labels"] = _user_labels(new["Config"].get("Labels"))
    new["Config"]["Image"] = requested.get("Image", new["Config"]["Image"])
    for key in ("NetworkMode", "Privileged", "Binds"):
        if key in requested:
            new["HostConfig"][key] = requested[key]
    return new


def _died_with_host(state: dict[str, Any], host: dict[str, Any]) -> bool:
    """Whether a container ended while its host was down: the engine, restored after a reboot, did not see how."""
    died, ended, booted = (
        parse_time(text) or 0.0 for text in (host["FinishedAt"], state["FinishedAt"], host["StartedAt"])
    )
    return 0 < died <= ended <= booted


def present_listing(
    values: list[dict[str, Any]], view: HostView, names: list[str], limit: int | None
) -> list[dict[str, Any]]:
    """GET containers/json as the host sees it.

    Args:
        values: the engine's listing of the host's containers.
        view: the host.
        names: name filters, which the engine could not apply because its names are longer.
        limit: at most so many; None for all.
    """
    shown = []
    for value in values:
        new = copy.deepcopy(value)
        requested = _requested(new.get("Labels"))
        new["Names"] = [_strip(name, view) for name in new["Names"]]
        if names and not any(_matches(pattern, name) for pattern in names for name in new["Names"]):
            continue
        new["Labels"] = _user_labels(new.get("Labels"))
        new["Image"] = requested.get("Image", new["Image"])
        if "NetworkMode" in requested:
            new["HostConfig"] = {**new.get("HostConfig", {}), "NetworkMode": requested["NetworkMode"]}
        shown.append(new)
    return shown[:limit] if limit else shown


def listing_query(query: dict[str, str], view: HostView) -> tuple[dict[str, str], list[str], int | None]:
    """The query for the engine, and the name filters and the limit for `present_listing`. Raises Refused."""
    filters = parse_filters(query.get("filters", ""))
    names = filters.pop("name", [])
    filters["label"] = [*filters.get("label", []), *view.labels]
    new = {**query, "filters": json.dumps(filters)}
    limit = None
    if names and query.get("limit", "").isdigit():
        limit = int(new.pop("limit"))
    return new, names, limit


def own_query(query: dict[str, str], view: HostView) -> dict[str, str]:
    """The query with filters that let only the host's own objects through. Raises Refused."""
    filters = parse_filters(query.get("filters", ""))
    return {**query, "filters": json.dumps({**filters, "label": [*filters.get("label", []), *view.labels]})}


def parse_filters(text: str) -> dict[str, list[str]]:
    """Filters in either of the forms that clients send: lists, or objects whose keys are the values. Raises Refused."""
    try:
        value = json.loads(text or "{}")
        return {str(key): [str(item) for item in items] for key, items in value.items()}
    except (ValueError, TypeError, AttributeError):
        raise Refused(400, f"invalid filters: {text[:100]}") from None


def present_event(value: dict[str, Any], view: HostView) -> dict[str, Any]:
    """One event as the host sees it."""
    new = copy.deepcopy(value)
    attributes = (new.get("Actor") or {}).get("Attributes") or {}
    requested = _requested(attributes)
    if "name" in attributes:
        attributes["name"] = _strip(attributes["name"], view)
    if requested.get("Image"):
        attributes["image"] = new["from"] = requested["Image"]
    for key in _OURS:
        attributes.pop(key, None)
    return new


def present_networks(networks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """GET networks as the host sees it: those that every engine has."""
    return [network for network in networks if network["Name"] in NETWORKS]


def present_volume(value: dict[str, Any], view: HostView) -> dict[str, Any]:
    """One volume as the host sees it."""
    return {**value, "Name": value["Name"].removeprefix(view.prefix), "Labels": _user_labels(value.get("Labels"))}


def present_volumes(value: dict[str, Any], view: HostView) -> dict[str, Any]:
    """GET volumes as the host sees it: those of its containers, without those that are the host's own folders."""
    own = [volume for volume in value.get("Volumes") or [] if volume["Name"].startswith(view.prefix)]
    return {**value, "Volumes": [present_volume(volume, view) for volume in own]}


def resolve_container(name: str, own: list[dict[str, Any]], view: HostView) -> str:
    """The id of one of the host's containers.

    Args:
        name: its id, its name, or the start of its id.
        own: the engine's listing of the host's containers.
        view: the host.

    Raises:
        Refused: there is none, or several; with the engine's own message.
    """
    ids = [str(container["Id"]) for container in own]
    if name in ids:
        return name
    for container in own:
        if any(_strip(known, view) == f"/{name.removeprefix('/')}" for known in container["Names"]):
            return str(container["Id"])
    matches = [identifier for identifier in ids if name and identifier.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise Refused(400, f"Multiple IDs found with provided prefix: {name}")
    raise Refused(404, f"No such container: {name}")


def _strip(name: str, view: HostView) -> str:
    return name.replace(view.prefix, "", 1)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None or re.search(pattern, name.removeprefix("/")) is not None
    except re.error:
        return pattern == name.removeprefix("/")


def _requested(labels: dict[str, str] | None) -> dict[str, Any]:
    value = json.loads((labels or {}).get(REQUESTED_LABEL, "{}"))
    assert isinstance(value, dict)
    return value


def _user_labels(labels: dict[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (labels or {}).items() if key not in _OURS}
