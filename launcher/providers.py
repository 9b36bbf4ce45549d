"""The providers by `--provider` name, and the Workstation given to them. A provider is imported when it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from launcher import gke, shell, tpu_vm
from launcher.config import Config
from launcher.provider import Capabilities, Provider
from launcher.workstation import Address, HostConnection, Workstation, this_owner
from training.machine import SYSTEM

if TYPE_CHECKING:  # it imports Fabric, which takes time that a command without hosts need not spend
    from launcher.tpu_vm.ssh import SshClient

DEFAULT = "tpu-vm"

Say = Callable[[str], None]


PROVIDERS: Mapping[str, Capabilities] = {DEFAULT: tpu_vm.CAPABILITIES, "gke": gke.CAPABILITIES}


def make_provider(config: Config, say: Say, machine: Workstation) -> Provider:
    """Makes the provider that the configuration names. `say` is given lines for the user. Raises BadInput when a
    program that the provider needs is missing, or the configuration can't be used with it."""
    require_programs(config.provider)
    if config.provider == "gke":
        from launcher.gke.provider import Gke

        return Gke(config, say, machine)
    from launcher.tpu_vm.provider import TpuVm

    return TpuVm(config, say, machine)


def require_programs(name: str) -> None:
    """Raises CommandMissing when a program that the provider of that name needs is not installed."""
    for program in PROVIDERS[name].programs:
        shell.find(program)


def this_machine() -> Workstation:
    """Returns the workstation of this process. Its ssh client is made at the first connection: call this once."""
    making = SYSTEM.threads.lock()

    @functools.cache
    def client() -> SshClient:
        from launcher.tpu_vm.ssh import SshClient

        return SshClient()

    def connect(address: Address) -> HostConnection:
        with making:  # the first commands reach all hosts at once: make one client, which reads the key once
            ssh = client()
        return ssh.connect(address)

    return Workstation(connect=connect, find_owner=functools.cache(this_owner))
