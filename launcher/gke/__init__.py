"""GKE: manifests of a run, and the provider that runs them through kubectl. Nothing here knows what replaces a cluster
in tests.

From the top: `provider` (the Protocol's methods) over `watch` and `pod_status` (pods as they are and as they ended) and
`kubectl` (calls, and what errors mean); `standalone` (a manifest for people who use kubectl alone); `manifest` (the
objects) over `jobs`, `pod_template` and `workload`, written by `commented_yaml`; `checks` (what GKE would refuse).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(
    cloud_tpu_node=False, emulated=False, sends_secrets=False, replaces_hosts=False, overlays=False
)
