"""The provider for Cloud TPU VMs, over gcloud and ssh.

From the top: `provider` (the Protocol's methods); `slices` (create, describe, delete), over `queued` (requests that
wait for capacity) and `placement` (which of several zones); `ssh` (connections to hosts); `host_checks`, `host_scripts`
and `host_output` (what hosts are told, and what they report), over `scripts` (the shell files themselves); `inventory`
(all slices of a project); `idle_shutdown`; `commands` (the gcloud commands).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(cloud_tpu_node=True, emulated=True, sends_secrets=True, replaces_hosts=True, overlays=True)
