"""The emulated TPU VMs, and what runs on them."""
