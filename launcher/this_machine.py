"""The machine that this process runs on: its clock, threads, processes and ssh."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from launcher import shell
from launcher.clock import SystemClock
from launcher.machine import Machine
from launcher.remote import Address, Connection
from launcher.tasks import Threads

if TYPE_CHECKING:  # it imports Fabric, which takes time that a command without hosts need not spend
    from launcher.tpu_vm.ssh.transport import SshClient


def this_machine() -> Machine:
    """Made once a process, by the command line."""

    @functools.cache
    def client() -> SshClient:
        from launcher.tpu_vm.ssh.transport import SshClient

        return SshClient()

    def connect(address: Address) -> Connection:
        return client().connect(address)

    return Machine(SystemClock(), Threads(), shell.run, connect, random.SystemRandom())
