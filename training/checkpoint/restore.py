"""Restoring: the newest checkpoint that verifies on every host, and a clear word about each one that did not.

All hosts try the same checkpoint, because host 0's list counts, and meet after trying: one host with a bad read sends everybody to the one
before. A checkpoint of another model or other data is not damaged but refused: going on from it would be a mistake, not a recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c

from training import storage
from training.checkpoint import manifest as form
from training.checkpoint.manifest import Damaged, Manifest, TensorInfo
from training.checkpoint.save import folders
from training.errors import BadInput
from training.rendezvous import Rendezvous

# Takes the tensors of one part: name -> (dtype and shape, raw bytes).
Accept = Callable[[Mapping[str, tuple[TensorInfo, memoryview]]], None]


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


def read_part(folder: str, step: int, part: form.Part) -> bytes:
    """The verified bytes of a part. Raises Damaged."""
    try:
        data = storage.read(storage.join(folder, form.step_folder(step), part.name))
    except storage.NotFound:
        raise Damaged(f"part {part.name} is missing") from None
    if len(data) != part.size:
        raise Damaged(f"part {part.name} has {len(data)} bytes instead of {part.size}")
    crc32c = google_crc32c.value(data)
    if crc32c != part.crc32c:
        raise Damaged(f"part {part.name} has crc32c {crc32c:08x} instead of {part.crc32c:08x}")
    return data


def verify(folder: str, step: int) -> Manifest:
    """Reads every byte of a checkpoint and compares. Raises Damaged."""
    manifest = read_manifest(folder, step)
    tensors = sum(len(form.decode(read_part(folder, step, part))) for part in manifest.parts)
    if tensors != manifest.tensors:
        raise Damaged(f"its parts hold {tensors} tensors instead of {manifest.tensors}")
    return manifest


def restore(
    folder: str, rendezvous: Rendezvous, identity: Mapping[str, Any], accept: Accept, warn: Callable[[str], None]
) -> Restored | None:
    """Gives the tensors of the newest good checkpoint to `accept`; None when there is no checkpoint. Every host must call it.

    Raises BadInput when a checkpoint belongs to something else, or when there are checkpoints but none verifies: starting over silently
    would throw the run away.
    """
    steps = rendezvous.meet("checkpoints", committed_steps(folder))[0]
    damaged: list[int] = []
    for step in steps:
        rendezvous.phase(f"restoring {step}")
        manifest, why = None, ""
        try:
            manifest = _load(folder, step, identity, accept)
        except Damaged as error:
            why = str(error)
        complaints = rendezvous.meet(f"restore {step}", why)
        bad = [
            f"host {worker}: {complaint}" if len(complaints) > 1 else complaint for worker, complaint in enumerate(complaints) if complaint
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
            "\n  ".join([f"{place} is a checkpoint of something else; use another run id or output, or undo the change:", *different])
        )
    tensors = 0
    for part in manifest.parts:
        decoded = form.decode(read_part(folder, step, part))
        tensors += len(decoded)
        accept(decoded)
    if tensors != manifest.tensors:
        raise Damaged(f"its parts hold {tensors} tensors instead of {manifest.tensors}")
    return manifest
