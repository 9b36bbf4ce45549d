"""All providers, by the name that `--provider` takes. A provider is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher import gke, tpu_vm
from launcher.config import Config
from launcher.machine import Machine
from launcher.provider import Capabilities, Provider

DEFAULT = "tpu-vm"

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProviderKind:
    """A provider that `--provider` can name."""

    capabilities: Capabilities
    make: Callable[[Config, Say, Machine], Provider]


def _tpu_vm(config: Config, say: Say, machine: Machine) -> Provider:
    from launcher.checks import inputs
    from launcher.tpu_vm.provider import TpuVm

    inputs.tools()
    return TpuVm(config, say, machine)


def _gke(config: Config, say: Say, _machine: Machine) -> Provider:
    from launcher.gke.provider import Gke

    return Gke(config, say)


PROVIDERS: Mapping[str, ProviderKind] = {
    DEFAULT: ProviderKind(tpu_vm.CAPABILITIES, _tpu_vm),
    "gke": ProviderKind(gke.CAPABILITIES, _gke),
}


def make_provider(config: Config, say: Say, machine: Machine) -> Provider:
    """The provider of a configuration. `say` is given lines for a person.

    Raises:
        BadInput: A program that it needs is missing, or the configuration can't be used with it.
    """
    return PROVIDERS[config.provider].make(config, say, machine)


def capabilities(name: str) -> Capabilities:
    """What the provider of that name can do, without making one."""
    return PROVIDERS[name].capabilities
