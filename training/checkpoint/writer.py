"""Saving: the step loop waits for the copy to host memory at most; a background thread writes, meets and commits.

    loop thread          starts the copy of this host's tensors, straight into the bytes of its part, in memory that is
                         reused from save to save; waits for the end of the copy before it changes the state
    background thread    waits for the copy, checks that it is finite, writes the part
                         meets "checkpoint 40", where every host reports the name, size and crc32c of its part, or the
                         tensor that is not finite: then nothing is committed
                         host 0: writes the manifest, deletes what the retention policy does not keep

At most one save is in progress: the next one waits for it (back-pressure), so host memory holds one copy of this host's
share and no more, and the part is written from that copy. The next `check`, `save` or `wait` raises an error of the
background thread; errors are never only logged. `format.py` has the failure model.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from training import storage as default_storage
from training.checkpoint import format as form
from training.checkpoint.config import CheckpointSection
from training.checkpoint.format import Manifest, Part, delete_checkpoint, list_folders, read_manifest
from training.checkpoint.snapshot import Snapshot, StartSnapshot, allocate, fault_in, find_nonfinite
from training.checkpoint.tensors import NOT_SPLIT, Damaged, StateSlices, TensorSpec, encode
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput, NonFinite, TrainError
from training.machine import SYSTEM, Machine, Thread
from training.storage import AlreadyExists, Storage, StorageError, crc32c, is_remote, join, transfer_seconds

_LATE = 0.5  # seconds that a save may wait for the one before without a warning
# Consecutive storage requests of host 0 during a commit: fence, manifest, fence, listing for retention.
_COMMIT_REQUESTS = 4


@dataclass(frozen=True)
class RunDescription:
    """Values that are the same in every manifest of this process group."""

    identity: Mapping[str, Any]
    config: Mapping[str, Any]
    code: str
    token: str  # of this process group, agreed at the start


class _PartBuffer:
    """The manifest's tensors, and memory for this host's part with a view of each slice; reused by every save."""

    def __init__(self, specs: Mapping[str, TensorSpec], split: StateSlices, cluster: Cluster) -> None:
        """Assigns the slices to hosts, and allocates the memory of this host's part."""
        self.layout = dict(specs), dict(split)
        self.tensors = form.assign_slices(specs, split, cluster.hosts)
        parts = form.slices_by_part(self.tensors, cluster.hosts)
        self.largest_part = max(sum(entry.spec.size for entry in part) for part in parts)  # bytes
        self._specs = {entry.key: entry.spec for entry in parts[cluster.worker]}
        self.data, self.views = encode(list(self._specs.items()), allocate=allocate)

    def checksums(self) -> list[int]:
        """Returns the CRC-32C of each slice of this host's part, in the order of the part's file."""
        return [crc32c(view) for view in self.views.values()]

    def find_nonfinite(self) -> str | None:
        """Returns the name of a tensor of this host's part that is not finite; None when all are."""
        return find_nonfinite({name: (self._specs[name], view) for name, view in self.views.items()})


