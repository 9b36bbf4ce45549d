"""The provider for Cloud TPU VMs, over gcloud and ssh.

From the top: `provider` (the Protocol's methods); `candidates` (asks at once for several slices of which one will do)
over `requests` (the record of what was asked); `creation` and `deletion` of a slice over `slices` (state and labels),
`queued` (requests that wait for capacity) and `slice_hints` (candidate, time of the last create request); `connections`
to hosts over `ssh`; `execution` (a user's command on hosts); `host_scripts` (the shell files of `scripts`, and what
they report); `inventory` (all slices of a project); `commands` (the gcloud commands of a slice).
"""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(
    cloud_tpu_node=True, sends_secrets=True, replaces_hosts=True, overlays=True, programs=("gcloud", "ssh")
)
