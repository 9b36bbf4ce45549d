"""A small cluster for tests, for the real kubectl: an API server, the controllers of Job and JobSet, a scheduler, and
nodes that run pods as containers.

It does what Kubernetes documents for the few kinds that tpu-launch uses, and judges objects by the published schemas.
What GKE adds to pods that ask for TPU chips is added; the chips themselves are not there, so a node tells containers
PJRT_DEVICE=CPU, and where the emulated bucket is. Not here: several namespaces, admission webhooks other than GKE's
own, Kueue's and JobSet's controllers as they are written, kernel-enforced limits.
"""
