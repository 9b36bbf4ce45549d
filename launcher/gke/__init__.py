"""GKE: manifests of a run, and the provider that runs them through kubectl.

From the top: `provider` (implements the Protocol) over `pods` (their states and logs) and `kubectl` (calls and errors);
`manifest` (fills jobset.yaml, the objects of a run, by `templates`) over `workload` (names, and what GKE would refuse).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(
    cloud_tpu_node=False, sends_secrets=False, replaces_hosts=False, overlays=False, programs=("kubectl",)
)
