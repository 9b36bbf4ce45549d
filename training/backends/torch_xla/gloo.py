"""Sums across CPU hosts over TCP: there the framework's own collectives end at the process.

gloo's ring adds in an order that depends only on the number of hosts, so runs on the same number of hosts give the same
bits, and every host gets the same sum. A peer that dies closes its connections, and the sum fails at once. A peer that
vanishes is found by the rendezvous, which ends the process even while it waits here.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from training.distributed.cluster import Cluster
from training.distributed.handshake import derive_token
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import raise_lost_peer
from training.errors import TrainError


class Exchange:
    """The hosts' process group."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous, token: str, seconds: float) -> None:
        """Connects all hosts, which must all call it; connecting and each sum take at most `seconds`. Raises TrainError
        if host 0 can't listen, LostPeer if a host does not connect. `token`: of this group of processes."""
        self._rendezvous = rendezvous
        wait = timedelta(seconds=seconds)
        host, port = cluster.addresses[0], cluster.gloo_port
        # gloo accepts every connection, but without the secret the group's addresses can't be found in the store.
        name = derive_token(cluster, token)
        rendezvous.set_phase("connecting gloo")
        try:
            store = (
                dist.TCPStore(host, port, cluster.hosts, True, wait, wait_for_workers=False)
                if cluster.is_first
                else None
            )
        except RuntimeError as error:
            raise TrainError(
                f"can't listen on {host}:{port} for the gradient exchange: {str(error).splitlines()[0]}"
            ) from None
        rendezvous.meet("gloo store")  # from here on the store answers
        try:
            store = store or dist.TCPStore(host, port, cluster.hosts, False, wait, wait_for_workers=False)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = wait
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=cluster.addresses[cluster.worker])]
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), cluster.worker, cluster.hosts, options)
        except RuntimeError as error:
            raise_lost_peer(rendezvous, "connecting the hosts", error)
        self._store = store  # host 0's is the server: it lives as long as the group

    def sum(self, flat: torch.Tensor) -> None:
        """Replaces a CPU tensor by its sum over all hosts. Raises LostPeer."""
        try:
            self._group.allreduce([flat]).wait()
        except RuntimeError as error:
            raise_lost_peer(self._rendezvous, "adding up gradients", error)
