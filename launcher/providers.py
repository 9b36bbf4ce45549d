"""The table of providers, by `--provider` name, and the Workstation given to them. One is imported at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ProviderKind:
    """An entry of PROVIDERS."""

    capabilities: Capabilities
    make: Callable[[Config, Say, Workstation], Provider]
    programs: tuple[str, ...]
    """Programs that it runs on this machine."""


def _tpu_vm(config: Config, say: Say, machine: Workstation) -> Provider:
    from launcher.tpu_vm.provider import TpuVm

    return TpuVm(config, say, machine)


def _gke(config: Config, say: Say, machine: Workstation) -> Provider:
    from launcher.gke.provider import Gke

    return Gke(config, say, machine)


PROVIDERS: Mapping[str, ProviderKind] = {
    DEFAULT: ProviderKind(tpu_vm.CAPABILITIES, _tpu_vm, ("gcloud", "ssh")),
    "gke": ProviderKind(gke.CAPABILITIES, _gke, ("kubectl",)),
}


def make_provider(config: Config, say: Say, machine: Workstation) -> Provider:
    """Makes the provider that the configuration names. `say` is given lines for the user. Raises BadInput when a
    program that the provider needs is missing, or the configuration can't be used with it."""
    require_programs(config.provider)
    return PROVIDERS[config.provider].make(config, say, machine)


def require_programs(name: str) -> None:
    """Raises CommandMissing when a program that the provider of that name needs is not installed."""
    for program in PROVIDERS[name].programs:
        shell.find(program)


def capabilities(name: str) -> Capabilities:
    """Returns the capabilities of the provider of that name, without making one."""
    return PROVIDERS[name].capabilities


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
