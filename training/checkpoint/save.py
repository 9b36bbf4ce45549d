"""Saving: the step loop waits for the copy to host memory; writing, meeting and committing happen in a background thread.

    loop thread          snapshot of this host's tensors, straight into the bytes of its part
    background thread    write the part
                         meet "checkpoint 40", where everyone tells the name, size and crc32c of its part
                         host 0: write the manifest, delete what the policy gives up

At most one save is under way: the next one waits for it (back-pressure), so host memory holds one copy of this host's share and no more. An error in the
background is raised by the next `check`, `save` or `wait`; it is never only logged. What can fail half-way is told in `manifest.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c

from training import storage
from training.checkpoint import manifest as form
from training.checkpoint.manifest import Manifest, Part, TensorInfo
from training.checkpoint.policy import Keep
from training.cluster import Cluster
from training.errors import TrainError
from training.rendezvous import Rendezvous

# Copies the named tensors into the given places, as their raw little-endian bytes.
Copy = Callable[[Mapping[str, memoryview]], None]


@dataclass(frozen=True)
class Description:
    """What every manifest of this process group says."""

    identity: Mapping[str, Any]
    config: Mapping[str, Any]
    code: str
    token: str  # of this process group, agreed at the start


class Saver:
    """Saves checkpoints of one run, one at a time, and keeps what the policy says."""

    def __init__(
        self, folder: str, cluster: Cluster, rendezvous: Rendezvous, description: Description, keep: Keep, *, background: bool = True
    ) -> None:
        self.folder = folder
        self.blocked_seconds = 0.0
        self.committed: int | None = None  # the newest committed step, known on every host once `wait` has returned
        self.newest: int | None = None  # the newest step that was restored or whose save has begun
        self._cluster, self._rendezvous, self._description, self._keep = cluster, rendezvous, description, keep
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: frozenset[int] = frozenset()

    def restored(self, step: int, damaged: Iterable[int]) -> None:
        """Where this attempt goes on from, and the newer checkpoints that did not verify: their folders may be written again."""
        self.committed = self.newest = step
        self._damaged = frozenset(damaged)

    def save(self, step: int, layout: Mapping[str, TensorInfo], copy: Copy, state: Mapping[str, Any]) -> None:
        """Takes a snapshot at `step` and commits it in the background. Every host must call it at the same step."""
        self.wait()
        self.newest = step
        began = time.monotonic()
        names = form.assign(layout, self._cluster.hosts)[self._cluster.worker]
        data, places = form.encode([(name, layout[name]) for name in names])
        copy(places)
        for place in places.values():
            place.release()
        self.blocked_seconds += time.monotonic() - began
        manifest = Manifest(
            step=step, parts=(), identity=self._description.identity, state=dict(state), config=self._description.config, code=self._description.code,
            tensors=len(layout), run_id=self._cluster.run_id, attempt=self._cluster.attempt, hosts=self._cluster.hosts,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, args=(manifest, data), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        if not self._background:
            self.wait()

    def check(self) -> None:
        """Raises what went wrong in the background."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until the save under way is committed. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, manifest: Manifest, data: bytearray) -> None:
        try:
            self._commit(manifest, data)
            self.committed = manifest.step
        except BaseException as error:
            self._error = error
        finally:
            self._rendezvous.aside("")

    def _commit(self, manifest: Manifest, data: bytearray) -> None:
        step, cluster = manifest.step, self._cluster
        folder = storage.join(self.folder, form.step_folder(step))
        self._rendezvous.aside(f"saving {step}: writing its part")
        content = bytes(data)
        data.clear()  # one copy of this host's share, not two
        part = Part(form.part_name(cluster.worker, cluster.hosts, self._description.token), len(content), google_crc32c.value(content))
        self._write_part(storage.join(folder, part.name), content, part)
        self._rendezvous.aside(f"saving {step}: waiting for all parts")
        told = self._rendezvous.meet(f"checkpoint {step}", {"name": part.name, "size": part.size, "crc32c": part.crc32c})
        if not cluster.is_first:
            return
        self._rendezvous.aside(f"saving {step}: committing")
        if step in self._damaged:
            storage.delete(storage.join(folder, form.MANIFEST))
        committed = replace(manifest, parts=tuple(Part(**each) for each in told))
        try:
            storage.write(storage.join(folder, form.MANIFEST), form.dump(committed), create_only=True)
        except storage.AlreadyExists:
            raise TrainError(
                f"{folder} has been committed by someone else; two trainers write the run {cluster.run_id!r}. Give one of them another run id or output"
            ) from None
        self._damaged -= {step}
        self._delete_old(step)

    def _write_part(self, url: str, content: bytes, part: Part) -> None:
        written = storage.write(url, content)
        if (written.size, written.crc32c) != (part.size, part.crc32c):
            raise TrainError(
                f"{url} was stored with size {written.size} and crc32c {written.crc32c:08x}, but {part.size} and {part.crc32c:08x} were sent"
            )

    def _delete_old(self, newest: int) -> None:
        """Deletes what the policy gives up, and parts that no commit will ever name. Never anything as new as `newest`."""
        contents = folders(self.folder)
        committed = [step for step, names in contents.items() if form.MANIFEST in names and step <= newest and step not in self._damaged]
        abandoned = [step for step, names in contents.items() if step < newest and (form.MANIFEST not in names or step in self._damaged)]
        for step in (*self._keep.deletable(committed), *abandoned):
            delete(self.folder, step, contents[step])


def folders(folder: str) -> dict[int, set[str]]:
    """The step folders below a run's checkpoint folder, committed or not, and the names in each."""
    found: dict[int, set[str]] = {}
    for each in storage.listing(folder):
        *_, parent, name = each.url.split("/")
        step = form.step_of(parent)
        if step is not None:
            found.setdefault(step, set()).add(name)
    return found


def delete(folder: str, step: int, names: Iterable[str]) -> None:
    """Removes a checkpoint: first its manifest, so that what is left at any moment is either whole or no checkpoint."""
    names = set(names)
    for name in (*(names & {form.MANIFEST}), *sorted(names - {form.MANIFEST})):
        storage.delete(storage.join(folder, form.step_folder(step), name))
