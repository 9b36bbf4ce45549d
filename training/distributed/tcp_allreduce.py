"""An all-reduce across CPU hosts over TCP, with numpy alone: there the frameworks' own end at the process, or do not
fail fast.

Host 0 adds the arrays of the other hosts, in worker order, and sends them the sum: the order is fixed, so the same
number of hosts gives the same bits on every host. On the wire, after the handshake (`handshake.py`): the raw bytes of
the array, one way and then the other; all hosts know its size. If a peer dies, its connection closes and the sum fails
at once. If a peer vanishes, the rendezvous notices and ends the process even while it waits here. All traffic goes
through host 0, which suffices for the few hosts and small models of a rehearsal.
"""

import contextlib
import socket
import time
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import LostPeer, TrainError, is_out_of_memory

NAMING_SECONDS = 5.0  # in which the rendezvous learns which host is lost
HANGING_SECONDS = 10.0  # in which the healthy hosts arrive at the barrier that names a hanging one

Flat = npt.NDArray[np.float32]


class TcpAllReduce:
    """Sums arrays over all hosts of an attempt."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous, seconds: float) -> None:
        """Connects all hosts; every host must call it. `rendezvous` names a lost host; `seconds` limits connecting, and
        each later send and receive. Raises LostPeer if a host is lost or did not connect, StopRequested if a stop is
        the cause."""
        self._rendezvous, self._first = rendezvous, cluster.is_first
        self._peers: list[socket.socket] = []  # on host 0: workers 1, 2, ...; on other hosts: host 0
        rendezvous.set_phase("connecting the gradient exchange")
        rendezvous.meet("gradient exchange")
        try:
            self._peers = rendezvous.connect_hosts(seconds)
        except (OSError, TrainError) as error:  # also a refusal: a newer attempt's host 0 answers, ours is lost
            raise_lost_peer(rendezvous, "connecting the hosts", error)

    def sum(self, flat: Flat) -> Flat:
        """Waits for all hosts' arrays, of one size, and returns their sum, a new array. Raises LostPeer if one is lost
        or hangs (for the constructor's `seconds`), StopRequested if a stop is the cause."""
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
        """Closes the connections to the other hosts."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()


def raise_lost_peer(rendezvous: Rendezvous, activity: str, error: Exception) -> NoReturn:
    """Raises LostPeer, or StopRequested if a stop is the cause, for a collective that failed with `error`. `activity`:
    for messages. Waits NAMING_SECONDS at most for the rendezvous to know which host is lost. If none is, a host hangs:
    all other hosts come here after the same time-out, and a barrier of HANGING_SECONDS names the missing one. Raises
    `error` itself, at once, if it says that memory is short: then this host is the cause."""
    if is_out_of_memory(error):
        raise error
    deadline = time.monotonic() + NAMING_SECONDS
    while time.monotonic() < deadline:
        rendezvous.check()
        time.sleep(0.05)
    rendezvous.meet(f"after {activity} failed", seconds=HANGING_SECONDS)
    why = (str(error) or type(error).__name__).splitlines()[0]
    raise LostPeer(f"{activity} failed, but no host is lost or hangs: {why}; last known phases: {rendezvous.phases()}")


def _receive(peer: socket.socket, array: np.ndarray) -> np.ndarray:
    """Fills an array with received bytes, and returns it. Raises OSError if the connection ends early."""
    view = array.data.cast("B")
    while view:
        size = peer.recv_into(view)
        if not size:
            raise ConnectionResetError("the other host closed its connection")
        view = view[size:]
    return array
