"""What `tpu-train checkpoint` shows and copies: needs no framework, no model and no other host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from training import storage
from training.checkpoint.format import MANIFEST, Manifest, dump_manifest, render, step_folder, step_of, to_json
from training.checkpoint.reader import read_part, verify
from training.checkpoint.safetensors_file import Damaged, NotFinite
from training.checkpoint.store import committed_steps, read_manifest
from training.checkpoint.writer import best_step
from training.errors import BadInput


def find_checkpoints(folder: str) -> tuple[str, list[int]]:
    """Finds the checkpoints of a run.

    Args:
        folder: A run's folder, its checkpoint folder, or one checkpoint in that.

    Returns:
        The checkpoint folder, and its committed steps, newest first (of one checkpoint: its step).

    Raises:
        BadInput: There are none.
    """
    below = storage.join(folder, "checkpoints")
    parent, _, name = folder.rstrip("/").rpartition("/")
    step = step_of(name)
    if step is not None and step in committed_steps(parent):
        return parent, [step]
    for checkpoints in (below, folder):
        steps = committed_steps(checkpoints)
        if steps:
            return checkpoints, steps
    raise BadInput(f"no committed checkpoint below {folder} (looked for {below}/step-*/manifest.json)")


def has_checkpoint(folder: str) -> bool:
    """Whether there is a committed checkpoint in a run's folder."""
    try:
        return bool(find_checkpoints(folder)[1])
    except BadInput:
        return False


def newest_manifest(folder: str) -> Manifest:
    """Of a run's newest checkpoint. Raises BadInput when there is none, or it is damaged."""
    checkpoints, steps = find_checkpoints(folder)
    try:
        return read_manifest(checkpoints, steps[0])
    except Damaged as error:
        raise BadInput(f"{checkpoints}, step {steps[0]}: {error}") from None


def best_saved_step(folder: str) -> int:
    """The step with the best figure, as the newest checkpoint says. Raises BadInput when there is none, or when it was
    damaged or deleted."""
    checkpoints, steps = find_checkpoints(folder)
    step = best_step(newest_manifest(folder))
    if step is None:
        raise BadInput(
            f"{checkpoints}: no best checkpoint is known; the run needs checkpoint.best, and an evaluation before its "
            "last save"
        )
    return _require_step(checkpoints, steps, step)


def copy_to_run(source: str, target: str, step: int | None) -> int:
    """Copies a checkpoint, verified, into the folder of a new run, which then continues from it.

    The manifest comes last, as for every commit: a copy that was interrupted is no checkpoint, and can be started
    again.

    Args:
        source: As `find_checkpoints` takes it.
        target: The folder of a run that has no checkpoint.
        step: Which checkpoint; None for the newest.

    Returns:
        The step.

    Raises:
        BadInput: There is no such checkpoint, it is damaged, or the target has checkpoints.
    """
    checkpoints, steps = find_checkpoints(source)
    chosen = steps[0] if step is None else _require_step(checkpoints, steps, step)
    into = storage.join(target, "checkpoints")
    present = committed_steps(into)
    if present:
        raise BadInput(
            f"{into} has checkpoints already (steps {', '.join(map(str, present))}); restore into a folder without "
            "any: nothing is overwritten"
        )
    folder = storage.join(into, step_folder(chosen))
    try:
        manifest = read_manifest(checkpoints, chosen)
        for part in manifest.parts:
            storage.write(storage.join(folder, part.name), read_part(checkpoints, chosen, part))
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {checkpoints} is damaged ({error}); choose another with --step"
        ) from None
    state = {name: value for name, value in manifest.state.items() if name != "best"}  # that checkpoint is not copied
    storage.write(storage.join(folder, MANIFEST), dump_manifest(replace(manifest, state=state)), create_only=True)
    return chosen


def render_table(folder: str) -> str:
    """A table of a run's checkpoints, newest first. Raises BadInput."""
    checkpoints, steps = find_checkpoints(folder)
    lines = [f"{'step':>10}  {'bytes':>14}  parts  attempt  loss"]
    best: Mapping[str, Any] | None = None  # as the newest manifest that can be read says
    for step in steps:
        try:
            manifest = read_manifest(checkpoints, step)
        except Damaged as error:
            lines.append(f"{step:>10}  damaged: {error}")
            continue
        loss = manifest.state.get("last_loss")
        best = best or manifest.state.get("best")
        lines.append(
            f"{step:>10}  {manifest.size:>14,}  {len(manifest.parts):>5}  {manifest.attempt:>7}  "
            + ("" if loss is None else f"{loss:.5f}")
        )
        if best and best["step"] == step:
            lines[-1] += f"  best {best['metric']}: {best['value']:.5f}"
    return "\n".join(lines)


def render_manifest(folder: str, step: int | None) -> str:
    """The manifest of a checkpoint (the newest, unless `step` is given), as JSON. Raises BadInput."""
    checkpoints, steps = find_checkpoints(folder)
    chosen = steps[0] if step is None else _require_step(checkpoints, steps, step)
    try:
        manifest: Manifest = read_manifest(checkpoints, chosen)
    except Damaged as error:
        raise BadInput(f"checkpoint of step {chosen} in {checkpoints} is damaged ({error})") from None
    return render(to_json(manifest)).rstrip()


def verify_checkpoints(folder: str, step: int | None) -> tuple[str, bool]:
    """Verifies all checkpoints of a run, or one.

    Returns:
        A line for each checkpoint, and whether all are good.

    Raises:
        BadInput: There is none.
    """
    checkpoints, steps = find_checkpoints(folder)
    lines, good = [], True
    for chosen in steps if step is None else [_require_step(checkpoints, steps, step)]:
        try:
            manifest = verify(checkpoints, chosen)
            lines.append(f"step {chosen}: good, finite, {manifest.size:,} bytes in {len(manifest.parts)} part(s)")
        except Damaged as error:
            good = False
            lines.append(f"step {chosen}: {'not finite' if isinstance(error, NotFinite) else 'damaged'}: {error}")
    return "\n".join(lines), good


def _require_step(checkpoints: str, steps: list[int], step: int) -> int:
    if step not in steps:
        raise BadInput(f"{checkpoints} has no committed step {step}; it has {', '.join(map(str, steps))}")
    return step
