"""A small cluster for tests, for the real kubectl: an API server, the controllers of Job and JobSet, a scheduler, and
nodes that run pods as containers.

It does what Kubernetes documents for the few kinds that tpu-launch uses, and validates objects against the published
schemas. It adds what GKE adds to pods that request TPU chips; there are no chips, so nodes set PJRT_DEVICE=CPU in
containers, and the address of the emulated bucket. It lacks several namespaces, admission webhooks other than GKE's,
the code of Kueue's and JobSet's controllers, and limits that the kernel enforces.
"""
