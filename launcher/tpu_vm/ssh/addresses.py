"""Addresses of a slice's hosts: parsed from `gcloud ... ssh --dry-run`, and kept from one command to the next.

`.tpu-launch/slices/<project>.<name>.hosts.json` holds the last addresses of a READY slice, which saves a command two
gcloud calls. It is a hint: host keys are checked in any case, and gcloud is asked again for a host that does not answer
there (connections.py). A file that is cut short, or of another zone, type or network path, counts as missing.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import home
from launcher.config import Config
from launcher.errors import LaunchError
from launcher.tpu_vm import slice_hints
from launcher.workstation import Address


@dataclass(frozen=True)
class KnownSlice:
    """A slice when it was last seen READY."""

    created: str
    """Creation time: distinguishes it from a later slice of the same name."""

    internal: tuple[str, ...]
    """The addresses by which hosts reach each other, in worker order."""

    addresses: tuple[Address, ...]


def parse_dry_run(text: str) -> list[Address]:
    """Returns the addresses in the output of `gcloud compute tpus tpu-vm ssh --worker=all --dry-run`, in its order: a
    line a host. Ignores lines without a key file. Raises LaunchError for an unknown format."""
    addresses: list[Address] = []
    for line in text.splitlines():
        if " -i " not in line:
            continue
        words = shlex.split(line.split(" -- ")[0])
        options = dict(
            word.split("=", 1) for before, word in itertools.pairwise(words) if before == "-o" and "=" in word
        )
        target = next((word for word in reversed(words) if "@" in word), None)
        if target is None or "HostKeyAlias" not in options:
            raise LaunchError(f"gcloud's dry run is not as expected, is this a new SDK? It printed: {line}")
        user, host = target.rsplit("@", 1)
        match = re.search(r"-(\d+)(?:-[^-]{6})?$", options["HostKeyAlias"])
        worker = int(match.group(1)) if match else len(addresses)
        addresses.append(
            Address(
                worker,
                host,
                user,
                words[words.index("-i") + 1],
                options.get("UserKnownHostsFile", ""),
                options["HostKeyAlias"],
            )
        )
    return addresses


def load(config: Config) -> KnownSlice | None:
    """Returns the kept addresses of the slice; None if there are none for this configuration, or they are damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_file(config).read_text())
        if content["of"] == _fingerprint(config):
            addresses = tuple(Address(**address) for address in content["addresses"])
            known = KnownSlice(content["created"], tuple(content["internal"]), addresses)
            if len(known.internal) == len(known.addresses) == config.accelerator.hosts:
                return known
    return None


def save(config: Config, known: KnownSlice) -> None:
    """Keeps the addresses for later commands. Ignores a full disk: later commands ask gcloud then."""
    with contextlib.suppress(OSError):
        home.write_private(_file(config), json.dumps({"of": _fingerprint(config), **asdict(known)}))


def forget(config: Config) -> None:
    """Deletes the kept addresses of the slice."""
    _file(config).unlink(missing_ok=True)


def _fingerprint(config: Config) -> str:
    """Returns a hash of everything that the addresses depend on: the API, the slice, and the network path."""
    parts = [
        os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", ""),
        os.environ.get("HOME", ""),
        asdict(slice_hints.current(config)),
        config.slice.internal_ips,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _file(config: Config) -> Path:
    return home.of_slice(config.project, config.slice.name, "hosts.json")
