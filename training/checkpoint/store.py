"""The folder of a run's checkpoints: which steps it has, their manifests, and deleting one. See `format.py` for what
can fail half-way."""

from __future__ import annotations

from collections.abc import Iterable

from training import storage as default_storage
from training.checkpoint.format import MANIFEST, Manifest, load_manifest, step_folder, step_of
from training.checkpoint.safetensors_file import Damaged
from training.storage import NotFound, Storage, join


def list_folders(folder: str, storage: Storage = default_storage) -> dict[int, set[str]]:
    """Lists the step folders below a run's checkpoint folder, committed or not, and the names in each."""
    folders: dict[int, set[str]] = {}
    for entry in storage.listing(folder):
        *_, parent, name = entry.url.split("/")
        step = step_of(parent)
        if step is not None:
            folders.setdefault(step, set()).add(name)
    return folders


def committed_steps(folder: str, storage: Storage = default_storage) -> list[int]:
    """Returns the steps with a manifest, newest first."""
    return sorted((step for step, names in list_folders(folder, storage).items() if MANIFEST in names), reverse=True)


def read_manifest(folder: str, step: int, storage: Storage = default_storage) -> Manifest:
    """Returns the manifest of a committed step. Raises Damaged."""
    try:
        manifest = load_manifest(storage.read(join(folder, step_folder(step), MANIFEST)))
    except NotFound:
        raise Damaged(f"{MANIFEST} is missing") from None
    if manifest.step != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def delete_checkpoint(folder: str, step: int, names: Iterable[str], storage: Storage = default_storage) -> None:
    """Deletes the named files of a step, first its manifest: what is left at any moment is either whole or no
    checkpoint."""
    names = set(names)
    for name in (*(names & {MANIFEST}), *sorted(names - {MANIFEST})):
        storage.delete(join(folder, step_folder(step), name))
