"""The table of TPU generations: names, sizes, hosts, devices, bounds, runtime versions, zones, peak figures.

Pure data and pure functions, imported by the launcher, the trainer, the emulator and the manifests, so that hosts are
counted in one place. The table says what a name means before a slice exists; the size of an existing slice is read from
its network endpoints. A new generation is one row of _FIGURES and one entry of GENERATIONS.

Sources: the size tables of torch_xla 2.9 (`torch_xla/_internal/tpu.py`) and of MaxText (`accelerator_to_spec_map.py`);
peaks, memory, zones and runtime versions from Google's Cloud TPU documentation
(docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}, .../regions-zones, .../runtimes); machine types from
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. Read in November 2026.
"""

import enum
import math
from dataclasses import dataclass

from training.errors import BadInput

GIB = 2**30


class Api(enum.Enum):
    """A Google API through which slices are created."""

    CLOUD_TPU = "Cloud TPU API"
    GKE = "GKE"
    COMPUTE_ENGINE = "Compute Engine"


_EVERY_PROVIDER = (Api.CLOUD_TPU, Api.GKE)  # the launcher has no provider over Compute Engine


@dataclass(frozen=True)
class Offer:
    """Zones in which Google offers sizes of a generation, and the APIs that create them there."""

    zones: tuple[str, ...]
    apis: tuple[Api, ...] = _EVERY_PROVIDER
    smallest: int = 0  # number in the name of the smallest size offered
    largest: int | None = None


@dataclass(frozen=True)
class GkeNodes:
    """Names that GKE gives the nodes of a slice."""

    accelerator: str  # value of the label cloud.google.com/gke-tpu-accelerator
    machine_type: str  # of the node pool. In the table, `{chips}` stands for the chips of a host


