"""What Cloud TPU offers in each zone, and what it refuses: accelerator types, runtime versions, names, labels.

Pure functions over the tables of `training.accelerators`. Messages and codes are those of the Cloud TPU API as its
users quote them (terraform-provider-google issues 21243 and 10222, marin 87 and 1612, skypilot 4579); where no report
was found, the words are ours and the code is Google's.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from training.accelerators import ACCELERATORS, GENERATIONS, Accelerator, Api

T = TypeVar("T")

# google.rpc.Code -> (HTTP status, name)
CODES = {
    1: (499, "CANCELLED"),
    3: (400, "INVALID_ARGUMENT"),
    5: (404, "NOT_FOUND"),
    6: (409, "ALREADY_EXISTS"),
    7: (403, "PERMISSION_DENIED"),
    8: (429, "RESOURCE_EXHAUSTED"),
    9: (400, "FAILED_PRECONDITION"),
    10: (409, "ABORTED"),
    12: (501, "UNIMPLEMENTED"),
    13: (500, "INTERNAL"),
    14: (503, "UNAVAILABLE"),
}
CANCELLED, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED = 1, 3, 5, 6, 7, 8
FAILED_PRECONDITION, ABORTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 9, 10, 12, 13, 14

# Zones without an accelerator of the table: there Cloud TPU refuses the accelerator type, not the zone.
_OTHER_ZONES = {
    "us-east1-b", "us-east1-c", "us-west1-a", "us-west1-b", "us-central1-f", "us-west4-b", "us-west4-c",
    "europe-west1-b", "europe-west1-c", "asia-east1-a", "asia-east1-b",
}  # fmt: skip
ZONES = tuple(sorted({zone for slice_ in ACCELERATORS.values() for zone in slice_.zones(Api.CLOUD_TPU)} | _OTHER_ZONES))

_NODE_NAME = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
_LABEL_KEY = re.compile(r"[^\W\d][\w-]{0,62}")
_LABEL_VALUE = re.compile(r"[\w-]{0,63}")
_TENSORFLOW_VERSIONS = ("2.16.1", "2.17.1", "2.18.0", "2.19.0")  # that are listed
_TENSORFLOW = re.compile(r"^tpu-vm-tf-2\.\d+\.\d+(-pod)?(-(pjrt|se|pjrt-v5e-and-v6|pjrt-v5p))?$")
# Fields that a node's creation may set. gcloud's alpha track always sets autocheckpointEnabled.
_FIELDS = frozenset((
    "acceleratorConfig", "acceleratorType", "autocheckpointEnabled", "bootDiskConfig", "cidrBlock", "dataDisks",
    "description", "labels", "metadata", "networkConfig", "networkConfigs", "runtimeVersion", "schedulingConfig",
    "serviceAccount", "shieldedInstanceConfig", "tags",
))  # fmt: skip


@dataclass
class ApiError(Exception):
    """An error response of the API. `code` is a google.rpc.Code."""

    code: int
    message: str
    details: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return CODES[self.code][0]

    def as_json(self) -> dict[str, Any]:
        """Returns the response's body."""
        details = {"details": self.details} if self.details else {}
        return {"error": {"code": self.status, "message": self.message, "status": CODES[self.code][1], **details}}


def find(resources: Mapping[str, T], name: str) -> T:
    """Returns the resource of a full name. Raises ApiError when there is none."""
    if name not in resources:
        raise ApiError(NOT_FOUND, f"Resource '{name}' was not found")
    return resources[name]


def event_id(text: str) -> str:
    """Returns the "[EID: 0x...]" that ends Cloud TPU's messages. The same text has the same one."""
    return f"[EID: 0x{zlib.crc32(text.encode()):08x}{zlib.adler32(text.encode()):08x}]"


def bad_request(text: str, code: int = INVALID_ARGUMENT) -> ApiError:
    """Returns an ApiError: "Cloud TPU received a bad request.", then `text`, then an event id."""
    return ApiError(code, f"Cloud TPU received a bad request. {text} {event_id(text)}")


def accelerators_in(zone: str) -> list[str]:
    """Returns the names of the accelerator types that Cloud TPU's API creates in a zone; [] for an unknown zone."""
    return [name for name, accelerator in ACCELERATORS.items() if zone in accelerator.zones(Api.CLOUD_TPU)]


def runtime_versions() -> list[str]:
    """Returns the runtime versions that the API lists, sorted."""
    endings = ("pjrt", "se", "pod-pjrt", "pod-se")
    tensorflow = {f"tpu-vm-tf-{version}-{ending}" for version in _TENSORFLOW_VERSIONS for ending in endings}
    return sorted({generation.runtime_version for generation in GENERATIONS} | tensorflow)


