"""The provider for Cloud TPU VMs, over gcloud and ssh.

From the top: `provider` (the Protocol's methods); `slices` (create, describe, delete) over `queued` (requests that wait
for capacity) and `slice_hints` (zone, time of the last create request); `ssh` (connections to hosts); `host_scripts`
and `host_output` (commands for hosts, and what hosts report) over `scripts` (the shell files);
`inventory` (all slices of a project); `ownership` (labels); `commands` (the gcloud commands of a slice).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(cloud_tpu_node=True, emulated=True, sends_secrets=True, replaces_hosts=True, overlays=True)