@dataclass(frozen=True)
class Generation:
    """Properties that all slices of a TPU generation share."""

    name: str  # "v5e", as the documentation says
    prefix: str  # "v5litepod", as `--accelerator-type` says
    cores_per_chip: int  # TensorCores, which the number of a name counts
    devices_per_chip: int  # PJRT devices: 1 with megacore
    bf16_flops_per_chip: float  # FLOP/s
    clock_hertz: float  # at which the chip's matrix units reach its peak
    hbm_bytes_per_second_per_chip: float
    usable_hbm_bytes_per_device: int  # what libtpu 0.0.21 leaves to programs: "Used ... of 15.48G hbm" in its refusals
    topologies: str  # of all sizes: chips along each axis, as Google writes them
    offers: tuple[Offer, ...]
    gke: GkeNodes | None  # None: GKE never offered it
    gke_one_host: GkeNodes | None = None  # where slices of one host have other nodes
    runtime_version: str = "tpu-ubuntu2204-base"  # for one's own containers, with `tpu-vm create --version`

    @property
    def runs_kernels(self) -> bool:
        """Returns whether libtpu compiles Pallas kernels with bf16 products for this generation: from v4 on."""
        return self.name not in ("v2", "v3")


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
        return self.hosts * self.chips_per_host

    @property
    def devices(self) -> int:
        """Returns the number of PJRT devices: one or two a chip."""
        return self.chips * self.generation.devices_per_chip

    @property
    def topology_name(self) -> str:
        """Returns the topology as Google writes it: "2x2x4"."""
        return "x".join(map(str, self.topology))

    @property
    def chips_per_host_bounds(self) -> tuple[int, int, int]:
        """Returns the chips of one host along x, y, z: TPU_CHIPS_PER_PROCESS_BOUNDS with one process a host."""
        return {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[self.chips_per_host]

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Returns the hosts along x, y, z: TPU_PROCESS_BOUNDS with one process a host."""
        chips = (*self.topology, 1, 1)[:3]
        x, y, z = (total // per_host for total, per_host in zip(chips, self.chips_per_host_bounds, strict=True))
        return (x, y, z)

    @property
    def wrap(self) -> tuple[bool, bool, bool] | None:
        """Returns along which axes (x, y, z) the slice's ends are linked: TPU_TOPOLOGY_WRAP, as Google's GKE device
        plugin computes it. With three axes (v4, v5p), all from 4x4x4 on; with two (v5e, v6e), each axis of 16 chips.
        None for v2 and v3, which libtpu knows itself."""
        if self.generation.name in ("v2", "v3"):
            return None
        if len(self.topology) == 3:
            whole = self.has_whole_cubes
            return (whole, whole, whole)
        x, y = (chips == 16 for chips in self.topology)
        return (x, y, False)

    @property
    def has_whole_cubes(self) -> bool:
        """Returns whether the slice is 4x4x4 cubes, which route around a broken link: ENABLE_ICI_RESILIENCY."""
        return len(self.topology) == 3 and min(self.topology) >= 4

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Returns the offers of the generation that include this size."""
        number = int(self.name.rsplit("-", 1)[1])
        return tuple(offer for offer in self.generation.offers if offer.smallest <= number <= (offer.largest or number))

    def zones(self, api: Api | None = None) -> tuple[str, ...]:
        """Returns the zones in which `api` (None: any API) creates slices of this size, in the order of the table."""
        zones = (zone for offer in self.offers if api is None or api in offer.apis for zone in offer.zones)
        return tuple(dict.fromkeys(zones))


def gke_nodes(slice_: Accelerator) -> GkeNodes:
    """Returns the accelerator label and the machine type of a slice's nodes on GKE, one node a host. Raises ValueError
    for v2, which GKE never offered."""
    generation = slice_.generation
    nodes = generation.gke_one_host if slice_.hosts == 1 and generation.gke_one_host else generation.gke
    if nodes is None:
        others = ", ".join(other.name for other in GENERATIONS if other.gke)
        raise ValueError(
            f"GKE has no nodes for {slice_.name}: it never offered TPU {generation.name} (it has {others}); TPU VMs "
            f"have {generation.name}"
        )
    return GkeNodes(nodes.accelerator, nodes.machine_type.format(chips=slice_.chips_per_host))


_V2_TOPOLOGIES = "2x2 4x4 8x8 8x16 16x16"  # there is no v2-16, v3-16 or v2-64
_V4_TOPOLOGIES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
_V5E_TOPOLOGIES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_V5E_ZONES = ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b", "asia-southeast1-b")
_V6E_ZONES = (
    *("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "us-south1-ai1b"),
    *("europe-west4-a", "asia-northeast1-b", "southamerica-west1-a"),
)

# Prefix of names; TensorCores, PJRT devices, bf16 FLOP/s, Hz, HBM bytes/s of a chip; usable HBM bytes of a device.
_FIGURES = {
    "v2": ("v2", 2, 2, 46e12, 700e6, 700e9, int(7.48 * GIB)),
    "v3": ("v3", 2, 2, 123e12, 940e6, 900e9, int(15.48 * GIB)),
    "v4": ("v4", 2, 1, 275e12, 1050e6, 1228e9, int(30.75 * GIB)),
    "v5e": ("v5litepod", 1, 1, 197e12, 1500e6, 819e9, int(15.75 * GIB)),
    "v5p": ("v5p", 2, 1, 459e12, 1750e6, 2765e9, int(95.74 * GIB)),
    "v6e": ("v6e", 1, 1, 918e12, 1750e6, 1640e9, int(31.25 * GIB)),
}

GENERATIONS: tuple[Generation, ...] = (
    Generation(
        "v2", *_FIGURES["v2"], topologies=_V2_TOPOLOGIES, gke=None, offers=(
            Offer(("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"), (Api.CLOUD_TPU,), largest=8),
            Offer(("us-central1-a", "europe-west4-a"), (Api.CLOUD_TPU,), smallest=32),
        ),
    ),
    Generation(
        "v3", *_FIGURES["v3"], topologies=f"{_V2_TOPOLOGIES} 4x8 16x32 32x32", offers=(
            Offer(("us-central1-a", "us-central1-b", "europe-west4-a"), largest=8),
            Offer(("europe-west4-a",), smallest=32),
        ),
        gke=GkeNodes("tpu-v3-slice", "ct3p-hightpu-4t"), gke_one_host=GkeNodes("tpu-v3-device", "ct3-hightpu-4t"),
    ),
    Generation(
        "v4", *_FIGURES["v4"], topologies=_V4_TOPOLOGIES, offers=(Offer(("us-central2-b",)),),
        gke=GkeNodes("tpu-v4-podslice", "ct4p-hightpu-{chips}t"),
    ),
    Generation(
        "v5e", *_FIGURES["v5e"], topologies=_V5E_TOPOLOGIES, offers=(Offer(_V5E_ZONES),),
        gke=GkeNodes("tpu-v5-lite-podslice", "ct5lp-hightpu-{chips}t"), runtime_version="v2-alpha-tpuv5-lite",
    ),
    Generation(
        "v5p", *_FIGURES["v5p"], topologies=f"{_V4_TOPOLOGIES} 4x4x20 4x8x12 4x4x28",
        offers=(Offer(("us-central1-a", "us-east5-a", "europe-west4-b")),),
        gke=GkeNodes("tpu-v5p-slice", "ct5p-hightpu-{chips}t"), runtime_version="v2-alpha-tpuv5",
    ),
    Generation(
        "v6e", *_FIGURES["v6e"], topologies=_V5E_TOPOLOGIES, offers=(Offer(_V6E_ZONES),),
        gke=GkeNodes("tpu-v6e-slice", "ct6e-standard-{chips}t"), runtime_version="v2-alpha-tpuv6e",
    ),
)  # fmt: skip


def _list_sizes(generation: Generation) -> list[Accelerator]:
    """Returns a generation's sizes, smallest first, with their hosts and chips, which the table leaves out."""
    sizes = []
    for topology in sorted((tuple(map(int, name.split("x"))) for name in generation.topologies.split()), key=math.prod):
        chips = math.prod(topology)
        # v5e and v6e have VMs of 1 and 8 chips for their smallest slices; every other VM has 4.
        chips_per_host = chips if generation.cores_per_chip == 1 and chips <= 8 else 4
        name = f"{generation.prefix}-{chips * generation.cores_per_chip}"
        sizes.append(Accelerator(name, generation, topology, chips // chips_per_host, chips_per_host))
    return sizes


ACCELERATORS = {slice_.name: slice_ for generation in GENERATIONS for slice_ in _list_sizes(generation)}


class UnknownAccelerator(BadInput, ValueError):
    """Raised for an accelerator type that does not exist; the message names the sizes that do."""


def accelerator(name: str) -> Accelerator:
    """Returns the slice size of this name, such as "v4-32", exactly. Raises UnknownAccelerator, whose message names the
    sizes of its family or all families, v5litepod-N for v5e-N, or GKE for TPU7x."""
    if name in ACCELERATORS:
        return ACCELERATORS[name]
    prefix, _, number = name.partition("-")
    if prefix == "v5e":
        why = f": Cloud TPU calls v5e slices v5litepod-N; did you mean v5litepod-{number or 'N'}?"
    elif prefix == "tpu7x":
        why = ": TPU7x is not offered through the Cloud TPU API, only through GKE or Compute Engine"
    elif sizes := [known for known in ACCELERATORS if known.rsplit("-", 1)[0] == prefix]:
        why = f" does not exist; {prefix} has {', '.join(sizes)}"
    else:
        why = f" does not exist; known families: {', '.join(f'{each.prefix}-N' for each in GENERATIONS)}"
    raise UnknownAccelerator(f"accelerator type {name!r}{why}")
