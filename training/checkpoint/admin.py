"""What `tpu-train checkpoint` shows and copies: needs no framework, no model and no other host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from training import storage
from training.checkpoint.format import MANIFEST, Damaged, Manifest, dump, step_folder, step_of
from training.checkpoint.reader import committed_steps, read_manifest, read_part
from training.checkpoint.reader import verify as verify_step
from training.checkpoint.writer import best_step
from training.errors import BadInput


def find_checkpoints(folder: str) -> tuple[str, list[int]]:
    """The checkpoint folder of a run's folder, and its committed steps, newest first; `folder` may also be that folder
    itself, or one checkpoint in it.

    Raises BadInput when there are none."""
    below = storage.join(folder, "checkpoints")
    parent, _, name = folder.rstrip("/").rpartition("/")
    step = step_of(name)
    if step is not None and step in committed_steps(parent):
        return parent, [step]
    for place in (below, folder):
        steps = committed_steps(place)
        if steps:
            return place, steps
    raise BadInput(f"no committed checkpoint below {folder} (looked for {below}/step-*/manifest.json)")


def has_checkpoint(folder: str) -> bool:
    """Whether there is a committed checkpoint in it."""
    try:
        return bool(find_checkpoints(folder)[1])
    except BadInput:
        return False


def best_saved_step(folder: str) -> int:
    """The step with the best figure, as the newest checkpoint tells. Raises BadInput when there is none, or when it was
    damaged or deleted."""
    place, steps = find_checkpoints(folder)
    try:
        step = best_step(read_manifest(place, steps[0]))
    except Damaged as error:
        raise BadInput(f"{place}, step {steps[0]}: {error}") from None
    if step is None:
        raise BadInput(
            f"{place}: no best checkpoint is known; the run needs checkpoint.best, and an evaluation before its last save"
        )
    return _chosen(place, steps, step)


def copy_to_run(source: str, target: str, step: int | None) -> int:
    """Copies a checkpoint, verified, into another run's folder, which must have none: a run of that name goes on from
    it. Returns the step.

    The manifest comes last, as for every commit: a copy that was interrupted is no checkpoint, and can be started
    again. Raises BadInput."""
    place, steps = find_checkpoints(source)
    chosen = steps[0] if step is None else _chosen(place, steps, step)
    into = storage.join(target, "checkpoints")
    present = committed_steps(into)
    if present:
        raise BadInput(
            f"{into} has checkpoints already (steps {', '.join(map(str, present))}); restore into a folder without any: nothing is overwritten"
        )
    folder = storage.join(into, step_folder(chosen))
    try:
        manifest = read_manifest(place, chosen)
        for part in manifest.parts:
            storage.write(storage.join(folder, part.name), read_part(place, chosen, part))
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {place} is damaged ({error}); choose another with --step"
        ) from None
    state = {name: value for name, value in manifest.state.items() if name != "best"}  # its checkpoint stays behind
    storage.write(storage.join(folder, MANIFEST), dump(replace(manifest, state=state)), create_only=True)
    return chosen


def render_table(folder: str) -> str:
    place, steps = find_checkpoints(folder)
    lines = [f"{'step':>10}  {'bytes':>14}  parts  attempt  loss"]
    chosen: Mapping[str, Any] | None = None  # the best, as the newest that can be read tells
    for step in steps:
        try:
            manifest = read_manifest(place, step)
        except Damaged as error:
            lines.append(f"{step:>10}  damaged: {error}")
            continue
        loss = manifest.state.get("last_loss")
        chosen = chosen or manifest.state.get("best")
        size = sum(part.size for part in manifest.parts)
        lines.append(
            f"{step:>10}  {size:>14,}  {len(manifest.parts):>5}  {manifest.attempt:>7}  {'' if loss is None else f'{loss:.5f}'}"
        )
        if chosen and chosen["step"] == step:
            lines[-1] += f"  best {chosen['metric']}: {chosen['value']:.5f}"
    return "\n".join(lines)


def render_manifest(folder: str, step: int | None) -> str:
    place, steps = find_checkpoints(folder)
    chosen = steps[0] if step is None else _chosen(place, steps, step)
    try:
        return json.dumps(asdict(read_manifest(place, chosen)), indent=1)
    except Damaged as error:
        raise BadInput(f"checkpoint of step {chosen} in {place} is damaged ({error})") from None


def verify_checkpoints(folder: str, step: int | None) -> tuple[str, bool]:
    """A line for each checkpoint, and whether all are good."""
    place, steps = find_checkpoints(folder)
    lines, good = [], True
    for each in steps if step is None else [_chosen(place, steps, step)]:
        try:
            lines.append(
                f"step {each}: good, {_size(verify_step(place, each)):,} bytes in {len(read_manifest(place, each).parts)} part(s)"
            )
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
