"""The provider for Cloud TPU VMs, over gcloud and ssh.

From the top: `provider` (the Protocol's methods); `candidates` (one slice of several that would do) over `race` (asks
for all at once) and `requests` (the record of what was asked); `creation` and `deletion` of a slice over `slices` (its
state), `queued` (requests that wait for capacity) and `slice_hints` (candidate, time of the last create request); `ssh`
(connections to hosts); `host_scripts` and `host_output` (commands for hosts, and what hosts report) over `scripts` (the
shell files); `inventory` (all slices of a project); `ownership` (labels); `commands` (the gcloud commands of a slice).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(cloud_tpu_node=True, emulated=True, sends_secrets=True, replaces_hosts=True, overlays=True)
