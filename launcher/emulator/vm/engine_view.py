"""What a host of a slice sees of the workstation's engine: pure rewriting of Docker Engine API requests and answers.

A host's containers are the workstation's, with the host's name as a prefix, labels that say whose they are, and
`--network host` turned into "the network of the host's container". What can't be given honestly is refused with a
message that says so. The sockets are in engine_proxy.py, image names in registry.py.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, MACHINE_LABEL

# What a container was asked to be, kept on it so that inspect can say so.
REQUESTED_LABEL = "tpu-launch.emulator.asked"
# The bucket, as a host reaches it.
HOST_STORAGE = "http://127.0.0.1:4443"
CONTAINER_CA = "/etc/tpu-launch-emulator-ca.pem"
_OURS = (LABEL, HOST_LABEL, MACHINE_LABEL, REQUESTED_LABEL)

# The networks that a host's containers can have.
NETWORKS = ("bridge", "host", "none")
# What a host may ask about one container, beyond the containers' own calls below.
CONTAINER_ACTIONS = frozenset((
    "logs", "start", "stop", "kill", "restart", "wait", "attach", "exec", "top", "stats", "archive", "pause", "unpause", "resize", "changes",
    "export", "update",
))  # fmt: skip


class Refused(Exception):
    """The emulated engine says no, in the engine's shape."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class HostView:
    """Whose eyes: one host of one emulator."""

    emulator: str
    hostname: str

    @property
    def prefix(self) -> str:
        return f"{self.hostname}."

    @property
    def labels(self) -> list[str]:
        return [f"{LABEL}={self.emulator}", f"{HOST_LABEL}={self.hostname}"]


def split_version(path: str) -> tuple[str, str]:
    """ "/v1.41/containers/json" -> ("/v1.41", "/containers/json")."""
    found = re.match(r"^(/v\d+\.\d+)?(/.*)$", path)
    return (found[1] or "", found[2]) if found else ("", path)


def create_on_host(
    body: dict[str, Any],
    view: HostView,
    *,
    bind: Callable[[str], str],
    volume: Callable[[str], str],
    image: str,
    ca: str,
) -> dict[str, Any]:
    """The body of containers/create as the workstation's engine gets it.

    `bind` turns a folder of the host into one of the workstation, `volume` makes a volume of the host's and returns its
    name; both may raise Refused. `image` is what to run (an image id when the name is a registry's). `ca` is a file of
    the workstation: whom to believe over TLS.
    """
    new = copy.deepcopy(body)
    host = new.setdefault("HostConfig", {}) or {}
    new["HostConfig"] = host
    asked = {
        "Image": body.get("Image", ""),
        "NetworkMode": host.get("NetworkMode", "default"),
        "Privileged": bool(host.get("Privileged")),
        "Binds": host.get("Binds"),
    }
    new["Image"] = image
    new["Env"] = container_environment(body.get("Env") or [], HOST_STORAGE)
    _network(new, host, view)
    _namespaces(host, view, bind)
    _privileges(host)
    for key in ("VolumesFrom", "Links", "CgroupParent"):
        if host.get(key):
            raise Refused(400, f"HostConfig.{key} is not supported on an emulated TPU VM")
    host["Binds"] = [*(host.get("Binds_") or []), *(_bind(each, bind, volume) for each in host.get("Binds") or [])]
    host.pop("Binds_", None)
    if not any(each.split("=")[0] == "CURL_CA_BUNDLE" for each in new["Env"]):
        host["Binds"].append(f"{ca}:{CONTAINER_CA}:ro")
        new["Env"].append(f"CURL_CA_BUNDLE={CONTAINER_CA}")
    for mount in host.get("Mounts") or []:
        if mount.get("Type") == "bind":
            mount["Source"] = bind(mount.get("Source", ""))
        elif mount.get("Type") == "volume" and mount.get("Source"):
            mount["Source"] = volume(mount["Source"])
    own = {LABEL: view.emulator, HOST_LABEL: view.hostname, REQUESTED_LABEL: json.dumps(asked)}
    new["Labels"] = {**{key: value for key, value in (body.get("Labels") or {}).items() if key not in _OURS}, **own}
    return new


def create_on_workstation(body: dict[str, Any], emulator: str, storage: str, *, image: str) -> dict[str, Any]:
    """The same for a container that the user starts on the workstation while an emulated slice stands in for
    Google's."""
    new = copy.deepcopy(body)
    new["Image"] = image
    new["Labels"] = {**(body.get("Labels") or {}), LABEL: emulator}
    if (body.get("HostConfig") or {}).get("NetworkMode") == "host":
        new["Env"] = container_environment(body.get("Env") or [], storage)
    return new


