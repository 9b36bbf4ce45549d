"""The facts of a host as lines of its output, and what they mean. Pure but for printing.

A fact is one line `check-devices {"name": value}`. `find_problems` judges the facts of one host; what only a comparison
of hosts shows is judged by the launcher (launcher/device_check).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from training.accelerators import ACCELERATORS

PREFIX = "check-devices "
OLDER_TORCH_XLA = "image.build_args: {REQUIREMENTS: requirements-2.8.txt} takes the torch_xla before"

_FREE_BYTES = 10 << 30  # on the container's disk: less is doubtful

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    message: str

    fix: str
    """What a person can do about it; may be empty."""

    fatal: bool = True
    """Whether a run would fail on it."""


def print_fact(name: str, value: Any) -> None:
    """Prints a fact as the launcher reads it."""
    print(PREFIX + json.dumps({name: value}), flush=True)


def parse_facts(lines: Iterable[str]) -> dict[str, Any]:
    """The facts in the lines of a host, the last value of each."""
    facts: dict[str, Any] = {}
    for line in lines:
        if line.startswith(PREFIX):
            try:
                facts.update(json.loads(line.removeprefix(PREFIX)))
            except ValueError:
                continue  # two writers in one line
    return facts


def find_problems(facts: Facts, hosts: int, accelerator_type: str | None = None) -> list[Problem]:
    """What is wrong with a host that reported `facts`, one of `hosts`."""
    slice_ = ACCELERATORS.get(accelerator_type or "")
    older = f"; {OLDER_TORCH_XLA}" if slice_ is not None and slice_.generation.name in ("v2", "v3") else ""
    anew = f"`tpu-launch down`, then `up`: a host of a slice can't be exchanged{older}"
    problems = []
    if error := facts.get("error"):
        problems.append(Problem(f"{facts.get('phase', 'beginning')}: {error}", anew))
    expected, count = facts.get("devices_expected", 0), facts.get("devices")
    if count is not None and count != expected:
        problems.append(Problem(f"{count} {facts['kind']} devices, and it should have {expected}", anew))
    total = facts.get("slice_devices")
    if count == expected and total is not None and total != expected * hosts:
        message = f"it sees {total} devices in the slice, which should have {expected * hosts}"
        problems.append(Problem(message, anew))
    if facts.get("wrong_products"):
        problems.append(Problem(f"{facts['wrong_products']} elements of a matrix product are wrong", anew))
    if facts.get("sum") is not None and facts["sum"] != total:
        problems.append(Problem(f"ones of {total} devices add up to {facts['sum']:g}", anew))
    if error := facts.get("bucket_error"):
        problems.append(Problem(f"output: {error}", "the hosts' service account needs roles/storage.objectUser"))
    free = facts.get("disk_free_bytes")
    if free is not None and free < _FREE_BYTES:
        fix = "docker system prune --all, on that host"
        problems.append(Problem(f"{free / 2**30:.1f} GiB of disk are free", fix, fatal=False))
    return problems
