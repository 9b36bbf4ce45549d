"""The table of TPU generations: names, sizes, hosts, devices, bounds, runtime versions, zones, peak figures.

Pure data and pure functions, imported by the launcher, the trainer, the emulator and the manifests, so that hosts are
counted in one place. It says what a name means before a slice exists; what a slice really has is read from the slice
(its network endpoints). A new generation is a row of GENERATIONS, its sizes in _SIZES, and its nodes in `gke_nodes`.

Sources: the size tables of torch_xla 2.9 (`torch_xla/_internal/tpu.py`) and of MaxText (`accelerator_to_spec_map.py`);
peaks, memory, zones and runtime versions from Google's Cloud TPU documentation
(docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}, .../regions-zones, .../runtimes), read in November 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """What all slices of a TPU generation have in common."""

    name: str  # "v5e", as the documentation says
    prefix: str  # "v5litepod", as `--accelerator-type` says
    cores_in_name: bool  # whether the number of the name counts TensorCores (else chips)
    cores_per_chip: int
    devices_per_chip: int  # PJRT devices: 1 with megacore
    bf16_flops_per_chip: float  # FLOP/s
    hbm_bytes_per_chip: int
    hbm_bytes_per_second_per_chip: float
    usable_hbm_bytes_per_device: int  # what libtpu 0.0.21 leaves to programs: "Used ... of 15.48G hbm" in its refusals
    runtime_version: str  # for one's own containers, with `tpu-vm create --version`
    zones: tuple[str, ...]


@dataclass(frozen=True)
class Accelerator:
    """One size of a generation: what `--accelerator-type v4-32` names."""

    name: str
    generation: Generation
    topology: tuple[int, ...]  # chips along each axis
    hosts: int  # TPU VMs, numbered by worker index
    chips_per_host: int

    @property
    def chips(self) -> int:
        """Chips of all hosts."""
        return self.hosts * self.chips_per_host

    @property
    def devices_per_host(self) -> int:
        """PJRT devices of one host."""
        return self.chips_per_host * self.generation.devices_per_chip

    @property
    def devices(self) -> int:
        """PJRT devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def topology_name(self) -> str:
        """For example "2x2x4"."""
        return "x".join(map(str, self.topology))

    @property
    def chips_per_host_bounds(self) -> tuple[int, int, int]:
        """Chips of one host along each axis (x, y, z): TPU_CHIPS_PER_PROCESS_BOUNDS of one process a host."""
        return {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[self.chips_per_host]

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Hosts along each axis (x, y, z): TPU_PROCESS_BOUNDS of one process a host."""
        chips = (*self.topology, 1, 1)[:3]
        x, y, z = (total // per_host for total, per_host in zip(chips, self.chips_per_host_bounds, strict=True))
        return (x, y, z)

    @property
    def wrap(self) -> tuple[bool, bool, bool] | None:
        """Along which axes (x, y, z) the slice's ends are linked to each other: TPU_TOPOLOGY_WRAP.

        With three axes (v4, v5p) all are from 4x4x4 on; with two (v5e, v6e) each that has 16 chips. So Google's GKE
        device plugin computes it. None for v2 and v3, whose metadata says nothing: libtpu knows those slices itself.
        """
        if self.generation.name in ("v2", "v3"):
            return None
        if len(self.topology) == 3:
            whole = self.has_whole_cubes
            return (whole, whole, whole)
        x, y = (chips == 16 for chips in self.topology)
        return (x, y, False)

    @property
    def has_whole_cubes(self) -> bool:
        """Whether it is made of 4x4x4 cubes, whose optical links can be routed around a broken one (v4, v5p):
        ENABLE_ICI_RESILIENCY."""
        return len(self.topology) == 3 and min(self.topology) >= 4


@dataclass(frozen=True)
class GkeNodes:
    """What GKE calls the nodes of a slice."""

    accelerator: str  # the label cloud.google.com/gke-tpu-accelerator
    machine_type: str  # of the node pool


def gke_nodes(slice_: Accelerator) -> GkeNodes:
    """The nodes that make up a slice on GKE, one a host, each with all its chips (`google.com/tpu`) for one pod.

    Source: GKE's machine type table in its cluster autoscaler, and
    cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, read in November 2026. Raises ValueError for a
    generation that GKE does not have.
    """
    generation, chips = slice_.generation.name, slice_.chips_per_host
    if generation == "v2":
        others = ", ".join(other.name for other in GENERATIONS if other.name != "v2")
        raise ValueError(
            f"GKE has no nodes for {slice_.name}: it never offered TPU v2 (it has {others}); TPU VMs have v2"
        )
    if generation == "v3":
        return (
            GkeNodes("tpu-v3-device", "ct3-hightpu-4t")
            if slice_.hosts == 1
            else GkeNodes("tpu-v3-slice", "ct3p-hightpu-4t")
        )
    return {
        "v4": GkeNodes("tpu-v4-podslice", f"ct4p-hightpu-{chips}t"),
        "v5e": GkeNodes("tpu-v5-lite-podslice", f"ct5lp-hightpu-{chips}t"),
        "v5p": GkeNodes("tpu-v5p-slice", f"ct5p-hightpu-{chips}t"),
        "v6e": GkeNodes("tpu-v6e-slice", f"ct6e-standard-{chips}t"),
    }[generation]


_V2_ZONES = (
    "us-central1-a",
    "us-central1-b",
    "us-central1-c",
    "us-central1-f",
    "europe-west4-a",
    "asia-east1-c",
)
_V3_ZONES = ("us-central1-a", "us-central1-b", "us-east1-d", "europe-west4-a")
_V4_ZONES = ("us-central2-b",)
_V5E_ZONES = (
    "us-central1-a",
    "us-south1-a",
    "us-west1-c",
    "us-west4-a",
    "us-west4-b",
    "us-east1-c",
    "us-east5-b",
    "europe-west4-b",
    "asia-southeast1-b",
)
_V6E_ZONES = (
    "us-central1-b",
    "us-east1-d",
    "us-east5-a",
    "us-east5-b",
    "us-south1-ai1b",
    "europe-west4-a",
    "asia-northeast1-b",
    "southamerica-west1-a",
)
_V5P_ZONES = ("us-central1-a", "us-east5-a", "europe-west4-b")


def _gib(amount: float) -> int:
    return int(amount * GIB)


GENERATIONS: tuple[Generation, ...] = (
    Generation("v2", "v2", True, 2, 2, 46e12, 16 * GIB, 700e9, _gib(7.48), "tpu-ubuntu2204-base", _V2_ZONES),
    Generation("v3", "v3", True, 2, 2, 123e12, 32 * GIB, 900e9, _gib(15.48), "tpu-ubuntu2204-base", _V3_ZONES),
    Generation("v4", "v4", True, 2, 1, 275e12, 32 * GIB, 1228e9, _gib(30.75), "tpu-ubuntu2204-base", _V4_ZONES),
    Generation(
        "v5e", "v5litepod", False, 1, 1, 197e12, 16 * GIB, 819e9, _gib(15.75), "v2-alpha-tpuv5-lite", _V5E_ZONES
    ),
    Generation("v5p", "v5p", True, 2, 1, 459e12, 95 * GIB, 2765e9, _gib(95.74), "v2-alpha-tpuv5", _V5P_ZONES),
    Generation("v6e", "v6e", False, 1, 1, 918e12, 32 * GIB, 1640e9, _gib(31.25), "v2-alpha-tpuv6e", _V6E_ZONES),
)

# The number of a name -> chips along each axis. There is no v2-16, v3-16 or v2-64.
_V2: dict[int, tuple[int, ...]] = {8: (2, 2), 32: (4, 4), 128: (8, 8), 256: (8, 16), 512: (16, 16)}
_V3: dict[int, tuple[int, ...]] = {**_V2, 64: (4, 8), 1024: (16, 32), 2048: (32, 32)}
_V4: dict[int, tuple[int, ...]] = {
    8: (2, 2, 1),
    16: (2, 2, 2),
    32: (2, 2, 4),
    64: (2, 4, 4),
    128: (4, 4, 4),
    256: (4, 4, 8),
    384: (4, 4, 12),
    512: (4, 8, 8),
    1024: (8, 8, 8),
    1536: (8, 8, 12),
    2048: (8, 8, 16),
    4096: (8, 16, 16),
}
_V5P: dict[int, tuple[int, ...]] = {**_V4, 640: (4, 4, 20), 768: (4, 8, 12), 896: (4, 4, 28)}
_V5E: dict[int, tuple[int, ...]] = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_SIZES: dict[str, dict[int, tuple[int, ...]]] = {"v2": _V2, "v3": _V3, "v4": _V4, "v5e": _V5E, "v5p": _V5P, "v6e": _V5E}


def _chips_per_host(generation: Generation, chips: int) -> int:
    """v5e and v6e have VMs of 1 and 8 chips for their smallest slices; everything else has 4."""
    return chips if not generation.cores_in_name and chips <= 8 else 4


def _build() -> dict[str, Accelerator]:
    table = {}
    for generation in GENERATIONS:
        for number, topology in sorted(_SIZES[generation.name].items()):
            chips = math.prod(topology)
            per_host = _chips_per_host(generation, chips)
            name = f"{generation.prefix}-{number}"
            table[name] = Accelerator(name, generation, topology, chips // per_host, per_host)
    return table


ACCELERATORS: dict[str, Accelerator] = _build()


class UnknownAccelerator(ValueError):
    """No such accelerator type; the message names the sizes that exist."""


def accelerator(name: str) -> Accelerator:
    """The accelerator that `--accelerator-type name` means. Raises UnknownAccelerator, which lists what exists."""
    if name in ACCELERATORS:
        return ACCELERATORS[name]
    prefix = name.rsplit("-", 1)[0]
    if prefix == "v5e":
        raise UnknownAccelerator(
            f"accelerator type {name!r}: Cloud TPU calls v5e slices v5litepod-N; did you mean "
            f"v5litepod-{name.rsplit('-', 1)[-1]}?"
        )
    if prefix == "tpu7x":
        raise UnknownAccelerator(
            f"accelerator type {name!r}: TPU7x is not offered through the Cloud TPU API, only through GKE or Compute "
            "Engine"
        )
    sizes = [known for known in ACCELERATORS if known.rsplit("-", 1)[0] == prefix]
    if sizes:
        raise UnknownAccelerator(f"accelerator type {name!r} does not exist; {prefix} has {', '.join(sizes)}")
    families = ", ".join(dict.fromkeys(f"{generation.prefix}-N" for generation in GENERATIONS))
    raise UnknownAccelerator(f"accelerator type {name!r} does not exist; known families: {families}")
