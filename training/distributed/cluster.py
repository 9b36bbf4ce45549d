"""Finds this process's place among the hosts of the slice: its worker index, all addresses, the accelerator.

Sources, in this order; the first one that has hosts counts:
1. the environment that `tpu-launch` sets: TPU_WORKER_ID, TPU_WORKER_HOSTNAMES, TPU_ACCELERATOR_TYPE (GKE's webhook sets
   the same), with JOB_COMPLETION_INDEX of an indexed Kubernetes Job in place of a missing TPU_WORKER_ID, and
   TPU_LAUNCH_HOSTS and TPU_LAUNCH_HOST_NAME ("job-*.service", where * is the worker index) of our manifests in place of
   missing TPU_WORKER_HOSTNAMES;
2. the metadata server of a TPU VM, only on a host with a TPU (`device_kind`): `worker-network-endpoints` has two
   formats, the old `name:id:ip,...` and the new plain list of addresses;
3. none: a single host, worker 0, with the accelerator that TPU_ACCELERATOR_TYPE names.

Parsing is pure; only `discover` reads the environment and the metadata server. torch_xla 2.9 crashes on the new
metadata format (it takes the third field of `x:y:z`), so `tpu_environment` sets every variable that torch_xla would
look up there, and forbids the lookup.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from training.accelerators import accelerator
from training.errors import BadInput

RENDEZVOUS_PORT = 8490
GLOO_PORT = 8491
SECRET_VARIABLE = "TPU_LAUNCH_SECRET"  # the secret that the hosts of an attempt share (handshake.py)
_SHORTEST_SECRET = 16  # characters
LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"  # the variable with the flags of libtpu and its compiler
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"

# What torch_xla 2.9 adds when it is imported on a machine with TPU chips (_setup_libtpu_flags in
# https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/__init__.py); tests/oracle compares.
_TORCH_XLA_FLAGS = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
_TORCH_XLA_V5_FLAGS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}


@dataclass(frozen=True)
class Cluster:
    """This process's place among the hosts."""

    worker: int  # the index of this host
    addresses: tuple[str, ...]  # of the hosts that run the loop, in worker order
    accelerator_type: str | None = None
    run_id: str = "local"
    attempt: int = 0
    rendezvous_port: int = RENDEZVOUS_PORT
    gloo_port: int = GLOO_PORT
    slice_addresses: tuple[str, ...] = ()  # of all hosts of the slice, if host 0 alone drives the devices of all
    secret: bytes = field(default=b"", repr=False)  # shared by the hosts of this attempt; empty if there is none

    @property
    def hosts(self) -> int:
        """Returns the number of hosts that run the loop."""
        return len(self.addresses)

    @property
    def all_addresses(self) -> tuple[str, ...]:
        """Returns the addresses of all hosts of the slice, also of those that do not run the loop."""
        return self.slice_addresses or self.addresses

    def alone(self) -> Cluster:
        """Returns a copy in which only host 0 runs the loop; the addresses of all hosts are its `slice_addresses`."""
        return replace(self, addresses=self.addresses[:1], slice_addresses=self.addresses)

    @property
    def is_first(self) -> bool:
        """Returns whether this is host 0, which commits checkpoints, writes metrics and prints progress."""
        return self.worker == 0


def parse_hostnames(text: str) -> tuple[str, ...]:
    """Returns the comma-separated addresses of TPU_WORKER_HOSTNAMES or the new worker-network-endpoints, by worker."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Returns the addresses in `worker-network-endpoints`, by worker: its entries, or the last part of each if all are
    `name:id:ip`, the old format, which has no IPv6."""
    entries = parse_hostnames(text)
    if entries and all(entry.count(":") == 2 for entry in entries):
        return tuple(entry.split(":")[2] for entry in entries)
    return entries


