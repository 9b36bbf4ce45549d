"""An all-reduce across hosts over TCP, with numpy alone: for CPU hosts of a framework whose own does not fail fast.

Host 0 adds what the others send, in worker order, and sends all of them the sum: the order is fixed, so the same hosts
give the same bits, and all hosts get the same ones. On the wire, after both sides have proved that they know the
attempt's secret (`protocol/greeting.py`): the raw bytes of the array, one way and then the other, nothing else; all
hosts know its size. A peer that dies closes its connection
and the sum fails at once; a peer that vanishes is noticed by the rendezvous, which ends the process even while it waits
in here. All traffic goes through host 0, which is fine for a rehearsal's few hosts and small models.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from training.distributed.cluster import Cluster
from training.distributed.connection import introduce, let_in
from training.distributed.protocol.greeting import GRADIENT_EXCHANGE, Credentials, Refused, credentials
from training.distributed.protocol.messages import Malformed
from training.distributed.rendezvous import Rendezvous
from training.errors import LostPeer
from training.machine.network import connect, listen

NAMING_SECONDS = 5.0  # for the rendezvous to learn which host is lost
HANGING_SECONDS = 10.0  # for the hosts that do not hang to arrive at the barrier that shows which one does
TRY_SECONDS = 10.0  # for one try to connect

Flat = npt.NDArray[np.float32]


class TcpAllReduce:
    """The connections of one attempt."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous, seconds: float) -> None:
        """Connects all hosts. Every host must call it.

        Args:
            cluster: This host's place; its secret is what the hosts know each other by.
            rendezvous: Names the host that is lost.
            seconds: Time-out of connecting, and of each sending and receiving.

        Raises:
            BadInput: The hosts have no secret.
            LostPeer: A host did not connect.
        """
        self._rendezvous, self._first = rendezvous, cluster.is_first
        self._peers: list[socket.socket] = []  # on host 0: of worker 1, 2, ...; elsewhere: host 0
        own = credentials(cluster, GRADIENT_EXCHANGE)
        rendezvous.set_phase("connecting the gradient exchange")
        listener = listen(cluster.addresses[0], cluster.gloo_port) if self._first else None
        try:
            rendezvous.meet("gradient exchange")  # from here on host 0 listens
            if listener:
                peers = let_in(listener, own, seconds)
                self._peers = [peers[worker] for worker in sorted(peers)]
            else:
                self._peers = [_join(cluster, rendezvous, own, seconds)]
            for peer in self._peers:
                peer.settimeout(seconds)
        except (OSError, Malformed) as error:
            raise_lost_peer(rendezvous, "connecting the hosts", error)
        finally:
            if listener:
                listener.close()

    def sum(self, flat: Flat) -> Flat:
        """Returns the sum over all hosts, of arrays of one size. Raises LostPeer."""
        try:
            if not self._first:
                [peer] = self._peers
                peer.sendall(flat.data.cast("B"))
                return _receive(peer, np.empty_like(flat))
            total, other = flat.copy(), np.empty_like(flat)
            for peer in self._peers:
                total += _receive(peer, other)
            for peer in self._peers:
                peer.sendall(total.data.cast("B"))
            return total
        except OSError as error:
            raise_lost_peer(self._rendezvous, "adding up gradients", error)

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()


def raise_lost_peer(rendezvous: Rendezvous, activity: str, error: Exception) -> NoReturn:
    """Raises LostPeer for a collective that failed with `error`.

    The rendezvous learns which host is lost a moment later. If none is, one hangs: all others come here after the same
    time-out, and the barrier names the one that does not.
    """
    deadline = time.monotonic() + NAMING_SECONDS
    while time.monotonic() < deadline:
        rendezvous.check()
        time.sleep(0.05)
    rendezvous.meet(f"after {activity} failed", seconds=HANGING_SECONDS)
    why = (str(error) or type(error).__name__).splitlines()[0]
    raise LostPeer(
        f"{activity} failed, though no host is gone and none hangs: {why}; last known phases: {rendezvous.phases()}"
    )


def _join(cluster: Cluster, rendezvous: Rendezvous, own: Credentials, seconds: float) -> socket.socket:
    """A connection to host 0. Strangers there may cost a host its connection: it tries again.

    Raises:
        OSError, Malformed: It was not let in within `seconds`.
        LostPeer: Another host is lost meanwhile.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            peer = connect(cluster.addresses[0], cluster.gloo_port, min(seconds, TRY_SECONDS))
            try:
                refused = introduce(peer, own, cluster.worker, min(seconds, TRY_SECONDS))
                if isinstance(refused, Refused):
                    raise ConnectionRefusedError(refused.reason)
                return peer
            except BaseException:
                peer.close()
                raise
        except (OSError, Malformed):
            if time.monotonic() >= deadline:
                raise
        rendezvous.check()
        time.sleep(0.2)


def _receive(peer: socket.socket, array: np.ndarray) -> np.ndarray:
    """Fills an array. Raises OSError when the connection ends before."""
    view = array.data.cast("B")
    while view:
        size = peer.recv_into(view)
        if not size:
            raise ConnectionResetError("the other host closed its connection")
        view = view[size:]
    return array