def check_zone(zone: str) -> None:
    """Raises ApiError for a zone that does not exist, and for "-"."""
    if zone not in ZONES:
        detail = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "LOCATION_POLICY_VIOLATED",
            "domain": "googleapis.com",
        }
        raise ApiError(PERMISSION_DENIED, f"Permission denied on 'locations/{zone}' (or it may not exist).", [detail])


def check_node_name(name: str) -> None:
    """Raises ApiError for a name that Google does not accept for a node."""
    if not _NODE_NAME.match(name):
        raise bad_request(f'invalid TPU name "{name}": it must match {_NODE_NAME.pattern}')


def check_labels(labels: Any) -> None:
    """Raises ApiError for labels that Google Cloud does not accept, and for anything but a dictionary, None too."""
    if not isinstance(labels, dict) or len(labels) > 64:
        raise bad_request("labels must be an object of at most 64 entries")
    for key, value in labels.items():
        for kind, text, rule in (("key", key, _LABEL_KEY), ("value", str(value), _LABEL_VALUE)):
            if not rule.fullmatch(text) or text != text.lower():
                raise bad_request(f'label {kind} "{text}" must be lowercase and match {rule.pattern}')


def check_metadata(metadata: Any) -> None:
    """Raises ApiError for metadata that Compute Engine does not accept, or that is no dictionary of strings."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad_request("metadata must be an object of strings")
    for key, value in metadata.items():
        if not re.match(r"^[\w-]{1,128}$", key):
            raise bad_request(f'metadata key "{key}" must match [a-zA-Z0-9-_]+ and be shorter than 128 bytes')
        if len(value.encode()) > 256 * 1024:
            raise bad_request(f'the value of metadata key "{key}" is larger than 256 KiB')


def requested_accelerator(body: dict[str, Any], zone: str) -> Accelerator:
    """Returns the accelerator of a node's creation, v2-8 by default. Raises ApiError if the zone lacks it, or for an
    acceleratorConfig, which is not emulated."""
    if "acceleratorConfig" in body:
        raise bad_request(
            "acceleratorConfig (gcloud's --type and --topology) is not emulated: give an accelerator type"
        )
    name = str(body.get("acceleratorType") or "v2-8")
    if name not in accelerators_in(zone):
        valid = ", ".join(accelerators_in(zone))
        text = f'CloudTpu received an invalid AcceleratorType, "{name}" for zone "{zone}". Valid values are "{valid}".'
        raise ApiError(INVALID_ARGUMENT, f"{text} {event_id(text)}")
    return ACCELERATORS[name]


def accelerator_config(accelerator: Accelerator) -> dict[str, str]:
    """Returns the acceleratorConfig: the generation as the API names it, for example V5LITE_POD, and the topology."""
    generation = accelerator.generation.prefix.upper().replace("LITEPOD", "LITE_POD")
    return {"type": generation, "topology": accelerator.topology_name}


def check_runtime_version(version: Any, requested: Accelerator) -> None:
    """Raises ApiError for no runtime version, an unknown one, and another generation's base version;
    tpu-ubuntu2204-base, and TensorFlow's versions, are taken for all."""
    if not version:
        raise bad_request("runtimeVersion is required")
    if version not in runtime_versions() and not _TENSORFLOW.match(str(version)):
        raise bad_request(f'the runtime version "{version}" was not found')
    bases = {generation.runtime_version for generation in GENERATIONS}
    if version in bases and version != requested.generation.runtime_version and version != "tpu-ubuntu2204-base":
        raise bad_request(f'the runtime version "{version}" is not supported for accelerator type "{requested.name}"')


def check_node(body: dict[str, Any], zone: str) -> Accelerator:
    """Returns the accelerator of a node's creation. Raises ApiError for a body that is invalid or not emulated."""
    if unknown := sorted(body.keys() - _FIELDS):
        text = f"Invalid JSON payload received. Unknown name \"{unknown[0]}\" at 'node': Cannot find field."
        raise ApiError(INVALID_ARGUMENT, text)
    requested = requested_accelerator(body, zone)
    check_runtime_version(body.get("runtimeVersion"), requested)
    check_labels(body.get("labels", {}))
    check_metadata(body.get("metadata", {}))
    scheduling = body.get("schedulingConfig", {})
    if scheduling.get("spot") and scheduling.get("preemptible"):
        raise bad_request("only one of spot and preemptible may be set")
    if body.get("networkConfig") and body.get("networkConfigs"):
        raise bad_request("networkConfig and networkConfigs are mutually exclusive")
    return requested
