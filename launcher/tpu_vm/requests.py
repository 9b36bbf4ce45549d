"""The record of a slice's requests: each candidate that was asked for, when, and what became of it.

    .tpu-launch/slices/<project>.<name>.requests/
        000007.asked.json      the candidate and the time; written before Google is asked
        000007.granted.json    the time; at most one request that has not ended is granted: the slice of the run
        000007.ended.json      the time, and why: withdrawn, no capacity, taken away, deleted, refused

        bucket                 URL of a copy for other machines, below the folder of the slice's newest run (`share`)
        moving.json            open requests that `share` is giving new numbers

Every file is created whole and once (in the bucket first, then as a link to a finished file), and never changed: a
command that was killed at any point leaves requests without an end, which the next command withdraws or uses
(candidates.py).
"""

import contextlib
import itertools
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher import home
from launcher.config import Candidate, Config
from launcher.errors import LaunchError
from launcher.gcloud import Conflict
from launcher.home import lock
from training import storage

WITHDRAWN, NO_CAPACITY, TAKEN, DELETED, REFUSED = "withdrawn", "no capacity", "taken away", "deleted", "refused"
_ASKED, _BUCKET, _MOVING = "asked.json", "bucket", "moving.json"


@dataclass(frozen=True)
class Recorded:
    """A request for one candidate. Times are Unix seconds of this machine; None: not yet."""

    number: int
    candidate: Candidate
    node: str  # that was asked for
    asked: float
    granted: float | None = None
    ended: float | None = None
    outcome: str = ""

    def describe(self) -> str:
        """Returns its outcome in words, such as "granted after 12 s, taken away" or "open"."""
        waited = f"granted after {self.granted - self.asked:.0f} s" if self.granted is not None else ""
        return ", ".join(filter(None, [waited, self.outcome])) or "open"


def median_seconds_to_grant(requests: Sequence[Recorded]) -> float | None:
    """Returns the median seconds from a request to its grant; None if none was granted."""
    waits = [request.granted - request.asked for request in requests if request.granted is not None]
    return statistics.median(waits) if waits else None


