"""Compares what all hosts are about to run, when they first meet."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput
from training.machine import SYSTEM, Machine


def agree(rendezvous: Rendezvous, facts: Mapping[str, str], start_seconds: float, machine: Machine = SYSTEM) -> str:
    """Waits for all hosts, `start_seconds` at most, and compares their `facts` (name -> value). Returns a token that
    only this group of processes has. Raises BadInput, naming the hosts, if a fact differs, and LostPeer."""
    reports = rendezvous.meet(
        "start", {"facts": dict(facts), "token": machine.random.randbytes(4).hex()}, start_seconds
    )
    differences = disagreements([report["facts"] for report in reports])
    if differences:
        raise BadInput("the hosts are about to run different things:\n  " + "\n  ".join(differences))
    token: str = reports[0]["token"]
    return token


def disagreements(reports: list[Mapping[str, str]]) -> list[str]:
    """Returns a line for each fact in which hosts differ from host 0, naming them. `reports`: facts in worker order."""
    lines = []
    for name, value in reports[0].items():
        others = {worker: facts.get(name) for worker, facts in enumerate(reports) if facts.get(name) != value}
        if others:
            lines.append(
                f"{name}: host 0 has {value}, "
                + ", ".join(f"host {worker} {other}" for worker, other in others.items())
            )
    return lines


@cache
def code_hash() -> str:
    """Returns a hash of the trainer's source, which all hosts must share and checkpoints record."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