def from_environment(environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster of TPU_WORKER_HOSTNAMES (else TPU_LAUNCH_HOST_NAME, else localhost), TPU_WORKER_ID (else
    JOB_COMPLETION_INDEX, else 0), TPU_ACCELERATOR_TYPE and, with defaults, the TPU_LAUNCH variables: run id, attempt,
    ports and secret. Raises BadInput for bad values, and if the worker has no address."""
    addresses = _find_names(environment) or ("localhost",)
    variable = "TPU_WORKER_ID" if environment.get("TPU_WORKER_ID") else "JOB_COMPLETION_INDEX"
    worker = _parse_variable(environment, variable, "0")
    if worker >= len(addresses):
        raise BadInput(
            f"this host is worker {worker}, but only {len(addresses)} host(s) are known: {', '.join(addresses)}; check "
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
        )
    return Cluster(
        worker=worker,
        addresses=addresses,
        accelerator_type=environment.get("TPU_ACCELERATOR_TYPE") or None,
        run_id=environment.get("TPU_LAUNCH_RUN_ID") or "local",
        attempt=_parse_variable(environment, "TPU_LAUNCH_ATTEMPT", "0"),
        rendezvous_port=_parse_variable(environment, "TPU_LAUNCH_RENDEZVOUS_PORT", str(RENDEZVOUS_PORT), 65535),
        gloo_port=_parse_variable(environment, "TPU_LAUNCH_GLOO_PORT", str(GLOO_PORT), 65535),
        secret=_read_secret(environment),
    )


def _find_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses of TPU_WORKER_HOSTNAMES; else the names of a Kubernetes Job's hosts, TPU_LAUNCH_HOST_NAME
    with 0 to TPU_LAUNCH_HOSTS - 1 for its `*`; () if neither is set. Raises BadInput unless TPU_LAUNCH_HOSTS, if used,
    is a whole number from 0 to 65536."""
    names, pattern = environment.get("TPU_WORKER_HOSTNAMES", ""), environment.get("TPU_LAUNCH_HOST_NAME", "")
    if parse_hostnames(names) or not pattern:
        return parse_hostnames(names)
    hosts = _parse_variable(environment, "TPU_LAUNCH_HOSTS", "", 65536)
    return tuple(pattern.replace("*", str(worker)) for worker in range(hosts))


def metadata_variables(read: Callable[[str], str | None]) -> dict[str, str]:
    """Returns the variables for `from_environment` that the metadata server knows; {} if it lists no hosts. `read(key)`
    returns an attribute or None: then the worker is "0", the accelerator ""."""
    endpoints = read("worker-network-endpoints")
    if not endpoints:
        return {}
    return {
        "TPU_WORKER_HOSTNAMES": ",".join(parse_endpoints(endpoints)),
        "TPU_WORKER_ID": read("agent-worker-number") or "0",
        "TPU_ACCELERATOR_TYPE": read("accelerator-type") or "",
    }


def discover(environment: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster of `environment` (None: os.environ), if that has a worker index or addresses; else, on a TPU
    without TPU_SKIP_MDS_QUERY, that of the metadata server, if it answers; else this host alone. Raises BadInput for
    bad values or a server's HTTP error."""
    environment = os.environ if environment is None else environment
    is_told = any(environment.get(name) for name in ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX"))
    if not is_told and not _find_names(environment) and device_kind(environment) == "TPU":
        known = {} if environment.get("TPU_SKIP_MDS_QUERY") else metadata_variables(_read_metadata)
        environment = {**environment, **known}
    return from_environment(environment)


def device_kind(environment: Mapping[str, str] | None = None) -> str:
    """Returns PJRT_DEVICE of `environment` (None: os.environ); else "TPU" if this machine shows TPU chips, or "CPU"."""
    environment = os.environ if environment is None else environment
    has_chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return environment.get("PJRT_DEVICE") or ("TPU" if has_chips else "CPU")


def tpu_environment(cluster: Cluster) -> dict[str, str]:
    """Returns the variables that torch_xla and libtpu would otherwise look up on the metadata server, for one process
    per host that owns all its chips. Set them before torch_xla is imported. Raises BadInput if the accelerator is not
    given, unknown or has another number of hosts."""
    if cluster.accelerator_type is None:
        raise BadInput(
            "PJRT_DEVICE=TPU, but neither TPU_ACCELERATOR_TYPE nor the metadata server says which accelerator this is; "
            "set TPU_ACCELERATOR_TYPE, for example v4-16"
        )
    slice_ = accelerator(cluster.accelerator_type)
    if slice_.hosts != cluster.hosts:
        raise BadInput(
            f"{cluster.accelerator_type} has {slice_.hosts} hosts, but this run has {cluster.hosts}: "
            + ", ".join(cluster.addresses)
        )
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": cluster.accelerator_type,
        "TPU_PROCESS_BOUNDS": ",".join(map(str, slice_.host_bounds)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, slice_.chips_per_host_bounds)),
        "TPU_WORKER_ID": str(cluster.worker),
        "CLOUD_TPU_TASK_ID": str(cluster.worker),
        "TPU_WORKER_HOSTNAMES": ",".join(cluster.addresses),
    }
    if slice_.wrap is not None:
        environment["TPU_TOPOLOGY_WRAP"] = ",".join(str(linked).lower() for linked in slice_.wrap)
        environment["TPU_TOPOLOGY_ALT"] = "false"  # not a twisted torus
    if slice_.has_whole_cubes:
        environment["ENABLE_ICI_RESILIENCY"] = "true"
    return environment


def torch_xla_environment(cluster: Cluster, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set on a TPU before torch_xla is imported: those of `tpu_environment`, and the libtpu
    flags of the user and of torch_xla. Raises BadInput if the accelerator is unknown or has another number of hosts."""
    variables = tpu_environment(cluster)
    generation = accelerator(variables["TPU_ACCELERATOR_TYPE"]).generation.name
    own = environment.get(LIBTPU_FLAGS, "")
    return {**variables, LIBTPU_FLAGS: join_flags(own, torch_xla_flags(generation, own))}


def torch_xla_flags(generation: str, own: str) -> dict[str, str]:
    """Returns the libtpu flags, name -> value, that torch_xla and preflight add on a `generation` such as "v5e",
    without those that are in `own`, the user's value of LIBTPU_INIT_ARGS."""
    given = {flag.removeprefix("--").partition("=")[0] for flag in own.split()}
    defaults = {**_TORCH_XLA_FLAGS, **(_TORCH_XLA_V5_FLAGS if generation.startswith("v5") else {})}
    return {name: value for name, value in defaults.items() if name not in given}


def no_flags(generation: str, own: str) -> dict[str, str]:
    """Returns {}: TorchTPU and TensorFlow add no flags to the user's."""
    return {}


def join_flags(own: str, defaults: Mapping[str, str]) -> str:
    """Returns a value for LIBTPU_INIT_ARGS: the user's flags `own`, and a flag for each of `defaults`."""
    return " ".join([*own.split(), *(f"--{name}={value}" for name, value in defaults.items())])


def tensorflow_environment(cluster: Cluster, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set on a TPU before TensorFlow is imported: if TPU_NAME lists the gRPC workers of a
    slice, one that leaves the chips to those workers (https://github.com/GoogleCloudPlatform/ml-auto-solutions,
    common.py); else those that load the PJRT plugin. Raises BadInput if the accelerator is unknown or has another
    number of hosts, or if TensorFlow is not the wheel for TPUs."""
    if environment.get("TPU_NAME", "local") != "local":
        return {"TPU_LOAD_LIBRARY": "0"}
    return {**tpu_environment(cluster), **tensorflow_plugin()}


def tensorflow_plugin() -> dict[str, str]:
    """Returns the variables by which TensorFlow loads libtpu as its PJRT plugin, in the program of a single host and in
    each worker of a slice. Raises BadInput if TensorFlow is not the wheel for TPUs."""
    library = importlib.util.find_spec("libtpu")
    is_for_tpus = bool(list(importlib.metadata.distributions(name="tensorflow-tpu")))
    if not (is_for_tpus and library and library.submodule_search_locations):
        raise BadInput(
            "PJRT_DEVICE=TPU, but this image has TensorFlow for CPUs: build it with `image.build_args: "
            "{REQUIREMENTS: requirements-tpu.txt}`"
        )
    return {
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": f"{library.submodule_search_locations[0]}/libtpu.so",
    }


def _read_secret(environment: Mapping[str, str]) -> bytes:
    """Returns TPU_LAUNCH_SECRET without blanks around it, b"" if not set. Raises BadInput below 16 characters."""
    secret = environment.get(SECRET_VARIABLE, "").strip()  # a file ends with a line end
    if secret and len(secret) < _SHORTEST_SECRET:
        raise BadInput(
            f"{SECRET_VARIABLE} has {len(secret)} characters; it must be random, with at least {_SHORTEST_SECRET}"
        )
    return os.fsencode(secret)


def _parse_variable(environment: Mapping[str, str], name: str, default: str, largest: int = 999_999_999) -> int:
    """Returns the whole number in a variable, or else `default`. Raises BadInput unless it is from 0 to `largest`."""
    text = environment.get(name) or default
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > largest:
        raise BadInput(f"{name} is {text!r:.80}; it must be a whole number of at most {largest}")
    return int(text)


def _read_metadata(key: str) -> str | None:
    """Returns a metadata attribute, within 5 s; None without one or a server. Raises BadInput for other HTTP errors."""
    request = urllib.request.Request(METADATA + key, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise BadInput(f"the metadata server answered {error.code} for {key}") from None
    except OSError:
        return None
