"""Lists, verifies and copies checkpoints for `tpu-train checkpoint`, without a framework, a model or other hosts.

A copy writes the manifest last, as every commit does: an interrupted copy is not a checkpoint and can be repeated.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from training import storage
from training.checkpoint import format as form
from training.checkpoint.format import Manifest
from training.checkpoint.reader import read_part, verify
from training.checkpoint.tensors import Damaged, NotFinite
from training.errors import BadInput


def find_checkpoints(folder: str) -> tuple[str, list[int]]:
    """Returns a run's checkpoint folder and committed steps, newest first; reads no manifest. `folder` is the run's
    folder, its checkpoint folder, or one checkpoint in it, whose step is then the only one. Raises BadInput if none,
    StorageError."""
    below = storage.join(folder, "checkpoints")
    parent, _, name = folder.rstrip("/").rpartition("/")
    step = form.step_of(name)
    parent = parent or "."  # a step folder's name alone
    if step is not None and step in form.committed_steps(parent):
        return parent, [step]
    for checkpoints in (below, folder):
        if steps := form.committed_steps(checkpoints):
            return checkpoints, steps
    raise BadInput(f"no committed checkpoint below {folder} (looked for {below}/step-*/manifest.json)")


def has_checkpoint(folder: str) -> bool:
    """Returns whether `folder`, as for `find_checkpoints`, has a committed checkpoint. StorageErrors pass."""
    try:
        return bool(find_checkpoints(folder)[1])
    except BadInput:
        return False


def best_saved_step(folder: str) -> int:
    """Returns the step with the best evaluation figure. Raises BadInput when there is no checkpoint, when the newest is
    damaged or names no such step, or when the best one was deleted; StorageError."""
    checkpoints, steps = find_checkpoints(folder)
    step = _read_manifest(checkpoints, steps[0]).best_step
    if step is None:
        raise BadInput(
            f"{checkpoints}: no best checkpoint is known; the run needs checkpoint.best, and an evaluation before its "
            "last save"
        )
    return choose_step(checkpoints, steps, step)


def copy_to_run(source: str, target: str, step: int | None) -> int:
    """Copies the checkpoint of `step` (None: the newest) of `source`, as for `find_checkpoints`, into the run folder
    `target`, whose run then continues from it; returns the step. Verifies each part's checksum; copies the manifest
    last, without its record of the best step. Raises BadInput if the checkpoint is absent or damaged, or `target` has
    any; StorageError."""
    checkpoints, steps = find_checkpoints(source)
    chosen = choose_step(checkpoints, steps, step)
    into = storage.join(target, "checkpoints")
    if present := form.committed_steps(into):
        raise BadInput(
            f"{into} has checkpoints already (steps {', '.join(map(str, present))}); restore into a folder without "
            "any: nothing is overwritten"
        )
    folder = storage.join(into, form.step_folder(chosen))
    try:
        manifest = form.read_manifest(checkpoints, chosen)
        for part in manifest.parts:
            storage.write(storage.join(folder, part.name), read_part(checkpoints, chosen, part))
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {checkpoints} is damaged ({error}); choose another with --step"
        ) from None
    state = {name: value for name, value in manifest.state.items() if name != "best"}  # which is not copied
    copied = form.dump_manifest(replace(manifest, state=state))
    storage.write(storage.join(folder, form.MANIFEST), copied, create_only=True)
    return chosen


def render_table(folder: str) -> str:
    """Returns a table of a run's checkpoints, newest first, by their manifests alone: those that are unreadable as
    damaged, with the reason; damaged parts go unseen. Raises BadInput for none, StorageError."""
    checkpoints, steps = find_checkpoints(folder)
    lines = [f"{'step':>10}  {'bytes':>14}  parts  attempt  loss"]
    best: Mapping[str, Any] | None = None  # according to the newest readable manifest
    for step, manifest in form.read_manifests(checkpoints, steps).items():
        number, size, parts, attempt, loss = form.describe(step, manifest)
        lines.append(f"{number:>10}  {size:>14}  {parts:>5}  {attempt:>7}  {loss}".rstrip())
        if isinstance(manifest, Manifest):
            best = best or manifest.state.get("best")
            if best and best["step"] == step:
                lines[-1] += f"  best {best['metric']}: {best['value']:.5f}"
    return "\n".join(lines)


def render_manifest(folder: str, step: int | None) -> str:
    """Returns the manifest of a checkpoint (None: the newest) as JSON. Raises BadInput for none or a damaged one,
    StorageError."""
    checkpoints, steps = find_checkpoints(folder)
    chosen = choose_step(checkpoints, steps, step)
    return form.render(form.to_json(_read_manifest(checkpoints, chosen))).rstrip()


def verify_checkpoints(folder: str, step: int | None) -> tuple[str, bool]:
    """Reads all checkpoints of a run, or that of `step`. Returns a line for each, and whether all are good, none
    damaged or not finite. Raises BadInput when there is none, or no such step; StorageError."""
    checkpoints, steps = find_checkpoints(folder)
    lines, good = [], True
    for chosen in steps if step is None else [choose_step(checkpoints, steps, step)]:
        try:
            manifest = verify(checkpoints, chosen)
            lines.append(f"step {chosen}: good, finite, {manifest.size:,} bytes in {len(manifest.parts)} part(s)")
        except Damaged as error:
            good = False
            lines.append(f"step {chosen}: {'not finite' if isinstance(error, NotFinite) else 'damaged'}: {error}")
    return "\n".join(lines), good


def _read_manifest(checkpoints: str, step: int) -> Manifest:
    """Reads the manifest of a step. Raises BadInput when it is missing or damaged, StorageError."""
    try:
        return form.read_manifest(checkpoints, step)
    except Damaged as error:
        raise BadInput(f"checkpoint of step {step} in {checkpoints} is damaged ({error})") from None


def choose_step(checkpoints: str, steps: list[int], step: int | None) -> int:
    """Returns `step`, or the first of `steps` if it is None. Raises BadInput unless it is one of `steps`."""
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise BadInput(f"{checkpoints} has no committed step {chosen}; it has {', '.join(map(str, steps))}")
    return chosen
