"""All providers, by the name that `--provider` takes, and the machine that they are given. A provider is imported when
it is used."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher import gke, tpu_vm
from launcher.config import Config
from launcher.owner import this_owner
from launcher.provider import Capabilities, Provider
from launcher.workstation import Address, HostConnection, Workstation
from training.machine import SYSTEM

if TYPE_CHECKING:  # it imports Fabric, which takes time that a command without hosts need not spend
    from launcher.tpu_vm.ssh.transport import SshClient

DEFAULT = "tpu-vm"

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProviderKind:
    """A provider that `--provider` can name."""

    capabilities: Capabilities
    make: Callable[[Config, Say, Workstation], Provider]


def _tpu_vm(config: Config, say: Say, machine: Workstation) -> Provider:
    from launcher.checks import inputs
    from launcher.tpu_vm.provider import TpuVm

    inputs.tools()
    return TpuVm(config, say, machine)


def _gke(config: Config, say: Say, machine: Workstation) -> Provider:
    from launcher.gke.provider import Gke

    return Gke(config, say, machine)


PROVIDERS: Mapping[str, ProviderKind] = {
    DEFAULT: ProviderKind(tpu_vm.CAPABILITIES, _tpu_vm),
    "gke": ProviderKind(gke.CAPABILITIES, _gke),
}


def make_provider(config: Config, say: Say, machine: Workstation) -> Provider:
    """The provider of a configuration. `say` is given lines for a person.

    Raises:
        BadInput: A program that it needs is missing, or the configuration can't be used with it.
    """
    return PROVIDERS[config.provider].make(config, say, machine)


def capabilities(name: str) -> Capabilities:
    """What the provider of that name can do, without making one."""
    return PROVIDERS[name].capabilities


def this_machine() -> Workstation:
    """The machine that this process runs on; the command line makes it once."""

    making = SYSTEM.threads.lock()

    @functools.cache
    def client() -> SshClient:
        from launcher.tpu_vm.ssh.transport import SshClient

        return SshClient()

    def connect(address: Address) -> HostConnection:
        with making:  # the first commands go to all hosts at once: each would make a client, and read its key again
            ssh = client()
        return ssh.connect(address)

    return Workstation(connect=connect, owner=this_owner(os.environ))