def container_environment(environment: list[str], storage: str) -> list[str]:
    """There are no TPU chips, and the bucket is the emulator's; what the user set otherwise stays."""
    new = ["PJRT_DEVICE=CPU" if each == "PJRT_DEVICE=TPU" else each for each in environment]
    if not any(each.split("=")[0] == "STORAGE_EMULATOR_HOST" for each in new):
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
    """Privileged containers get every capability but one, and no devices: there are none, and the workstation's are
    nobody's business here."""
    for device in host.get("Devices") or []:
        path = device.get("PathOnHost", "")
        raise Refused(
            400,
            f'error gathering device information while adding custom device "{path}": an emulated TPU VM has no devices',
        )
    if host.pop("Privileged", False):
        host["CapAdd"] = ["ALL"]
        # Many sandboxes and rootless engines lack this one, and asking for it would fail there.
        host["CapDrop"] = ["SYS_RESOURCE"]
        host["SecurityOpt"] = ["seccomp=unconfined", "apparmor=unconfined"]
    host["Ulimits"] = [each for each in host.get("Ulimits") or [] if each.get("Name") != "memlock"]


def _bind(text: str, bind: Callable[[str], str], volume: Callable[[str], str]) -> str:
    source, _, rest = text.partition(":")
    if not rest:
        return text
    return f"{bind(source) if source.startswith('/') else volume(source)}:{rest}"


# -- answers
# ------------------------------------------------------------------------------------------------------------------------------


def present_container(value: dict[str, Any], view: HostView) -> dict[str, Any]:
    """GET containers/{id}/json as the host sees it."""
    new = copy.deepcopy(value)
    asked = _requested(new["Config"].get("Labels"))
    new["Name"] = _strip(new["Name"], view)
    new["Config"]["Labels"] = _user_labels(new["Config"].get("Labels"))
    new["Config"]["Image"] = asked.get("Image", new["Config"]["Image"])
    for key in ("NetworkMode", "Privileged", "Binds"):
        if key in asked:
            new["HostConfig"][key] = asked[key]
    return new


def present_listing(
    values: list[dict[str, Any]], view: HostView, names: list[str], limit: int | None
) -> list[dict[str, Any]]:
    """GET containers/json as the host sees it. `names` are the name filters, which the engine could not apply: it knows
    longer names."""
    shown = []
    for value in values:
        new = copy.deepcopy(value)
        asked = _requested(new.get("Labels"))
        new["Names"] = [_strip(name, view) for name in new["Names"]]
        if names and not any(_matches(pattern, name) for pattern in names for name in new["Names"]):
            continue
        new["Labels"] = _user_labels(new.get("Labels"))
        new["Image"] = asked.get("Image", new["Image"])
        if "NetworkMode" in asked:
            new["HostConfig"] = {**new.get("HostConfig", {}), "NetworkMode": asked["NetworkMode"]}
        shown.append(new)
    return shown[:limit] if limit else shown


def listing_query(query: dict[str, str], view: HostView) -> tuple[dict[str, str], list[str], int | None]:
    """The query for the engine, the name filters and the limit that are left for `present_listing`. Raises Refused."""
    wanted = parse_filters(query.get("filters", ""))
    names = wanted.pop("name", [])
    wanted["label"] = [*wanted.get("label", []), *view.labels]
    new = {**query, "filters": json.dumps(wanted)}
    limit = None
    if names and query.get("limit", "").isdigit():
        limit = int(new.pop("limit"))
    return new, names, limit


def own_query(query: dict[str, str], view: HostView) -> dict[str, str]:
    """The query with filters that let only the host's own objects through. Raises Refused."""
    filters = parse_filters(query.get("filters", ""))
    return {**query, "filters": json.dumps({**filters, "label": [*filters.get("label", []), *view.labels]})}


def parse_filters(text: str) -> dict[str, list[str]]:
    """Filters in either of the forms that clients send: lists, or objects whose keys count. Raises Refused."""
    try:
        value = json.loads(text or "{}")
        return {str(key): [str(item) for item in each] for key, each in value.items()}
    except (ValueError, TypeError, AttributeError):
        raise Refused(400, f"invalid filters: {text[:100]}") from None


def present_event(value: dict[str, Any], view: HostView) -> dict[str, Any]:
    """One event as the host sees it."""
    new = copy.deepcopy(value)
    attributes = (new.get("Actor") or {}).get("Attributes") or {}
    asked = _requested(attributes)
    if "name" in attributes:
        attributes["name"] = _strip(attributes["name"], view)
    if asked.get("Image"):
        attributes["image"] = new["from"] = asked["Image"]
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
    """GET volumes as the host sees it: those that its containers made, and not the ones that are the host's own
    folders."""
    own = [each for each in value.get("Volumes") or [] if each["Name"].startswith(view.prefix)]
    return {**value, "Volumes": [present_volume(each, view) for each in own]}


def resolve_container(name: str, own: list[dict[str, Any]], view: HostView) -> str:
    """The id of one of the host's own containers by id, name or start of an id. `own` is a listing. Raises Refused, as
    the engine says it."""
    ids = [each["Id"] for each in own]
    if name in ids:
        return name
    for each in own:
        if any(_strip(known, view) == f"/{name.removeprefix('/')}" for known in each["Names"]):
            return str(each["Id"])
    starts = [each for each in ids if name and each.startswith(name)]
    if len(starts) == 1:
        return str(starts[0])
    if starts:
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
