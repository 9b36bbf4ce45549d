"""Restoring: the newest checkpoint that verifies on every host, and a clear word about each one that did not.

All hosts try the same checkpoint, because host 0's list counts, and meet after trying: one host with a bad read sends
everybody to the one before. A checkpoint of another model or other data is not damaged but refused: going on from it
would be a mistake, not a recovery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from training import storage
from training.checkpoint import format as form
from training.checkpoint import host_memory as memory
from training.checkpoint.format import Damaged, Manifest, TensorSpec
from training.checkpoint.writer import folders
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput

_HEAD = 1 << 18  # bytes that the list of tensors hardly ever exceeds
_RANGE = 16 << 20  # bytes that one request reads, at least
_READERS, _READERS_REMOTE = 2, 6  # one connection to a bucket gives a fraction of what a host can take

# Takes some tensors: name -> (dtype and shape, raw bytes). The bytes are overwritten when it has returned, so it copies
# them.
Accept = Callable[[Mapping[str, tuple[TensorSpec, memoryview]]], None]


@dataclass(frozen=True)
class Restored:
    """Where to go on. `damaged` are newer committed steps that did not verify."""

    manifest: Manifest
    damaged: tuple[int, ...]


def committed_steps(folder: str) -> list[int]:
    """Steps with a manifest, newest first."""
    return sorted((step for step, names in folders(folder).items() if form.MANIFEST in names), reverse=True)


def read_manifest(folder: str, step: int) -> Manifest:
    """The manifest of a committed step. Raises Damaged."""
    try:
        manifest = form.load(storage.read(storage.join(folder, form.step_folder(step), form.MANIFEST)))
    except storage.NotFound:
        raise Damaged(f"{form.MANIFEST} is missing") from None
    if manifest.step != step:
        raise Damaged(f"{form.MANIFEST} is of step {manifest.step}")
    return manifest


def read_part(folder: str, step: int, part: form.Part) -> memoryview:
    """The verified bytes of a part. Raises Damaged."""
    data = memoryview(bytearray(part.size))
    for start, piece in _read(_whole(folder, step, part), part, list(range(0, part.size, _RANGE)) or [0]):
        data[start : start + len(piece)] = piece
    return data


def take_part(folder: str, step: int, part: form.Part, accept: Accept) -> int:
    """Gives the tensors of a part to `accept`, some at a time, and returns their number. What they are given is theirs
    until they return.

    Raises Damaged, which names the part; what was accepted until then is to be thrown away: the sum of the whole is
    known in the end."""
    try:
        return _take(folder, step, part, accept)
    except Damaged as error:
        raise (error if part.name in str(error) else Damaged(f"part {part.name}: {error}")) from None


def _take(folder: str, step: int, part: form.Part, accept: Accept) -> int:
    try:
        url = _whole(folder, step, part)
        head = storage.read(url, 0, _HEAD)
        if form.head_size(head) > len(head):
            head = storage.read(url, 0, min(form.head_size(head), part.size))
    except storage.NotFound:
        raise Damaged(f"part {part.name} is missing") from None
    places = form.places_in(head, part.size)
    ordered = sorted(places.items(), key=lambda each: each[1][1].start)
    starts = [0]
    for _, (_, place) in ordered:
        if place.start - starts[-1] >= _RANGE:
            starts.append(place.start)
    waiting = deque(ordered)
    for start, piece in _read(url, part, starts):
        tensors: dict[str, tuple[TensorSpec, memoryview]] = {}
        while waiting and waiting[0][1][1].stop <= start + len(piece):
            name, (info, place) = waiting.popleft()
            tensors[name] = (info, piece[place.start - start : place.stop - start])
        accept(tensors)
    return len(places)


def _whole(folder: str, step: int, part: form.Part) -> str:
    """Where a part is, which has as many bytes as were committed. Raises Damaged."""
    url = storage.join(folder, form.step_folder(step), part.name)
    found = storage.stat(url)
    if found is None:
        raise Damaged(f"part {part.name} is missing")
    if found.size != part.size:
        raise Damaged(f"part {part.name} has {found.size} bytes instead of {part.size}")
    return url


def _read(url: str, part: form.Part, starts: list[int]) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a part at `url` as ranges that begin at `starts`, in order, each until the next is asked for;
    several threads read ahead.

    Raises Damaged when the part is not what was committed, in the end if not before."""
    sizes = [end - start for start, end in zip(starts, [*starts[1:], part.size], strict=True)]
    readers = min(_READERS_REMOTE if storage.is_remote(url) else _READERS, len(sizes))
    buffers = [
        memory.mapping(max(sizes, default=0)) for _ in range(readers)
    ]  # used again and again: fresh memory is slow
    crc32c = 0

    with ThreadPoolExecutor(readers, thread_name_prefix="restore") as pool:

        def begin(number: int) -> Future[int]:
            return pool.submit(storage.read_into, url, starts[number], buffers[number % len(buffers)][: sizes[number]])

        readings = deque(begin(number) for number in range(len(buffers)))
        try:
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                if readings.popleft().result() != size:
                    raise Damaged(f"part {part.name} ends within its bytes {start} to {start + size}")
                piece = buffers[number % len(buffers)][:size]
                crc32c = storage.crc32c(piece, crc32c)
                yield start, piece
                if number + len(buffers) < len(starts):
                    readings.append(begin(number + len(buffers)))
        except storage.NotFound:
            raise Damaged(f"part {part.name} is missing") from None
        finally:
            for reading in readings:
                reading.cancel()
    if crc32c != part.crc32c:
        raise Damaged(f"part {part.name} has crc32c {crc32c:08x} instead of {part.crc32c:08x}")


