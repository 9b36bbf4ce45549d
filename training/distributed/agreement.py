"""Makes the hosts of a start agree on what they run, and lets only the newest start of a run commit checkpoints.

    attempts/attempt-0002.<token>.json    the claim of a start: host 0 writes it when all hosts have agreed, and never
                                          changes it. Its "after" lists the claims that existed before

Two groups of hosts may train one run: two launchers started it, or a host of an old attempt wakes up. Then one group
goes on, from the checkpoints that the other has committed. A claim in another claim's list is older than that one,
which lists more. Among claims that list equally many, attempt number and token decide. So all starts have one order,
and no two take each other for older, whatever happens between listing and writing: of two starts at the same moment,
both choose the same one."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from training import storage as default_storage
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput
from training.machine import SYSTEM, Machine
from training.storage import NotFound, Storage, StorageError, is_remote, join, name_of

_CLAIM = re.compile(r"attempt-(\d+)\.([0-9a-f]+)\.json")


def agree(rendezvous: Rendezvous, facts: Mapping[str, str], start_seconds: float, machine: Machine = SYSTEM) -> str:
    """Waits for all hosts, 10 s more than `start_seconds` at most, and compares their `facts` (name -> value). Returns
    a token that all hosts of this start share: 8 random hex digits of host 0. Raises BadInput, naming the hosts, if a
    fact of host 0 differs on another; LostPeer or StopRequested as `Rendezvous.meet`."""
    own = {"facts": dict(facts), "token": machine.random.randbytes(4).hex()}
    reports = rendezvous.meet("start", own, start_seconds)
    if differences := disagreements([report["facts"] for report in reports]):
        raise BadInput("the hosts are about to run different things:\n  " + "\n  ".join(differences))
    token: str = reports[0]["token"]
    return token


def disagreements(reports: list[Mapping[str, str]]) -> list[str]:
    """Returns a line for each fact of host 0 that differs or is absent on others, naming them; [] if none. Does not
    look for facts that host 0 lacks. `reports`: facts in worker order."""
    lines = []
    for name, value in reports[0].items():
        others = {worker: facts.get(name) for worker, facts in enumerate(reports) if facts.get(name) != value}
        if others:
            named = ", ".join(f"host {worker} {other}" for worker, other in others.items())
            lines.append(f"{name}: host 0 has {value}, {named}")
    return lines


@cache
def code_hash() -> str:
    """Returns a hash (16 hex digits) of the trainer's source, which all hosts must share and checkpoints record."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Claim:
    """The claim of a start."""

    url: str
    after: frozenset[str]  # on host 0, the names of the claims that existed before; else empty

    @property
    def name(self) -> str:
        return name_of(self.url)


def claim(
    folder: str,
    cluster: Cluster,
    rendezvous: Rendezvous,
    token: str,
    record: Mapping[str, Any],
    storage: Storage = default_storage,
) -> Claim:
    """On host 0, writes this start's claim, attempts/attempt-NNNN.TOKEN.json (`record`, and earlier claims' names), to
    the run's folder; then each host looks for it, once, and waits for all others. Raises BadInput if a host does not
    see it (the folder is not shared), the bucket is missing, or host 0 can't write a local folder (a mounted bucket has
    no hard links); StorageError if a bucket fails; LostPeer, StopRequested."""
    url = join(folder, "attempts", f"attempt-{cluster.attempt:04d}.{token}.json")
    after: frozenset[str] = frozenset()
    if cluster.is_first:
        try:
            after = _claims(folder, storage)
            document = {**record, "after": sorted(after)}
            # Create-only as commits are: find out now, not at the first save, that the folder can't take them.
            storage.write(url, json.dumps(document, indent=1).encode() + b"\n", create_only=True)
        except StorageError as error:
            if isinstance(error, NotFound) or not is_remote(url):
                raise BadInput(f"output: {error}") from None
            raise
    rendezvous.meet("claimed")
    blind = [worker for worker, sees in enumerate(rendezvous.meet("seen", storage.stat(url) is not None)) if not sees]
    if blind:
        raise BadInput(
            f"output {folder} is not one folder for all hosts: host 0 wrote {url}, and host "
            f"{', host '.join(map(str, blind))} can't see it; use gs://, or a folder that all hosts share"
        )
    return Claim(url, after)


def fence(folder: str, cluster: Cluster, own: Claim, storage: Storage = default_storage) -> Callable[[], None]:
    """Returns a check for host 0 to call before and after each commit: it reads the claims that are new in the folder
    since its last call, and raises BadInput if one is of a newer start than `own` or can't be understood, StorageError
    if storage fails."""
    older = set(own.after | {own.name})

    def check() -> None:
        """Raises as `fence` says. Remembers older claims, so that it reads each once."""
        for name in sorted(_claims(folder, storage) - older):
            after = None
            with contextlib.suppress(NotFound, ValueError):
                record = json.loads(storage.read(join(folder, "attempts", name)))
                after = record.get("after") if isinstance(record, dict) else None
            if not isinstance(after, list) or _rank(len(after), name) > _rank(len(own.after), own.name):
                raise BadInput(
                    f"run {cluster.run_id} was started again while this attempt {cluster.attempt} was training "
                    f"({join(folder, 'attempts', name)}); only the newest start may commit. If you want both, give "
                    "one of them another run id or output"
                )
            older.add(name)

    return check


def _rank(seen: int, name: str) -> tuple[int, int, str]:
    """Returns a key that sorts claims by start: `seen`, the number of claims that it lists, then attempt and token,
    or 0 and `name` if `name` is no claim's. A claim that lists another one also lists all claims of that one, so `seen`
    grows along every chain: the order has no cycles, as comparing pairs by name could have."""
    match = _CLAIM.fullmatch(name)
    return (seen, int(match[1]), match[2]) if match else (seen, 0, name)


def _claims(folder: str, storage: Storage) -> frozenset[str]:
    """Returns the names of all claims in the run's folder. Raises StorageError."""
    names = (name_of(info.url) for info in storage.listing(join(folder, "attempts")))
    return frozenset(name for name in names if _CLAIM.fullmatch(name))
