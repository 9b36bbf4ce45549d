"""Restoring: finds the newest checkpoint that verifies on every host, and explains each one that does not.

All hosts try the same checkpoint, the next in host 0's list, and meet afterwards: one host that finds it damaged twice
sends all of them to the one before. A checkpoint of another model or other data is not damaged but refused: continuing
from it would be a mistake, not a recovery.

Reading is planned from the manifest alone, which implies the headers of the parts: the slices that the host needs are
read once, in ranges, and copied into its tensors once their checksums are right. A tensor that is one slice is passed
on without a copy; a tensor of several is assembled first, and kept in memory until its last slice has been read.

Failure model: parts may be missing, short or flipped at any byte (raised as Damaged, so the next checkpoint is tried),
and another start of the run may commit or delete checkpoints meanwhile (`_candidates` lists again).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from training import storage as default_storage
from training.checkpoint import format as form
from training.checkpoint.format import Manifest, Part, PartSlice, committed_steps, read_manifest
from training.checkpoint.snapshot import find_nonfinite
from training.checkpoint.tensors import Damaged, NotFinite, Slice, TensorSpec, copy_into, load_whole, plan_file
from training.errors import BadInput
from training.machine import SYSTEM, Future, Threads
from training.storage import NotFound, Storage, crc32c, is_remote, join, transfer_seconds

if TYPE_CHECKING:
    from training.distributed.rendezvous import Rendezvous

_RANGE = 16 << 20  # bytes that one request reads, at least
_READERS, _READERS_REMOTE = 2, 6  # one connection to a bucket gives a fraction of a host's bandwidth

_TO_AVOID = "the first step after it was not finite in an earlier attempt"

# Loads some tensors: name -> (specification, raw bytes). Must copy the bytes: a view keeps all that was read at once.
LoadState = Callable[[Mapping[str, tuple[TensorSpec, memoryview]]], None]
# (name, specification) of a tensor in the checkpoint -> what of it to load; None: nothing.
Choose = Callable[[str, TensorSpec], Slice | None]


@dataclass(frozen=True)
class Restored:
    """The checkpoint to continue from. `damaged`: newer committed steps that did not verify, or were avoided."""

    manifest: Manifest
    damaged: tuple[int, ...]


def restore(
    folder: str,
    rendezvous: Rendezvous,
    identity: Mapping[str, Any],
    load_state: LoadState,
    warn: Callable[[str], None],
    storage: Storage = default_storage,
    threads: Threads = SYSTEM.threads,
    avoid: Collection[str] = (),
    meeting_seconds: float = 300.0,
    choose: Choose = load_whole,
) -> Restored | None:
    """Loads the newest checkpoint in `folder` (a run's checkpoint folder) that all hosts verify, and returns it; None
    if there is none at all. Every host must call it. Raises BadInput when a checkpoint belongs to something else, or
    none verifies: starting over silently would throw the run away; LostPeer when a host is lost, or reads too long;
    StopRequested; StorageError.

    Args:
        identity: what the checkpoint must have been made from.
        load_state: receives the tensors, some at a time; after a damaged checkpoint, the next one overwrites them.
        warn: shows a message about each checkpoint that is damaged, not finite or avoided.
        avoid: `checkpoint_name`s of those whose next step was not finite: used only when no other one can be.
        meeting_seconds: for all hosts to meet after a read, in addition to the time that storage may take for it.
        choose: what this host loads of each tensor, as `Backend.slice_to_load`.
    """

    def load(step: int, name: str, avoid: Collection[str]) -> tuple[Manifest | None, list[str]]:
        """Loads a checkpoint, twice if it seems damaged, and meets the other hosts as `name`. Returns its manifest
        (None: unreadable), and why each host can't use it ("": it can)."""
        rendezvous.set_phase(f"restoring {step}")
        manifest, why = None, ""
        for _ in range(2):  # once more: the read may have been wrong, and not the checkpoint
            try:
                manifest, why = read_manifest(folder, step, storage), ""
                require_identity(folder, manifest, identity)
                if checkpoint_name(manifest) in avoid:
                    raise Damaged(_TO_AVOID)
                load_tensors(folder, manifest, require_finite(load_state), storage, threads, choose)
                break
            except Damaged as error:
                why = str(error)
        # The first host to arrive sets the time for all: without the manifest, too, for what the others read.
        sizes = manifest.parts if manifest else storage.listing(join(folder, form.step_folder(step)))
        size = sum(each.size for each in sizes)
        return manifest, rendezvous.meet(name, why, meeting_seconds + 2 * transfer_seconds(folder, size))

    damaged: list[int] = []
    avoided: list[int] = []  # good ones among them
    for step in _candidates(folder, rendezvous, storage):
        manifest, errors = load(step, f"restore {step}", avoid)
        if manifest is not None and not any(errors):
            return Restored(manifest, tuple(damaged))
        damaged.append(step)
        avoided += [step] if set(errors) == {_TO_AVOID} else []
        worker, why = next((worker, error) for worker, error in enumerate(errors) if error)
        why = f"host {worker}: {why}" if len(errors) > 1 else why
        warn(f"checkpoint {join(folder, form.step_folder(step))} can't be used ({why}); trying the one before")
    for step in avoided:  # without an older checkpoint: the next step may be finite this time
        manifest, errors = load(step, f"restore {step} after all", ())
        if manifest is not None and not any(errors):
            warn(f"there is no checkpoint before step {step} that can be used, so the run goes on from it after all")
            return Restored(manifest, tuple(newer for newer in damaged if newer > step))
    if damaged:
        raise BadInput(
            f"{folder}: none of the checkpoints of steps {', '.join(map(str, damaged))} can be used; to start over, "
            "use another run id or output"
        )
    return None


def _candidates(folder: str, rendezvous: Rendezvous, storage: Storage) -> Iterator[int]:
    """Yields the committed steps that host 0 lists, newest first. Lists again when none of them could be used: another
    start of the run may have committed newer ones meanwhile, and deleted these. Raises StorageError, LostPeer,
    StopRequested."""
    tried: set[int] = set()
    while True:
        name = f"checkpoints beside {len(tried)}" if tried else "checkpoints"
        steps = rendezvous.meet(name, committed_steps(folder, storage))[0]
        untried = [step for step in steps if step not in tried]
        if not untried:
            return
        tried.update(untried)
        yield from untried


def verify(folder: str, step: int, storage: Storage = default_storage) -> Manifest:
    """Reads and checks every byte of a checkpoint. Raises Damaged, also when its state is not finite; StorageError."""
    manifest = read_manifest(folder, step, storage)
    load_tensors(folder, manifest, require_finite(lambda tensors: None), storage)
    return manifest


def checkpoint_name(manifest: Manifest) -> str:
    """Returns a name that is unique in the run, even among commits of the same step by different attempts."""
    return f"{manifest.step}/{manifest.parts[0].name}"


def require_finite(load_state: LoadState) -> LoadState:
    """Returns a function that raises NotFinite for tensors with a NaN or an infinity, and else calls `load_state`."""

    def load(tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Checks all tensors before it passes any on."""
        if name := find_nonfinite(tensors):
            raise NotFinite(f"tensor {name} has a NaN or an infinity")
        load_state(tensors)

    return load


def load_tensors(
    folder: str,
    manifest: Manifest,
    load_state: LoadState,
    storage: Storage = default_storage,
    threads: Threads = SYSTEM.threads,
    choose: Choose = load_whole,
) -> None:
    """Passes the slice of each tensor of a checkpoint that `choose` returns (None: skips the tensor) to `load_state`,
    some at a time. Raises Damaged when what it read is not what was committed, StorageError when it can't be read; the
    caller must then discard the tensors loaded so far."""
    urls = [_part_url(folder, manifest.step, part, storage) for part in manifest.parts]
    plans = form.slices_by_part(manifest.tensors, len(manifest.parts))
    specs = {name: tensor.spec for name, tensor in manifest.tensors.items()}
    wanted = {name: box for name, spec in specs.items() if (box := choose(name, spec)) is not None}
    assembly = _TensorAssembler(load_state, specs, wanted)
    for url, part, plan in zip(urls, manifest.parts, plans, strict=True):
        try:
            _load_part(url, part, plan, assembly, storage, threads)
        except Damaged as error:
            raise (error if part.name in str(error) else type(error)(f"part {part.name}: {error}")) from None


def read_part(folder: str, step: int, part: Part, storage: Storage = default_storage) -> memoryview:
    """Reads a whole part into memory. Raises Damaged if it is missing, of another size, or has another checksum;
    StorageError."""
    data = memoryview(bytearray(part.size))
    ranges = [(start, min(start + _RANGE, part.size)) for start in range(0, max(part.size, 1), _RANGE)]
    checksum = 0
    for start, chunk in _read_ranges(_part_url(folder, step, part, storage), part, ranges, storage, SYSTEM.threads):
        checksum = crc32c(chunk, checksum)
        data[start : start + len(chunk)] = chunk
    if checksum != part.crc32c:
        raise Damaged(f"part {part.name} has crc32c {checksum:08x} instead of {part.crc32c:08x}")
    return data


class _TensorAssembler:
    """Passes the wanted slice of each tensor to `load_state` once the stored slices that it overlaps have arrived."""

    def __init__(self, load_state: LoadState, specs: Mapping[str, TensorSpec], wanted: Mapping[str, Slice]) -> None:
        self._load_state, self._specs, self._wanted = load_state, specs, wanted
        self._partial: dict[str, tuple[memoryview, int]] = {}  # name -> (bytes, elements that are missing)

    def needs(self, entry: PartSlice) -> bool:
        """Returns whether a stored slice has wanted elements, or is of a wanted tensor without elements."""
        box = self._wanted.get(entry.name)
        return box is not None and (not box.elements or entry.stored.box.overlaps(box))

    def add(self, entries: Iterable[tuple[PartSlice, memoryview]]) -> None:
        """Passes `load_state` what the slices complete, and keeps a copy of the wanted elements of the others."""
        complete: dict[str, tuple[TensorSpec, memoryview]] = {}
        for entry, data in entries:
            box = self._wanted[entry.name]
            spec = self._specs[entry.name].cut(box)
            if entry.stored.box != box:
                if entry.name not in self._partial:
                    self._partial[entry.name] = memoryview(bytearray(spec.size)), box.elements
                buffer, missing = self._partial.pop(entry.name)
                missing -= copy_into(buffer, box, data, entry.stored.box)
                if missing:
                    self._partial[entry.name] = buffer, missing
                    continue
                data = buffer
            complete[entry.name] = (spec, data)
        self._load_state(complete)


def _load_part(
    url: str, part: Part, plan: Sequence[PartSlice], assembly: _TensorAssembler, storage: Storage, threads: Threads
) -> None:
    """Reads the slices of a part that `assembly` needs, and if there are any or the part is empty, its header: once, in
    ranges that end between tensors. Verifies each, and adds the slices. Raises Damaged, StorageError."""
    head, places, size = plan_file([(entry.key, entry.spec) for entry in plan])
    if size != part.size or len(places) != len(plan):
        raise Damaged(f"part {part.name} has {part.size} bytes, but the tensors that the manifest lists in it {size}")
    waiting = deque((entry, places[entry.key]) for entry in plan if assembly.needs(entry))
    if plan and not waiting:
        return
    ranges = [(0, len(head))]
    for _, place in waiting:
        start, end = ranges[-1]
        if end == place.start and place.start - start < _RANGE:
            ranges[-1] = start, place.stop
        else:
            ranges.append((place.start, place.stop))
    for start, chunk in _read_ranges(url, part, ranges, storage, threads):
        if not start and chunk[: len(head)] != head:
            raise Damaged(f"part {part.name} has another header than the manifest implies")
        entries: list[tuple[PartSlice, memoryview]] = []
        while waiting and waiting[0][1].stop <= start + len(chunk):
            entry, place = waiting.popleft()
            data = chunk[place.start - start : place.stop - start]
            if crc32c(data) != entry.stored.crc32c:
                raise Damaged(f"part {part.name}: the slice {entry.stored.box} of {entry.name} has a wrong crc32c")
            entries.append((entry, data))
        assembly.add(entries)


def _part_url(folder: str, step: int, part: Part, storage: Storage) -> str:
    """Returns the URL of a part. Raises Damaged unless its size is what was committed; StorageError."""
    url = join(folder, form.step_folder(step), part.name)
    status = storage.stat(url)
    if status is None:
        raise Damaged(f"part {part.name} is missing")
    if status.size != part.size:
        raise Damaged(f"part {part.name} has {status.size} bytes instead of {part.size}")
    return url


def _read_ranges(
    url: str, part: Part, ranges: Sequence[tuple[int, int]], storage: Storage, threads: Threads
) -> Iterator[tuple[int, memoryview]]:
    """Yields (start, bytes) of a part's ranges, (start, end), while threads read ahead. Raises Damaged for a missing
    or short part; StorageError."""
    waiting = iter(ranges)

    def begin(start: int, end: int) -> Future[bytes]:
        return threads.submit(lambda: storage.read(url, start, end))

    readings = deque(begin(*each) for each in islice(waiting, _READERS_REMOTE if is_remote(url) else _READERS))
    try:
        for start, end in ranges:
            data = readings.popleft().result()
            if len(data) != end - start:
                raise Damaged(f"part {part.name} ends within its bytes {start} to {end}")
            readings += [begin(*each) for each in islice(waiting, 1)]
            yield start, memoryview(data)
    except NotFound:
        raise Damaged(f"part {part.name} is missing") from None


def require_identity(folder: str, manifest: Manifest, identity: Mapping[str, Any]) -> None:
    """Raises BadInput, with a line for each difference, when a checkpoint was made from something else (model, data,
    seed, ...) than `identity`. `folder`: for the message."""
    saved = manifest.identity
    differences = [
        f"\n  {key}: the checkpoint has {saved.get(key)!r}, this run {identity.get(key)!r}"
        for key in sorted({*saved, *identity})
        if saved.get(key) != identity.get(key) and (key, saved.get(key)) != ("tokenizer", "")  # "": of earlier versions
    ]
    if differences:
        raise BadInput(
            f"{join(folder, form.step_folder(manifest.step))} is a checkpoint of something else; use another run id or "
            f"output, or undo the change:{''.join(differences)}"
        )
