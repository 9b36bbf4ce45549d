"""The metadata server that a host sees at 169.254.169.254. Values are pure functions of the emulator's state.

Their format follows Google's documentation of the Compute Engine metadata server, and what torch_xla, TensorFlow and
JAX read on a TPU VM.
"""

import hashlib
import json
from typing import Any

from launcher.emulator.api.nodes import PROJECT_NUMBER, service_account
from launcher.emulator.http_server import HttpRequest, HttpResponse
from launcher.emulator.state import EmulatorState, Host, Node, Store
from training.accelerators import ACCELERATORS

_HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
_ROOT = "computeMetadata/v1/"


def attributes(node: Node, host: Host) -> dict[str, str]:
    """Returns instance/attributes/: the user's metadata and the values that Cloud TPU adds."""
    return {
        **node.resource.get("metadata", {}),
        "accelerator-type": node.resource["acceleratorType"],
        "agent-worker-number": str(host.index),
        "tpu-env": tpu_env(node, host),
        # The hosts in worker order, each as "name:id:address".
        "worker-network-endpoints": ",".join(
            f"{each.hostname}:{each.instance_id}:{each.address}" for each in node.hosts
        ),
    }


def tpu_env(node: Node, host: Host) -> str:
    """Returns the attribute tpu-env: YAML lines as on a real v4 slice; v2 and v3 have no bounds, topology or ports."""
    accelerator, scheduling = ACCELERATORS[node.resource["acceleratorType"]], node.resource["schedulingConfig"]
    values: dict[str, object] = {
        "ACCELERATOR_TYPE": accelerator.name,
        "CONSUMER_PROJECT_ID": node.project,
        "CONSUMER_PROJECT_NUMBER": PROJECT_NUMBER,
        "NODE_ID": node.short_name,
        "PREEMPTIBLE": str(bool(scheduling.get("spot") or scheduling.get("preemptible"))).lower(),
        "RUNTIME_VERSION": node.resource["runtimeVersion"],
        "TYPE": node.resource["acceleratorConfig"]["type"],
        "WORKER_ID": host.index,
        "ZONE": node.zone,
    }
    if accelerator.generation.name not in ("v2", "v3"):
        chips = ",".join(map(str, accelerator.chips_per_host_bounds))
        hosts = ",".join(map(str, accelerator.host_bounds))
        values |= {
            "CHIPS_PER_HOST_BOUNDS": chips,
            "HOST_BOUNDS": hosts,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": chips,
            "TPU_PROCESS_BOUNDS": hosts,
            "TOPOLOGY": accelerator.topology_name,
            "TPU_RUNTIME_METRICS_PORTS": ",".join(str(8431 + chip) for chip in range(accelerator.chips_per_host)),
        }
    return "".join(f"{key}: '{value}'\n" for key, value in sorted(values.items()))


def tree(node: Node, host: Host) -> dict[str, Any]:
    """Returns everything below computeMetadata/v1/ but guest attributes, which hosts only write. Unlike Google's
    camelCase, recursive JSON has the paths' names."""
    account = {
        "aliases": ["default"],
        "email": service_account(),
        "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
        "token": {"access_token": host.token, "expires_in": 3599, "token_type": "Bearer"},
    }
    network = f"projects/{PROJECT_NUMBER}/networks/default"
    interface = {"ip": host.address, "network": network, "mac": "42:01:0a:00:00:02"}
    return {
        "instance": {
            "attributes": attributes(node, host),
            "hostname": f"{host.hostname}.{node.zone}.c.{node.project}.internal",
            "id": host.instance_id,
            "machine-type": f"projects/{PROJECT_NUMBER}/machineTypes/n1-standard-96",
            "maintenance-event": "NONE",
            "name": host.hostname,
            "network-interfaces": {"0": interface},
            "preempted": "TRUE" if node.state == "PREEMPTED" else "FALSE",
            "service-accounts": {"default": account, service_account(): account},
            "tags": list(node.resource.get("tags", [])),
            "zone": f"projects/{PROJECT_NUMBER}/zones/{node.zone}",
        },
        "project": {"attributes": {}, "numeric-project-id": int(PROJECT_NUMBER), "project-id": node.project},
    }


