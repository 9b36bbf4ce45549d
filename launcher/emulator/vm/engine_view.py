"""Rewrites Docker Engine API requests and responses, so that each emulated host sees an engine of its own. Pure.

A host's containers run on the workstation's engine: their names begin with the host's name, labels name the host, and
`--network host` means the network of the host's container. A setting that cannot be emulated is refused with a message
that says so. engine_proxy.py receives the requests; engine_images.py resolves the names of images.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.emulator.vm import virtual_tpu
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, MACHINE_LABEL, EngineError
from training.machine import parse_time

REQUESTED_LABEL = "tpu-launch.emulator.asked"  # the settings that a container was created with, shown by inspect
HOST_STORAGE = "http://127.0.0.1:4443"  # the emulated Cloud Storage, as a host reaches it
CONTAINER_CA = "/etc/tpu-launch-emulator-ca.pem"
_LOST_EXIT_CODE = 255  # what an engine reports, after a reboot, for a container whose end it did not see (moby #45800)
_OUR_LABELS = (LABEL, HOST_LABEL, MACHINE_LABEL, REQUESTED_LABEL)

# Settings of HostConfig that would show a container the workstation or another container, or that a host lacks.
_REFUSED = (
    "VolumesFrom", "Links", "CgroupParent", "PidMode", "IpcMode", "UTSMode", "UsernsMode", "CgroupnsMode",
    "ExtraHosts", "Dns", "DnsOptions", "DnsSearch", "Devices",
)  # fmt: skip


@dataclass(frozen=True)
class EngineView:
    """The host for which requests and responses are rewritten."""

    emulator: str
    hostname: str

    @property
    def prefix(self) -> str:
        """Returns the prefix of the host's containers and volumes in names of the workstation's engine."""
        return f"{self.hostname}."

    @property
    def labels(self) -> list[str]:
        """The labels of the host's containers and volumes, as "key=value"."""
        return [f"{LABEL}={self.emulator}", f"{HOST_LABEL}={self.hostname}"]


def create_on_host(
    body: dict[str, Any],
    view: EngineView,
    *,
    find_source: Callable[[str], str],
    image: str,
    ca: str,
    tpu_volume: str | None = None,
) -> dict[str, Any]:
    """Returns the body of containers/create for the workstation's engine, from the host's. `find_source`
    maps a folder or the name of a volume of the host to the workstation's. The container runs `image`, trusts the
    certificates in the file `ca` unless it sets CURL_CA_BUNDLE, and gets the virtual TPU of `tpu_volume` (None: the
    CPU) if PJRT_DEVICE is TPU. Raises EngineError for a setting that is not emulated, or from `find_source`."""
    new = copy.deepcopy(body)
    host = new["HostConfig"] = new.get("HostConfig") or {}
    requested = {
        "Image": body.get("Image", ""),
        "NetworkMode": host.get("NetworkMode", "default"),
        "Privileged": bool(host.get("Privileged")),
        "Binds": host.get("Binds"),
    }
    new["Image"] = image
    new["Env"] = container_environment(body.get("Env") or [], HOST_STORAGE, has_tpu=tpu_volume is not None)
    mode = host.get("NetworkMode") or "default"
    if mode == "host":
        host["NetworkMode"] = f"container:{view.hostname}"
        for key in ("Hostname", "Domainname", "ExposedPorts", "MacAddress", "NetworkingConfig"):
            new.pop(key, None)  # the engine refuses them beside another container's network
    elif mode not in ("default", "bridge", "none"):
        raise EngineError(404, f"network {mode} not found (an emulated TPU VM has host, bridge and none)")
    publishes = any([host.pop("PortBindings", None), host.pop("PublishAllPorts", False)])
    if publishes and mode != "host":  # there it has no effect
        raise EngineError(
            400, "publishing ports is not supported on an emulated TPU VM: use --network host, as on a TPU slice"
        )
    _set_privileges(host)
    for key in _REFUSED:
        if host.get(key) and host[key] != "private":
            raise EngineError(400, f"HostConfig.{key} is not supported on an emulated TPU VM")
    if (host.get("RestartPolicy") or {}).get("Name") in ("always", "unless-stopped"):
        raise EngineError(400, "a container that restarts with its host is not supported on an emulated TPU VM")
    binds = [text.partition(":") for text in host.get("Binds") or []]
    host["Binds"] = [f"{find_source(source)}:{rest}" if rest else source for source, _, rest in binds]
    if tpu_volume is not None:
        host["Binds"].append(f"{tpu_volume}:{virtual_tpu.MOUNTED_AT}:ro")
    if not any(variable.startswith("CURL_CA_BUNDLE=") for variable in new["Env"]):
        host["Binds"].append(f"{ca}:{CONTAINER_CA}:ro")
        new["Env"].append(f"CURL_CA_BUNDLE={CONTAINER_CA}")
    for mount in host.get("Mounts") or []:
        if mount.get("Source"):
            mount["Source"] = find_source(mount["Source"])
    ours = {LABEL: view.emulator, HOST_LABEL: view.hostname, REQUESTED_LABEL: json.dumps(requested)}
    new["Labels"] = {**_without_our_labels(body.get("Labels")), **ours}
    return new


