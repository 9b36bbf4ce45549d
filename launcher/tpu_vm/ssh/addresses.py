"""How the hosts of a slice are reached: as `gcloud ... ssh --dry-run` says it, and remembered from one command to the
next.

`.tpu-launch/slices/<project>.<name>.hosts.json` holds what gcloud said last of a slice that was READY, so that a
command needs not wait two gcloud calls for it. It is a hint: keys of hosts are checked whatever it says, a host that
does not answer there is asked for again (tpu_vm), and a file that is lost, cut short, or made for another zone, type or
way of reaching hosts is as none.
"""

from __future__ import annotations

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
from launcher.tpu_vm import placement


@dataclass(frozen=True)
class Address:
    """How gcloud reaches one host."""

    worker: int
    host: str
    user: str
    key_file: str
    known_hosts: str
    alias: str


@dataclass(frozen=True)
class Answer:
    """What a command on a host printed, or why it could not be asked (`problem`).

    `refused`: the host is there, but ssh as we speak it does not work (keys, host keys, a proxy): gcloud may still
    reach it.
    """

    worker: int
    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    refused: bool = False
    timed_out: bool = False

    @property
    def reached(self) -> bool:
        return self.returncode is not None


@dataclass(frozen=True)
class Known:
    """A slice as it was last seen READY."""

    created: str  # tells it from a later slice of the same name
    internal: tuple[str, ...]  # the addresses by which hosts know each other, in worker order
    addresses: tuple[Address, ...]


def parse_dry_run(text: str) -> list[Address]:
    """The lines that `gcloud compute tpus tpu-vm ssh --worker=all --dry-run` prints, one a host in worker order."""
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


def recall(config: Config) -> Known | None:
    """What is remembered of the slice that the file means; None when it would not be the same."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(_file(config).read_text())
        if kept["of"] == _of(config):
            known = Known(
                kept["created"], tuple(kept["internal"]), tuple(Address(**each) for each in kept["addresses"])
            )
            if len(known.internal) == len(known.addresses) == config.accelerator.hosts:
                return known
    return None


def keep(config: Config, known: Known) -> None:
    home.write_private(_file(config), json.dumps({"of": _of(config), **asdict(known)}))


def forget(config: Config) -> None:
    _file(config).unlink(missing_ok=True)


def _of(config: Config) -> str:
    """What the addresses depend on: where gcloud asks, for what, from where."""
    endpoint = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "")
    wanted = [
        endpoint,
        os.environ.get("HOME", ""),
        placement.zone(config),
        config.slice.accelerator_type,
        config.slice.internal_ips,
    ]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]


def _file(config: Config) -> Path:
    return home.where() / "slices" / f"{config.project.replace('/', '_')}.{config.slice.name}.hosts.json"
