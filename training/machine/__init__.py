"""What the hosts' protocol uses of the machine it runs on: clocks, threads, connections, and the end of the process.

Rendezvous, checkpoints, shutdown and telemetry take a `Machine` (storage is an argument of its own) and use nothing of
`time`, `threading` and `socket` beside it. So a simulation decides when everything happens, and in which order.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from training.machine.network import Network, SystemNetwork
from training.machine.threads import SystemThreads, Threads


@dataclass(frozen=True)
class Machine:
    """The machine below one process; this one, unless something else is given."""

    clock: Callable[[], float] = time.monotonic
    """Seconds since some moment; never goes backwards."""

    wall_time: Callable[[], float] = time.time
    """Seconds since 1970, as far as this host knows."""

    sleep: Callable[[float], None] = time.sleep
    """Returns after so many seconds."""

    threads: Threads = field(default_factory=SystemThreads)
    network: Network = field(default_factory=SystemNetwork)

    token_hex: Callable[[int], str] = secrets.token_hex
    """A random name: so many bytes, in hexadecimal."""

    exit: Callable[[int], NoReturn] = os._exit
    """Ends the process at once, with this exit code."""


SYSTEM = Machine()