def create_on_workstation(body: dict[str, Any], emulator: str, storage: str, *, image: str) -> dict[str, Any]:
    """Returns the body of containers/create for a container of `image` that the user starts on the workstation: with
    the emulator's label, and with --network host also its `storage` (a URL), and the CPU in place of a TPU."""
    new = {**body, "Image": image, "Labels": {**(body.get("Labels") or {}), LABEL: emulator}}
    if (body.get("HostConfig") or {}).get("NetworkMode") == "host":
        new["Env"] = container_environment(body.get("Env") or [], storage)
    return new


def container_environment(environment: list[str], storage: str, *, has_tpu: bool = False) -> list[str]:
    """Returns the variables ("NAME=value") with the emulator's storage, a URL, added unless one is set, and
    PJRT_DEVICE=TPU replaced by the variables of the virtual TPU (`has_tpu`) or by the CPU."""
    device = virtual_tpu.container_environment() if has_tpu else {"PJRT_DEVICE": "CPU"}
    new = []
    for variable in environment:
        new += [f"{name}={value}" for name, value in device.items()] if variable == "PJRT_DEVICE=TPU" else [variable]
    if not any(variable.startswith("STORAGE_EMULATOR_HOST=") for variable in new):
        new.append(f"STORAGE_EMULATOR_HOST={storage}")
    return new


def _set_privileges(host: dict[str, Any]) -> None:
    """Changes the HostConfig `host`: privileged containers get all capabilities but SYS_RESOURCE, and no seccomp or
    AppArmor; memlock limits are dropped."""
    if host.pop("Privileged", False):
        host["CapAdd"] = ["ALL"]
        # Many sandboxes and rootless engines lack this capability, and requesting it fails there.
        host["CapDrop"] = ["SYS_RESOURCE"]
        host["SecurityOpt"] = ["seccomp=unconfined", "apparmor=unconfined"]
    host["Ulimits"] = [limit for limit in host.get("Ulimits") or [] if limit.get("Name") != "memlock"]


# -- responses


def present_container(value: dict[str, Any], view: EngineView, host: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the response to GET containers/{id}/json as the host sees it: its own names and labels, and the image,
    network, privileges and binds that it requested. With `host`, the state of the host's own container, a container
    that ended while the host was down has exit code 255 and ended at the host's boot, as after a real reboot."""
    new = copy.deepcopy(value)
    if host is not None and _died_with_host(new["State"], host):
        new["State"] |= {"ExitCode": _LOST_EXIT_CODE, "FinishedAt": host["StartedAt"]}
    requested = _requested_settings(new["Config"].get("Labels"))
    new["Name"] = _strip_prefix(new["Name"], view)
    new["Config"]["Labels"] = _without_our_labels(new["Config"].get("Labels"))
    new["Config"]["Image"] = requested.get("Image", new["Config"]["Image"])
    for key in ("NetworkMode", "Privileged", "Binds"):
        if key in requested:
            new["HostConfig"][key] = requested[key]
    return new


def _died_with_host(state: dict[str, Any], host: dict[str, Any]) -> bool:
    """Returns whether a container ended while its host, booted again since, was down. Takes the engine's "State" of
    both."""
    died, ended, booted = (
        parse_time(text) or 0.0 for text in (host["FinishedAt"], state["FinishedAt"], host["StartedAt"])
    )
    return 0 < died <= ended <= booted


def present_listing(values: list[dict[str, Any]], view: EngineView) -> list[dict[str, Any]]:
    """Returns the response to GET containers/json, the engine's listing of a host's containers, as the host sees it."""
    shown = []
    for value in values:
        requested = _requested_settings(value.get("Labels"))
        new = {**value, "Names": [_strip_prefix(name, view) for name in value["Names"]]}
        new["Labels"] = _without_our_labels(value.get("Labels"))
        new["Image"] = requested.get("Image", value["Image"])
        if "NetworkMode" in requested:
            new["HostConfig"] = {**value.get("HostConfig", {}), "NetworkMode": requested["NetworkMode"]}
        shown.append(new)
    return shown


def listing_query(query: dict[str, str], view: EngineView) -> dict[str, str]:
    """Returns a host's query of a listing, restricted to the host's labels. Raises EngineError for filters that are not
    JSON, and for one by name: the engine's names are longer."""
    try:
        # Clients send a filter's values as a list, or as the keys of an object.
        given = json.loads(query.get("filters") or "{}")
        filters = {str(key): [str(item) for item in items] for key, items in given.items()}
    except (ValueError, TypeError, AttributeError):
        raise EngineError(400, f"invalid filters: {query['filters'][:100]}") from None
    if "name" in filters:
        raise EngineError(400, "a filter by name is not supported on an emulated TPU VM: filter by label")
    filters["label"] = [*filters.get("label", []), *view.labels]
    return {**query, "filters": json.dumps(filters)}


def _strip_prefix(name: str, view: EngineView) -> str:
    return name.replace(view.prefix, "", 1)


def _requested_settings(labels: dict[str, str] | None) -> dict[str, Any]:
    """Returns the settings that the container's creation requested, from its label; {} without it."""
    return dict(json.loads((labels or {}).get(REQUESTED_LABEL, "{}")))


def _without_our_labels(labels: dict[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (labels or {}).items() if key not in _OUR_LABELS}
