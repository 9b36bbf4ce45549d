"""GKE: manifests of a run, and the provider that runs them through kubectl.

From the top: `provider` (implements the Protocol) over `watch` and `pod_status` (the state of pods) and `kubectl`
(calls and errors); `manifest` (the objects of a run) over `jobs`, `pod_template` and `workload`, written by
`commented_yaml`; `checks` (refuses what GKE would refuse).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(
    cloud_tpu_node=False, emulated=False, sends_secrets=False, replaces_hosts=False, overlays=False
)
