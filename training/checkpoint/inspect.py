"""What `tpu-train checkpoint` shows: needs no framework, no model and no other host."""

from __future__ import annotations

import json
from dataclasses import asdict

from training import storage
from training.checkpoint.manifest import Damaged, Manifest
from training.checkpoint.restore import committed_steps, read_manifest
from training.checkpoint.restore import verify as verify_step
from training.errors import BadInput


def find(folder: str) -> tuple[str, list[int]]:
    """The checkpoint folder of a run's folder (or itself), and its committed steps, newest first. Raises BadInput when there are none."""
    below = storage.join(folder, "checkpoints")
    for place in (below, folder):
        steps = committed_steps(place)
        if steps:
            return place, steps
    raise BadInput(f"no committed checkpoint below {folder} (looked for {below}/step-*/manifest.json)")


def table(folder: str) -> str:
    place, steps = find(folder)
    lines = [f"{'step':>10}  {'bytes':>14}  parts  attempt  loss"]
    for step in steps:
        try:
            manifest = read_manifest(place, step)
        except Damaged as error:
            lines.append(f"{step:>10}  damaged: {error}")
            continue
        loss = manifest.state.get("last_loss")
        size = sum(part.size for part in manifest.parts)
        lines.append(f"{step:>10}  {size:>14,}  {len(manifest.parts):>5}  {manifest.attempt:>7}  {'' if loss is None else f'{loss:.5f}'}")
    return "\n".join(lines)


def show(folder: str, step: int | None) -> str:
    place, steps = find(folder)
    try:
        return json.dumps(asdict(read_manifest(place, steps[0] if step is None else _chosen(place, steps, step))), indent=1)
    except Damaged as error:
        raise BadInput(f"{place}: {error}") from None


def verify(folder: str, step: int | None) -> tuple[str, bool]:
    """A line for each checkpoint, and whether all are good."""
    place, steps = find(folder)
    lines, good = [], True
    for each in steps if step is None else [_chosen(place, steps, step)]:
        try:
            lines.append(f"step {each}: good, {_size(verify_step(place, each)):,} bytes in {len(read_manifest(place, each).parts)} part(s)")
        except Damaged as error:
            good = False
            lines.append(f"step {each}: damaged: {error}")
    return "\n".join(lines), good


def _chosen(place: str, steps: list[int], step: int) -> int:
    if step not in steps:
        raise BadInput(f"{place} has no committed step {step}; it has {', '.join(map(str, steps))}")
    return step


def _size(manifest: Manifest) -> int:
    return sum(part.size for part in manifest.parts)