def verify(folder: str, step: int) -> Manifest:
    """Reads every byte of a checkpoint and compares. Raises Damaged."""
    return _taken(folder, step, read_manifest(folder, step), lambda tensors: None)


def _taken(folder: str, step: int, manifest: Manifest, accept: Accept) -> Manifest:
    tensors = sum(take_part(folder, step, part, accept) for part in manifest.parts)
    if tensors != manifest.tensors:
        raise Damaged(f"its parts hold {tensors} tensors instead of {manifest.tensors}")
    return manifest


def restore(
    folder: str, rendezvous: Rendezvous, identity: Mapping[str, Any], accept: Accept, warn: Callable[[str], None]
) -> Restored | None:
    """Gives the tensors of the newest good checkpoint to `accept`; None when there is no checkpoint. Every host must
    call it.

    Raises BadInput when a checkpoint belongs to something else, or when there are checkpoints but none verifies:
    starting over silently would throw the run away.
    """
    steps = rendezvous.meet("checkpoints", committed_steps(folder))[0]
    damaged: list[int] = []
    for step in steps:
        rendezvous.set_phase(f"restoring {step}")
        manifest, why = None, ""
        try:
            manifest = _load(folder, step, identity, accept)
        except Damaged as error:
            why = str(error)
        complaints = rendezvous.meet(f"restore {step}", why)
        bad = [
            f"host {worker}: {complaint}" if len(complaints) > 1 else complaint
            for worker, complaint in enumerate(complaints)
            if complaint
        ]
        if not bad:
            assert manifest is not None
            return Restored(manifest, tuple(damaged))
        damaged.append(step)
        warn(f"checkpoint {storage.join(folder, form.step_folder(step))} is damaged ({bad[0]}); trying the one before")
    if damaged:
        raise BadInput(
            f"{folder}: none of the checkpoints of steps {', '.join(map(str, damaged))} verifies; to start over, use another run id or output"
        )
    return None


def _load(folder: str, step: int, identity: Mapping[str, Any], accept: Accept) -> Manifest:
    manifest = read_manifest(folder, step)
    different = form.differences(manifest.identity, identity)
    if different:
        place = storage.join(folder, form.step_folder(step))
        raise BadInput(
            "\n  ".join(
                [
                    f"{place} is a checkpoint of something else; use another run id or output, or undo the change:",
                    *different,
                ]
            )
        )
    return _taken(folder, step, manifest, accept)