def answer(store: Store, hostname: str, request: HttpRequest) -> HttpResponse:
    """Answers a host's request; 403 without Metadata-Flavor: Google, 404 for a host that is gone. PUT stores a guest
    attribute. A GET with wait_for_change blocks until the value's ETag differs from last_etag (by default from the
    current one), at most timeout_sec (300; up to 3000)."""
    if request.headers.get("Metadata-Flavor") != "Google":
        return _text_response(403, "Missing Metadata-Flavor:Google header.\n")
    if request.headers.get("X-Forwarded-For"):
        return _text_response(403, "Requests with an X-Forwarded-For header are refused.\n")
    path = "/".join(request.segments) + "/"
    if not path.startswith(_ROOT):
        return _text_response(200, "computeMetadata/\n") if path == "/" else _text_response(404, "not found\n")
    path = path.removeprefix(_ROOT).rstrip("/")
    if request.method == "PUT":
        return _put(store, hostname, path, request)
    if request.method not in ("GET", "HEAD"):
        return _text_response(405, "method not allowed\n")

    def value(state: EmulatorState) -> Any:
        """Returns the value at the request's path now; None if it, or the host, is gone."""
        entry = state.find_host(hostname)
        return None if entry is None else _value_at(tree(*entry), path)

    with store.read() as state:
        now = value(state)
    if now is not None and request.query.get("wait_for_change", "").lower() == "true":
        last = request.query.get("last_etag") or _compute_etag(now)
        seconds = min(float(request.query.get("timeout_sec", 300)), 3000)
        store.wait(lambda state: _compute_etag(value(state)) != last, seconds)
        with store.read() as state:
            now = value(state)
    if now is None:
        return _text_response(404, f"/{_ROOT}{path} was not found\n")
    return _render(now, request)


def _render(value: Any, request: HttpRequest) -> HttpResponse:
    """Returns a value as text or JSON; a folder without `recursive` as names, or for a path without / a redirect."""
    recursive = request.query.get("recursive", "").lower() == "true"
    form = request.query.get("alt", "json" if recursive else "text")
    headers = {"ETag": _compute_etag(value)}
    if isinstance(value, dict) and "access_token" not in value:
        if not request.path.endswith("/") and not recursive:
            return HttpResponse(301, b"", {**_HEADERS, "Location": request.path + "/"})
        if not recursive:
            names = (f"{key}/\n" if isinstance(entry, dict) else f"{key}\n" for key, entry in value.items())
            return _text_response(200, "".join(names), headers)
    if form == "json" or isinstance(value, dict):
        headers |= {**_HEADERS, "Content-Type": "application/json"}
        return HttpResponse(200, json.dumps(value).encode(), headers)
    return _text_response(200, "\n".join(value) + "\n" if isinstance(value, list) else str(value), headers)


def _put(store: Store, hostname: str, path: str, request: HttpRequest) -> HttpResponse:
    """Stores a guest attribute of a host, instance/guest-attributes/NAMESPACE/KEY; 405 for others, 404 without host."""
    parts = path.split("/")
    if parts[:2] != ["instance", "guest-attributes"] or len(parts) != 4:
        return _text_response(405, "only instance/guest-attributes/NAMESPACE/KEY can be written\n")
    value = request.body.read_all(limit=1 << 20).decode(errors="replace")
    with store.change() as state:
        entry = state.find_host(hostname)
        if entry is not None:
            entry[1].guest_attributes[f"{parts[2]}/{parts[3]}"] = value
    return _text_response(200 if entry else 404, "")


def _value_at(value: Any, path: str) -> Any:
    """Returns the part of nested dictionaries at a path of keys ("": all of them); None if there is none."""
    for part in path.split("/") if path else []:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _compute_etag(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _text_response(status: int, text: str, headers: dict[str, str] | None = None) -> HttpResponse:
    """Returns an answer with the metadata server's headers and content type: text/html unless `status` is 200."""
    kind = "application/text" if status == 200 else "text/html"
    return HttpResponse(status, text.encode(), {**_HEADERS, "Content-Type": kind, **(headers or {})})
