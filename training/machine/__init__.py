"""Clock, threads, network and randomness of the machine that a process runs on, as one value.

The hosts' protocol, checkpoints, shutdown and telemetry, and with more members (`launcher.workstation`) the launcher,
take a `Machine` and use nothing of `time`, `threading`, `socket` and `random` beside it. So a simulation decides when
everything happens, and in which order. Files are not part of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from training.machine.clock import Clock
from training.machine.network import Network, SystemNetwork
from training.machine.threads import Threads


@dataclass(frozen=True)
class Machine:
    """The machine that a process runs on; the real one by default."""

    clock: Clock = field(default_factory=Clock)
    threads: Threads = field(default_factory=Threads)
    network: Network = field(default_factory=SystemNetwork)
    random: random.Random = field(default_factory=random.SystemRandom)
    exit: Callable[[int], NoReturn] = os._exit  # ends the process at once, with this exit code


SYSTEM = Machine()
