"""The variables with which TorchTPU (`torch_tpu`) starts: one process a chip, on every host of a slice.

TorchTPU's own helper, `torch_tpu._internal.distributed.distributed.set_tpu_launch_env`, knows GKE and Ray. This module
computes the same from our table of accelerators, for TPU VMs too; tests/torch_tpu compares the two. Programs that call
the helper themselves keep these values: it changes no variable that is set.

Pure. training/backends/torch_tpu/internals.py has every internal name of the package that we use.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

from training.accelerators import Accelerator, accelerator
from training.distributed.cluster import Cluster, tpu_environment
from training.errors import BadInput

RUNTIME = "torch-tpu"
VERSION = "0.2.0"  # of torch_tpu; images/torch-tpu pins it
GENERATIONS = ("v4", "v5e", "v5p", "v6e")  # of those in our table; torch_tpu/_internal/utils/hardware.py lists them

# The first four, and MASTER_PORT, are open between the hosts of a network that has Google's firewall rule for TPUs
# alone (jax-ml/jax#35905). Slices of several hosts have four chips a host; the others are for hosts with eight.
SLICE_BUILDER_PORTS = (8470, 8471, 8474, 8476, 8472, 8473, 8475, 8477)
MASTER_PORT = 11211


def find_unsupported(slice_: Accelerator) -> str:
    """Returns why TorchTPU can't run on a slice; "" if it can."""
    if slice_.generation.name in GENERATIONS:
        return ""
    return (
        f"TorchTPU does not know TPU {slice_.generation.name} ({slice_.name}); it runs on {', '.join(GENERATIONS)}: "
        "use PyTorch/XLA (torch-xla) here"
    )


def find_other_version(installed: str | None) -> str:
    """Returns a warning if the `installed` torch_tpu is not VERSION, else "". Raises BadInput if None is installed."""
    if installed is None:
        raise BadInput(f"{RUNTIME} needs torch_tpu, which this image lacks: set image.backend: {RUNTIME}")
    if installed == VERSION:
        return ""
    return (
        f"torch_tpu {installed} is installed, and this tpu-launch was tried with {VERSION}: its interfaces change with "
        f"every release; install torch_tpu=={VERSION}"
    )


def trainer_environment(_cluster: Cluster, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns {}: `rank_environments` has set all variables of this process. Raises BadInput if it has not."""
    if "TORCH_TPU_TOPOLOGY" not in environment:
        raise BadInput(f"backend: {RUNTIME} needs one process a chip of a TPU, which `tpu-train train` starts")
    return {}


def cluster_of_rank(cluster: Cluster, environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster in which each process counts as a host: its worker is its rank, and each address is there
    once for each chip. `slice_addresses` are those of the hosts. `environment`: of `rank_environments`."""
    chips = range(int(environment["LOCAL_WORLD_SIZE"]))
    addresses = tuple(address for address in cluster.addresses for _ in chips)
    return replace(cluster, worker=int(environment["RANK"]), addresses=addresses, slice_addresses=cluster.addresses)


def rank_environments(cluster: Cluster) -> list[dict[str, str]]:
    """Returns the variables of each process of this host, in the order of its chips. Ranks are in the order of workers
    and of their chips. The bounds of processes are left to TorchTPU. Raises BadInput if the accelerator is unknown to
    our table or to TorchTPU, or has another number of hosts."""
    environment = tpu_environment(cluster)
    slice_ = accelerator(environment["TPU_ACCELERATOR_TYPE"])
    if reason := find_unsupported(slice_):
        raise BadInput(reason)
    for name in ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID"):
        del environment[name]
    chips = slice_.chips_per_host
    ports = SLICE_BUILDER_PORTS[:chips]
    shared = {
        **environment,
        "WORLD_SIZE": str(slice_.chips),
        "LOCAL_WORLD_SIZE": str(chips),
        "NNODES": str(slice_.hosts),
        "NODE_RANK": str(cluster.worker),  # without it, TorchTPU orders hosts by coordinates
        "GROUP_RANK": str(cluster.worker),  # torchrun's name for the same
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "TORCH_TPU_TOPOLOGY": ",".join(map(str, (*slice_.topology, 1)[:3])),
        "TORCH_TPU_DEVICES_PER_HOST": str(chips),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"{host}:{port}" for host in cluster.addresses for port in ports),
        # Any number that is the same on all ranks, and another one for another attempt.
        "TORCH_TPU_XPROF_SESSION_ID": str(zlib.crc32(f"{cluster.run_id}/{cluster.attempt}".encode())),
    }
    first = cluster.worker * chips
    return [{**shared, "RANK": str(first + chip), "LOCAL_RANK": str(chip)} for chip in range(chips)]
