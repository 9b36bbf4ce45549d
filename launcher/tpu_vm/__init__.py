"""The provider for Cloud TPU VMs."""

from launcher.provider import Capabilities

CAPABILITIES = Capabilities(cloud_tpu_node=True, emulated=True, sends_secrets=True, replaces_hosts=True, overlays=True)