class RequestRecord:
    """The record of one slice name."""

    def __init__(self, config: Config) -> None:
        self._folder = home.of_slice(config.project, config.slice.name, "requests")
        self._names: set[str] = set()  # of the files that were read
        self._found: dict[int, Recorded] = {}

    def read(self) -> list[Recorded]:
        """Returns all requests, oldest first, from the local files; reads each only once: none ever changes. Leaves out
        a request whose candidate a power loss took: `down` looks at all candidates of the file anyway."""
        for name in sorted(self._listed() - self._names, key=lambda name: (name[:6], name[7:] != _ASKED)):
            path, number = self._folder / name, int(name[:6])
            try:
                content = json.loads(path.read_text())
            except ValueError:  # damaged by a power loss: that it exists tells the most
                content = {"time": path.stat().st_mtime, "outcome": "unknown"}
            match name[7:]:
                case "asked.json" if "candidate" in content:
                    candidate = Candidate(**content["candidate"])
                    self._found[number] = Recorded(number, candidate, content["node"], content["time"])
                case _ if number not in self._found:
                    continue  # and read it again: `pull` may bring its candidate
                case "granted.json":
                    self._found[number] = replace(self._found[number], granted=content["time"])
                case "ended.json":
                    end = {"ended": content["time"], "outcome": content["outcome"]}
                    self._found[number] = replace(self._found[number], **end)
            self._names.add(name)
        return [self._found[number] for number in sorted(self._found)]

    def _listed(self) -> set[str]:
        """Returns the names of the local files of requests."""
        return {path.name for path in self._folder.glob("[0-9]*")}

    def open(self) -> list[Recorded]:
        """Returns the requests that have not ended, oldest first, after finishing a `share` that was killed. Raises
        LaunchError if the bucket does not answer for that; OSError."""
        if (self._folder / _MOVING).exists():
            try:
                self.share(json.loads((self._folder / _MOVING).read_text())["url"])
            except storage.StorageError as error:
                raise LaunchError(f"open requests can't be read from their bucket: {error}") from None
        return [request for request in self.read() if request.ended is None]

    def ask(self, candidate: Candidate, node: str, now: float) -> Recorded:
        """Records a new request under the next free number, in the bucket too if the record is shared; returns it. Call
        it before the request is made. Raises OSError, LaunchError if the bucket does not take it."""
        number = max((int(name[:6]) for name in self._listed()), default=0) + 1
        return self._ask(Recorded(number, candidate, node, now))

    def _ask(self, request: Recorded) -> Recorded:
        """Writes a request to the record, first to its bucket if it is shared, under its number or the next one that no
        other request has. Returns it with that number. Raises OSError, LaunchError if the bucket does not take it."""
        content = {"candidate": asdict(request.candidate), "node": request.node, "time": request.asked}
        while not self._create(request.number, "asked", content):
            request = replace(request, number=request.number + 1)
        return request

    def grant(self, request: Recorded, now: float) -> None:
        """Records, here and if possible in a shared record's bucket, that a request is granted at `now` (Unix seconds)
        and used; keeps an earlier grant. Raises OSError."""
        self._create(request.number, "granted", {"time": now})

    def end(self, requests: Sequence[Recorded], outcome: str, now: float) -> None:
        """Records the end of requests at `now` (Unix seconds), and its `outcome`, such as WITHDRAWN, here and if
        possible in a shared record's bucket; keeps an earlier end. Raises OSError."""
        for request in requests:
            self._create(request.number, "ended", {"time": now, "outcome": outcome})

    def require_open(self, request: Recorded) -> None:
        """Raises Conflict if another command, such as `down`, has recorded the request's end here. Thread-safe."""
        if (self._folder / f"{request.number:06d}.ended.json").exists():
            raise Conflict(
                f"slice {request.node} was deleted by another command while this one waited for it; `tpu-launch up` "
                "creates it again"
            )

    def _create(self, number: int, part: str, content: dict[str, Any]) -> bool:
        """Creates a file of the record in the bucket, if it has one, and here; if another machine was quicker, copies
        that machine's file. Returns whether the record has this content now. Raises LaunchError if the bucket can't
        take the record of a new request; ignores its other errors."""
        name, text = f"{number:06d}.{part}.json", json.dumps(content) + "\n"
        found = text
        if (self._folder / _BUCKET).exists():
            url = storage.join((self._folder / _BUCKET).read_text(), name)
            try:
                try:
                    storage.write(url, text.encode(), create_only=True)
                except storage.AlreadyExists:  # another machine's, which `pull` copies if it can't be read now
                    found = text if part == "ended" else ""  # one end is as good as another
                    found = storage.read(url).decode()
            except storage.StorageError as error:  # `share` copies the others later
                if part == "asked":
                    raise LaunchError(f"request {number} was not made, because it can't be recorded: {error}") from None
        path = self._folder / name
        return bool(found) and (create_only(path, found) or path.read_text() == text) and found == text

    def share(self, url: str) -> None:
        """Also records requests in a bucket's folder from now on, and copies those that only one side has to the other.
        If both have different requests of one number, takes the bucket's and gives this machine's open ones new
        numbers, which it notes first: `open` finishes that after a kill. Raises StorageError, OSError."""
        moving = self._folder / _MOVING
        if moving.exists() and (earlier := json.loads(moving.read_text())["url"]) != url:
            self.share(earlier)
        mine = {name: (self._folder / name).read_text() for name in self._listed()}
        there = {storage.name_of(found.url): storage.read(found.url).decode() for found in storage.listing(url)}
        if not moving.exists():
            if all(there[name] == text for name, text in mine.items() if name in there and name.endswith(_ASKED)):
                for name in sorted(mine.keys() - there.keys()):  # "asked" first: no end without it after a kill
                    storage.write(storage.join(url, name), mine[name].encode())
                home.write_private(self._folder / _BUCKET, url)  # first: `pull` goes on with copies after a kill
                for name in sorted(there.keys() - mine.keys()):
                    create_only(self._folder / name, there[name])
                return
            new = itertools.count(max(int(name[:6]) for name in (*mine, *there)) + 1)
            left = [asdict(replace(item, number=next(new))) for item in self.read() if item.ended is None]
            home.write_private(moving, json.dumps({"url": url, "requests": left}), sync=True)
        for name in sorted(mine, reverse=True):  # "asked" last
            (self._folder / name).unlink(missing_ok=True)
        for name, text in there.items():
            create_only(self._folder / name, text)
        self._names, self._found = set(), {}
        home.write_private(self._folder / _BUCKET, url)
        for item in json.loads(moving.read_text())["requests"]:
            moved = self._ask(Recorded(**item | {"candidate": Candidate(**item["candidate"])}))
            if moved.granted is not None:
                self.grant(moved, moved.granted)
        moving.unlink(missing_ok=True)

    def adopt(self, url: str) -> None:
        """Makes this machine, if it has no record, record in a bucket's folder too; copies nothing. Raises OSError."""
        if not self._folder.exists():
            home.write_private(self._folder / _BUCKET, url)

    def pull(self) -> None:
        """Copies here what other machines recorded in its bucket, if it has one. Raises OSError, StorageError."""
        if (self._folder / _BUCKET).exists():
            for found in storage.listing((self._folder / _BUCKET).read_text()):
                if not (path := self._folder / storage.name_of(found.url)).exists():
                    create_only(path, storage.read(found.url).decode())

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Holds the record's lock inside the block, unless another process has it. Yields whether this one has it.
        Raises BadInput where the file system can't lock files."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "lock"
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            yield lock(file, path)


def create_only(path: Path, text: str) -> bool:
    """Creates a text file (0600) atomically, once the disk has its text; returns False if it exists. Raises OSError."""
    if path.exists():
        return False
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    home.write_private(scratch, text, sync=True)
    try:
        os.link(scratch, path)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    return True
