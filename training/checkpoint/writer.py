"""Saving: the step loop waits for the copy to host memory at the most; writing, meeting and committing happen in a
background thread.

    loop thread          begins the copy of this host's tensors, straight into the bytes of its part, in memory that is
    kept from save to save;
                         goes on, and waits for the end of the copy where it would change what is copied (`copying.py`)
    background thread    wait for the copy, write the part
                         meet "checkpoint 40", where everyone tells the name, size and crc32c of its part
                         host 0: write the manifest, delete what the policy gives up

At most one save is under way: the next one waits for it (back-pressure), so host memory holds one copy of this host's
share and no more; it is written from where it was copied to. An error in the background is raised by the next `check`,
`save` or `wait`; it is never only logged. What can fail half-way is told in `manifest.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from training import storage
from training.checkpoint import format as form
from training.checkpoint import host_memory as memory
from training.checkpoint.format import Manifest, Part, TensorSpec
from training.checkpoint.retention import Keep
from training.checkpoint.snapshot import Snapshot, StartSnapshot
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import TrainError

_LATE = 0.5  # seconds that a save may wait for the one before without a word


@dataclass(frozen=True)
class RunDescription:
    """What every manifest of this process group says."""

    identity: Mapping[str, Any]
    config: Mapping[str, Any]
    code: str
    token: str  # of this process group, agreed at the start


class _PartMemory:
    """A part's bytes, with a place for each of its tensors."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.tensors = dict(tensors)
        self.data, self.places = form.encode(list(tensors.items()), allocate=memory.mapping)

    def fault_in(self) -> None:
        memory.fault_in(self.data)


