"""GKE: manifests of a run, and the provider that runs them through kubectl. Knows nothing of what stands in for a
cluster in tests."""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(
    cloud_tpu_node=False, emulated=False, sends_secrets=False, replaces_hosts=False, overlays=False
)
