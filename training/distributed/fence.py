"""Which of several starts of a run may commit: the newest, and of two at the same moment one that both agree on.

    attempts/attempt-0002.<token>.json    the claim of a start: written by host 0 when all hosts have agreed, and never
                                          changed. Its "after" lists the claims that were there before

Whether by two launchers, or because a host of an old attempt wakes up: of two groups of hosts that train one run, one
goes on, from what the other had committed. A start whose claim another one lists is older than that one, which lists
more. Of those that list equally many, made at the same moment, attempt number and token decide. So there is one order
of all starts, and no moment at which they take each other for older, whatever happens between listing and writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training import storage as default_storage
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput
from training.storage import NotFound, Storage, StorageError, is_remote, join, name_of

_CLAIM = re.compile(r"attempt-(\d+)\.([0-9a-f]+)\.json")


@dataclass(frozen=True)
class Claim:
    """What a start has written, as host 0 knows it."""

    url: str
    after: frozenset[str]  # names of the claims that were there before; empty on other hosts

    @property
    def name(self) -> str:
        """Of the file."""
        return name_of(self.url)


def claim(
    folder: str,
    cluster: Cluster,
    rendezvous: Rendezvous,
    token: str,
    record: Mapping[str, Any],
    storage: Storage = default_storage,
) -> Claim:
    """Writes what this attempt is to the run's folder, and makes sure that all hosts have that folder in common: their
    parts go there.

    So an output that can't be written, or that every host has for itself, is found before the first step. Raises
    BadInput.
    """
    url = join(folder, "attempts", f"attempt-{cluster.attempt:04d}.{token}.json")
    after: frozenset[str] = frozenset()
    if cluster.is_first:
        try:
            after = _claims(folder, storage)
            document = {**record, "after": sorted(after)}
            storage.write(url, json.dumps(document, indent=1).encode() + b"\n")
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
    """Returns the check that host 0 makes before each commit: it raises BadInput when another start of the run goes
    before this one."""
    older = set(own.after | {own.name})

    def check() -> None:
        for name in sorted(_claims(folder, storage) - older):
            if _goes_before(_read(folder, name, storage), name, own):
                raise BadInput(
                    f"run {cluster.run_id} was started again while this attempt {cluster.attempt} was training "
                    f"({join(folder, 'attempts', name)}); only the newest start may commit. If both were meant, give "
                    "one of them another run id or output"
                )
            older.add(name)

    return check


def _goes_before(record: Mapping[str, Any], name: str, own: Claim) -> bool:
    """Whether a start that `own` does not know of is newer, or was made at the same moment and has precedence."""
    after = record.get("after")
    if not isinstance(after, list):
        return True  # of a program that did not write the key, a claim that is new here is newer
    return _rank(len(after), name) > _rank(len(own.after), own.name)


def _rank(seen: int, name: str) -> tuple[int, int, str]:
    """The place of a claim in the one order that all starts agree on. Who lists a claim lists what that one lists too,
    and so has seen more: numbers seen can't go in a circle, as pairs that decide by name can."""
    match = _CLAIM.fullmatch(name)
    return (seen, int(match[1]), match[2]) if match else (seen, 0, name)


def _claims(folder: str, storage: Storage) -> frozenset[str]:
    names = (name_of(info.url) for info in storage.listing(join(folder, "attempts")))
    return frozenset(name for name in names if _CLAIM.fullmatch(name))


def _read(folder: str, name: str, storage: Storage) -> Mapping[str, Any]:
    """A claim; nothing for one that can't be read, which then counts as newer."""
    try:
        record = json.loads(storage.read(join(folder, "attempts", name)))
    except (NotFound, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