class CheckpointWriter:
    """Saves checkpoints of one run, one at a time, and deletes old ones by the retention policy."""

    def __init__(
        self,
        folder: str,
        cluster: Cluster,
        rendezvous: Rendezvous,
        description: RunDescription,
        settings: CheckpointSection,
        *,
        fence: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda message: None,
        meeting_seconds: float = 300.0,
        storage: Storage = default_storage,
        machine: Machine = SYSTEM,
    ) -> None:
        """Creates a writer for the checkpoint folder `folder`.

        Args:
            settings: say which checkpoints are kept, and whether `save` returns before the checkpoint is committed.
            fence: raises when this process group may not commit any more.
            meeting_seconds: for all hosts to meet after a write, in addition to the time that storage may take for it.
        """
        self.folder = folder
        self.blocked_seconds = 0.0  # that the loop has waited for saves, except for the save in progress
        self.committed: int | None = None  # the newest committed step, known on every host once `wait` has returned
        self.newest: int | None = None  # the newest step that was restored or whose save has begun
        # Called by the background thread of every host when the state of a save is not finite, before `check` raises:
        # the main thread may be in a step that the other hosts have left.
        self.on_nonfinite: Callable[[NonFinite], None] = lambda error: None
        # Called by the background thread of host 0 before each commit: stores what an attempt that resumes there needs.
        self.before_commit: Callable[[], None] = lambda: None
        self._cluster, self._rendezvous, self._description, self._settings = cluster, rendezvous, description, settings
        self._fence, self._warn = fence, warn
        self._meeting_seconds = meeting_seconds
        self._storage, self._machine, self._clock = storage, machine, machine.clock.monotonic
        self._warn_of_deletes = True  # False after a warning, until a deletion succeeds
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._damaged: frozenset[int] = frozenset()
        self._buffer: _PartBuffer | None = None
        self._preparing: Thread | None = None
        self._snapshot: Snapshot | None = None
        self._late = 0  # saves in a row that had to wait for the one before

    def prepare(self, specs: Mapping[str, TensorSpec], split: StateSlices = NOT_SPLIT) -> None:
        """Allocates the memory for snapshots before the first `save` does, and its pages in a thread of its own."""
        self._buffer = _PartBuffer(specs, split, self._cluster)
        self._preparing = self._machine.threads.start(fault_in, self._buffer.data, name="checkpoint-memory")

    def continue_from(self, step: int, damaged: Iterable[int]) -> None:
        """Records the step to continue from, and newer ones that did not verify, whose manifests a save may replace."""
        self.committed = self.newest = step
        self._damaged = frozenset(damaged)

    def save(
        self, step: int, specs: Mapping[str, TensorSpec], start_snapshot: StartSnapshot, state: Mapping[str, Any],
        split: StateSlices = NOT_SPLIT,
    ) -> None:  # fmt: skip
        """Waits for the save before and raises its errors; then starts a snapshot of the tensors `specs` and a thread
        that commits it with the small values `state` (without `background`, waits for it too). Host 0 warns at the
        second save in a row that waited over 0.5 s. Every host must call it at the same step."""
        began = self._clock()
        self.wait()
        waited = self._clock() - began
        self._late = self._late + 1 if waited > _LATE else 0
        if self._late == 2 and self._cluster.is_first:
            self._warn(
                f"saves take longer than the time between them: training waited {waited:.1f} s for the one of step "
                f"{self.newest} before that of step {step} could begin; save less often (checkpoint.every_steps, "
                "checkpoint.every_minutes)"
            )
        self.newest = step
        if self._preparing:
            self._preparing.join()
            self._preparing = None
        if self._buffer is None or self._buffer.layout != (specs, split):
            self._buffer = _PartBuffer(specs, split, self._cluster)
        self._snapshot = start_snapshot(self._buffer.views)
        self.blocked_seconds += self._clock() - began
        manifest = Manifest(
            step=step,
            parts=(),
            identity=self._description.identity,
            state=dict(state),
            config=self._description.config,
            code=self._description.code,
            tensors=self._buffer.tensors,
            run_id=self._cluster.run_id,
            attempt=self._cluster.attempt,
            hosts=self._cluster.hosts,
        )
        self._thread = self._machine.threads.start(
            self._run, manifest, self._snapshot, self._buffer, name=f"checkpoint-{step}"
        )
        if not self._settings.background:
            self.wait()

    def check(self) -> None:
        """Raises the error of the background thread, if it has failed, once. Does not wait for it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Waits, without limit, for the save in progress, if any: on host 0 until it is committed, on others until all
        parts are written. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._snapshot is not None:
            self.blocked_seconds += self._snapshot.blocked_seconds
            self._snapshot = None
        self.check()

    @property
    def meeting_seconds(self) -> float:
        """Returns the seconds for all hosts to meet after a save, with the slowest commit that storage allows."""
        return self._meeting_seconds + _COMMIT_REQUESTS * transfer_seconds(self.folder, 0)

    def release(self) -> None:
        """Waits for the last save, whose error it raises, and frees the memory of snapshots, before the export."""
        self.wait()
        self._buffer = None

    def _run(self, manifest: Manifest, snapshot: Snapshot, buffer: _PartBuffer) -> None:
        """Waits for the copy and commits, in a thread; then sets `committed`, on other hosts than 0 once all parts are
        written. Keeps any error for `check`, and first calls `on_nonfinite` with a NonFinite."""
        try:
            self._rendezvous.set_background_phase(f"saving {manifest.step}: copying the state")
            snapshot.wait()
            self._commit(manifest, buffer)
            self.committed = manifest.step
        except NonFinite as error:
            self.on_nonfinite(error)
            self._error = error
        except BaseException as error:
            self._error = error
        finally:
            self._rendezvous.set_background_phase("")

    def _commit(self, manifest: Manifest, buffer: _PartBuffer) -> None:
        """Writes this host's part, and meets; host 0 then writes the manifest and deletes old checkpoints. Raises
        NonFinite on all hosts when the part of any host is not finite, and other TrainErrors."""
        step, cluster = manifest.step, self._cluster
        folder = join(self.folder, form.step_folder(step))
        report: dict[str, Any] = {"nonfinite": buffer.find_nonfinite()}
        if not report["nonfinite"]:
            self._rendezvous.set_background_phase(f"saving {step}: writing its part")
            name = form.part_name(cluster.worker, cluster.hosts, self._description.token)
            part = self._write_part(folder, name, buffer.data)
            report = {"name": part.name, "size": part.size, "crc32c": part.crc32c, "slices": buffer.checksums()}
        self._rendezvous.set_background_phase(f"saving {step}: waiting for all parts")
        # The first host to arrive waits as long as the slowest host may take to write, and host 0 to commit before.
        seconds = self.meeting_seconds + transfer_seconds(self.folder, buffer.largest_part)
        reports = self._rendezvous.meet(f"checkpoint {step}", report, seconds)
        for worker, report in enumerate(reports):
            if tensor := report.get("nonfinite"):
                raise NonFinite(
                    step - 1,
                    f"the state after {step} steps is not finite (host {worker}: tensor {tensor} has a NaN or an "
                    "infinity), so it was not saved",
                )
        if cluster.is_first:
            self._rendezvous.set_background_phase(f"saving {step}: committing")
            tensors = form.add_checksums(manifest.tensors, [report.pop("slices") for report in reports])
            committed = replace(manifest, parts=tuple(Part(**report) for report in reports), tensors=tensors)
            self.before_commit()
            self._write_manifest(folder, committed)
            self._damaged -= {step}
            self._delete_old(committed)

    def _write_manifest(self, folder: str, manifest: Manifest) -> None:
        """Commits a checkpoint on host 0: calls the fence, which may raise BadInput, and creates the manifest in
        `folder`. Deletes a damaged one first. Keeps one that came meanwhile if it is this run's and whole, else
        replaces it. Raises StorageError."""
        self._fence()
        url = join(folder, form.MANIFEST)
        if manifest.step in self._damaged:
            self._storage.delete(url)
        try:
            self._storage.write(url, form.dump_manifest(manifest), create_only=True)
        except AlreadyExists:
            self._fence()
            self._keep_or_replace(url, manifest)

    def _keep_or_replace(self, url: str, manifest: Manifest) -> None:
        """Keeps the checkpoint that is already committed at this step if it is complete, because it is a state of this
        run too; otherwise replaces its manifest. It is of this process, whose answer was lost, or of a suspended host
        of an older attempt that resumed between fence and write. Only the newest start calls this. Raises
        StorageError."""
        committed = self._read_committed(manifest.step)
        if committed and committed.identity == manifest.identity and self._has_parts(committed):
            if committed.parts != manifest.parts:
                self._warn(f"step {manifest.step} was committed by attempt {committed.attempt} meanwhile: that is kept")
            return
        self._storage.delete(url)
        self._storage.write(url, form.dump_manifest(manifest), create_only=True)

    def _read_committed(self, step: int) -> Manifest | None:
        """Returns the manifest of a step; None if it is missing or damaged. Raises StorageError."""
        try:
            return read_manifest(self.folder, step, self._storage)
        except Damaged:
            return None

    def _has_parts(self, manifest: Manifest) -> bool:
        """Returns whether storage has every part of a checkpoint, whatever is in it."""
        folder = join(self.folder, form.step_folder(manifest.step))
        return all(self._storage.stat(join(folder, part.name)) is not None for part in manifest.parts)

    def _write_part(self, folder: str, name: str, data: memoryview) -> Part:
        """Writes a part. Raises TrainError unless the stored size and checksum are those of `data`; StorageError."""
        url = join(folder, name)
        written = self._storage.write(url, data)
        # For a file, `write` computes the checksum on the way to the disk; a bucket computes its own.
        checksum = crc32c(data) if is_remote(url) else written.crc32c
        if (written.size, written.crc32c) != (len(data), checksum):
            raise TrainError(
                f"{url} was stored with size {written.size} and crc32c {written.crc32c:08x}, but {len(data)} and "
                f"{checksum:08x} were sent"
            )
        return Part(name, written.size, checksum)

    def _check_fence_again(self, manifest: Manifest) -> None:
        """Calls the fence after a commit. If it raises BadInput, deletes a manifest without its parts, if storage does
        not fail, and reraises."""
        try:
            self._fence()
        except BadInput:
            # This process may have been suspended so long that a newer attempt deleted its parts as abandoned.
            with contextlib.suppress(StorageError):
                committed = self._read_committed(manifest.step)
                if committed and committed.parts == manifest.parts and not self._has_parts(committed):
                    self._storage.delete(join(self.folder, form.step_folder(manifest.step), form.MANIFEST))
            raise

    def _delete_old(self, manifest: Manifest) -> None:
        """Deletes checkpoints that the policy does not keep, damaged ones, and parts that no commit will ever name,
        older than `manifest`. Raises before if the fence raises BadInput. A StorageError, the fence's too, is only a
        warning, once until it works again: the next save tries again."""
        newest = manifest.step
        try:
            self._check_fence_again(manifest)
            contents = list_folders(self.folder, self._storage)
            self._fence()  # the listing may have taken minutes
            whole = [step for step in contents if form.MANIFEST in contents[step] and step not in self._damaged]
            abandoned = [step for step in contents if step < newest and step not in whole]
            committed = [step for step in whole if step <= newest]
            for step in (*self._settings.deletable(committed, manifest.best_step), *abandoned):
                delete_checkpoint(self.folder, step, contents[step], self._storage)
            self._storage.remove_partial_files(self.folder, lambda name: form.step_of(name) in range(newest))
            self._warn_of_deletes = True
        except StorageError as error:
            if self._warn_of_deletes:
                self._warn(f"old checkpoints stay where they are: {error}")
            self._warn_of_deletes = False