class CheckpointWriter:
    """Saves checkpoints of one run, one at a time, and keeps what the policy says."""

    def __init__(
        self,
        folder: str,
        cluster: Cluster,
        rendezvous: Rendezvous,
        description: RunDescription,
        keep: Keep,
        *,
        background: bool = True,
        fence: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`fence` raises when this process group may commit no more."""
        self.folder = folder
        self.blocked_seconds = 0.0  # that the loop has waited, but for what the save under way will still cost it
        self.committed: int | None = None  # the newest committed step, known on every host once `wait` has returned
        self.newest: int | None = None  # the newest step that was restored or whose save has begun
        self._cluster, self._rendezvous, self._description, self._keep = cluster, rendezvous, description, keep
        self._background, self._fence, self._warn = background, fence, warn
        self._deletes = True  # until it was told that it may not
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: frozenset[int] = frozenset()
        self._part: _PartMemory | None = None
        self._preparing: threading.Thread | None = None
        self._copying: Snapshot | None = None
        self._late = 0  # saves in a row that had to wait for the one before

    def prepare(self, layout: Mapping[str, TensorSpec]) -> None:
        """Makes the memory for snapshots in the background, so that the first save finds it."""
        self._part = _PartMemory(self._share(layout))
        self._preparing = threading.Thread(target=self._part.fault_in, name="checkpoint-memory", daemon=True)
        self._preparing.start()

    def _share(self, layout: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors that this host writes."""
        return {name: layout[name] for name in form.assign(layout, self._cluster.hosts)[self._cluster.worker]}

    def restored(self, step: int, damaged: Iterable[int]) -> None:
        """Where this attempt goes on from, and the newer checkpoints that did not verify: their folders may be written
        again."""
        self.committed = self.newest = step
        self._damaged = frozenset(damaged)

    def save(self, step: int, layout: Mapping[str, TensorSpec], copy: StartSnapshot, state: Mapping[str, Any]) -> None:
        """Takes a snapshot at `step` and commits it in the background. Every host must call it at the same step."""
        began = time.monotonic()
        self.wait()
        self._late = self._late + 1 if time.monotonic() - began > _LATE else 0
        if self._late == 2 and self._cluster.is_first:
            self._warn(
                f"saves take longer than the time between them: training waited {time.monotonic() - began:.1f} s for the one of step {self.newest} before that "
                f"of step {step} could begin; save less often (checkpoint.every_steps, checkpoint.every_minutes)"
            )
        self.newest = step
        if self._preparing:
            self._preparing.join()
            self._preparing = None
        share = self._share(layout)
        if self._part is None or self._part.tensors != share:
            self._part = _PartMemory(share)
        self._copying = copy(self._part.places)
        self.blocked_seconds += time.monotonic() - began
        manifest = Manifest(
            step=step, parts=(), identity=self._description.identity, state=dict(state), config=self._description.config, code=self._description.code,
            tensors=len(layout), run_id=self._cluster.run_id, attempt=self._cluster.attempt, hosts=self._cluster.hosts,
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._run, args=(manifest, self._copying, self._part.data), name=f"checkpoint-{step}", daemon=True
        )
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
        if self._copying is not None:
            self.blocked_seconds += self._copying.blocked_seconds
            self._copying = None
        self.check()

    def _run(self, manifest: Manifest, copying: Snapshot, data: memoryview) -> None:
        try:
            self._rendezvous.set_background_phase(f"saving {manifest.step}: copying the state")
            copying.wait()
            self._commit(manifest, data)
            self.committed = manifest.step
        except BaseException as error:
            self._error = error
        finally:
            self._rendezvous.set_background_phase("")

    def _commit(self, manifest: Manifest, data: memoryview) -> None:
        step, cluster = manifest.step, self._cluster
        folder = storage.join(self.folder, form.step_folder(step))
        self._rendezvous.set_background_phase(f"saving {step}: writing its part")
        part = self._write_part(folder, form.part_name(cluster.worker, cluster.hosts, self._description.token), data)
        self._rendezvous.set_background_phase(f"saving {step}: waiting for all parts")
        told = self._rendezvous.meet(
            f"checkpoint {step}", {"name": part.name, "size": part.size, "crc32c": part.crc32c}
        )
        if not cluster.is_first:
            return
        self._rendezvous.set_background_phase(f"saving {step}: committing")
        self._fence()
        if step in self._damaged:
            storage.delete(storage.join(folder, form.MANIFEST))
        committed = replace(manifest, parts=tuple(Part(**each) for each in told))
        try:
            storage.write(storage.join(folder, form.MANIFEST), form.dump(committed), create_only=True)
        except storage.AlreadyExists:
            raise TrainError(
                f"{folder} has been committed by someone else; two trainers write the run {cluster.run_id!r}. Give one of them another run id or output"
            ) from None
        try:
            self._fence()
        except TrainError:
            # It slept through the last lines, perhaps so long that the attempt after it has taken these parts for
            # abandoned ones.
            if {part.name for part in committed.parts} - folders(self.folder).get(step, set()):
                storage.delete(storage.join(folder, form.MANIFEST))
            raise
        self._damaged -= {step}
        self._delete_old(step, best_step(manifest))

    def _write_part(self, folder: str, name: str, data: memoryview) -> Part:
        url = storage.join(folder, name)
        written = storage.write(url, data)
        # What was written to a disk is summed on its way there. A bucket tells its own sum, which must be ours.
        sent = storage.crc32c(data) if storage.is_remote(url) else written.crc32c
        if (written.size, written.crc32c) != (len(data), sent):
            raise TrainError(
                f"{url} was stored with size {written.size} and crc32c {written.crc32c:08x}, but {len(data)} and {sent:08x} were sent"
            )
        return Part(name, written.size, sent)

    def _delete_old(self, newest: int, best: int | None) -> None:
        """Deletes what the policy gives up, and parts that no commit will ever name. Never anything as new as
        `newest`."""
        contents = folders(self.folder)
        committed = [
            step
            for step, names in contents.items()
            if form.MANIFEST in names and step <= newest and step not in self._damaged
        ]
        abandoned = [
            step
            for step, names in contents.items()
            if step < newest and (form.MANIFEST not in names or step in self._damaged)
        ]
        gone = (*self._keep.deletable(committed, () if best is None else (best,)), *abandoned)
        try:
            for step in gone:
                delete(self.folder, step, contents[step])
            storage.sweep(self.folder, lambda name: (form.step_of(name) or newest) < newest)
            self._deletes = True
        except storage.StorageError as error:
            # What is committed is committed. The next save tries again.
            if self._deletes:
                self._warn(f"old checkpoints stay where they are: {error}")
            self._deletes = False


def best_step(manifest: Manifest) -> int | None:
    """The step with the best figure when this checkpoint was saved, where checkpoint.best asks for it."""
    best = manifest.state.get("best")
    return None if best is None else int(best["step"])


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
