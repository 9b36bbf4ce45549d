"""`gke`: the cluster, for runs on Google Kubernetes Engine."""

from typing import Annotated

from pydantic import Field

from launcher.config.values import ClusterSecrets
from training.yaml_file import Section


class GcsFuseSection(Section):
    """`gke.gcsfuse`: a bucket as a folder of the container, through GKE's Cloud Storage FUSE driver."""

    bucket: Annotated[str, Field(min_length=3)]
    """Name of the bucket, without gs://."""

    folder: Annotated[str, Field(pattern=r"^/[^:]+$")]
    """Absolute path in the container at which it is mounted."""

    read_only: bool = False
    """Whether the container may not write to it."""

    options: str = "implicit-dirs"
    """The driver's mountOptions, separated by commas."""


class GkeSection(Section):
    """`gke`: the cluster, for `tpu-launch manifest` and `--provider gke`. What belongs to the slice is in `slice`."""

    context: str | None = None
    """Context of kubectl's configuration; kubectl's current one when absent."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    """Namespace of the run's objects."""

    topology: str | None = None
    """Topology of the node pool, like 2x2x2; checked against slice.accelerator_type, which implies it."""

    hosts: int | None = None
    """Number of nodes; checked against slice.accelerator_type, which implies it."""

    queue: Annotated[str, Field(min_length=1)] | None = None
    """Kueue's LocalQueue that admits the run; absent: no queue."""

    service_account: Annotated[str, Field(min_length=1)] | None = None
    """Kubernetes service account of the pods, bound to Google's by Workload Identity; the namespace's default one when
    absent."""

    secrets: ClusterSecrets = {}
    """Environment variables from the namespace's Secrets: NAME: SECRET/KEY."""

    gcsfuse: GcsFuseSection | None = None
    """Mounts a bucket as a folder; absent: none."""

    node_selector: dict[str, str] = {}
    """More labels that the nodes must have: a node pool, a reservation."""

    cpu: str | None = None
    """CPUs that are requested for each host's container, as Kubernetes writes them: "100"."""

    memory: str | None = None
    """Memory that is requested for each host's container, as Kubernetes writes it: "300Gi"."""

    node_cache: Annotated[str, Field(pattern=r"^/[^:]+$")] | None = None
    """Folder of each node, such as /var/lib/tpu-launch, that keeps compiled programs, up to run.compile_cache_gb, for
    later pods on the node; absent: none. The cluster must allow hostPath volumes, which Autopilot does not."""

    restarts: int = Field(default=10, ge=0)
    """Restarts by the cluster of a manifest that was applied with kubectl. `tpu-launch run` counts attempts itself."""

    privileged: bool = False
    """Runs the container privileged, which GKE before 1.28 needs to reach the TPU. Otherwise it has the capability
    SYS_RESOURCE, to raise its locked-memory limit, and DAC_OVERRIDE, to write in the image's folders."""
