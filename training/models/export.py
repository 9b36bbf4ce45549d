"""Writes a run's result as a folder in Hugging Face's layout: weights, config.json and the tokenizer's files, whichever
backend trained them. Needs no framework.

The tokenizer is written first, then config.json, and last model.safetensors: a folder without that is not finished.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from training import storage as default_storage
from training.checkpoint.admin import choose_step, find_checkpoints
from training.checkpoint.format import read_manifest
from training.checkpoint.reader import load_tensors, require_finite
from training.checkpoint.snapshot import Snapshot, StartSnapshot
from training.checkpoint.tensors import Damaged, Slice, TensorSpec, encode, whole
from training.config import restore
from training.data import tokenizer as tokenizers
from training.errors import BadInput
from training.models.adapter import Adapter, adapter_of
from training.models.hugging_face import CONFIG, WEIGHTS, build_model_config
from training.registry import TASKS
from training.storage import Storage, join
from training.storage.hub import TOKENIZER_FILES, tokenizer_folder

PREFIX = "model/"
_EMBEDDINGS = "embeddings.word_embeddings.weight"


def write_model_folder(
    folder: str,
    weights: Mapping[str, TensorSpec],
    snapshot_state: StartSnapshot,
    config: Mapping[str, Any],
    tokenizer: str,
    storage: Storage = default_storage,
    adapter: Adapter | None = None,
) -> None:
    """Writes a model folder.

    Args:
        folder: to write.
        weights: as Backend.tensor_specs; tensors of the optimizer are left out.
        snapshot_state: as Backend.snapshot_state.
        config: values of config.json.
        tokenizer: the tokenizer's folder. It may be another model's folder; only `TOKENIZER_FILES` are copied.
        storage: of both folders.
        adapter: of a run with LoRA: decides whether its two files or the merged model are written.
    """
    tokenizer = tokenizer_folder(tokenizer)
    for name in TOKENIZER_FILES:
        if storage.stat(join(tokenizer, name)):
            storage.write(join(folder, name), storage.read(join(tokenizer, name)))
    specs = {name.removeprefix(PREFIX): spec for name, spec in sorted(weights.items()) if name.startswith(PREFIX)}

    def copy(buffers: Mapping[str, memoryview]) -> None:
        snapshot_state({PREFIX + name: buffer for name, buffer in buffers.items()}).wait()

    if adapter is not None and not adapter.lora.merge:
        adapter.write(folder, specs, copy, storage)
        return
    text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True)
    storage.write(join(folder, CONFIG), text.encode() + b"\n")
    data, buffers = encode([(name, specs[name]) for name in specs if ".lora_" not in name], {"format": "pt"})
    copy(buffers)
    if adapter is not None:
        adapter.merge(specs, buffers, copy)
    storage.write(join(folder, WEIGHTS), data)


def export_checkpoint(run: str, out: str, step: int | None = None, *, merge: bool = False) -> int:
    """Writes the model of a run's checkpoint, the newest unless `step` is given, to the folder `out`; with `merge`, a
    whole model also of a run with LoRA. Returns its step. Raises BadInput if the checkpoint or the tokenizer is absent
    or damaged."""
    place, steps = find_checkpoints(run)
    chosen = choose_step(place, steps, step)

    def copy_weights(buffers: Mapping[str, memoryview]) -> Snapshot:
        """Reads the checkpoint's tensors of these names into their buffers. Raises Damaged."""

        def copy(loaded: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
            for name, (_, data) in loaded.items():
                buffers[name][:] = data

        def choose(name: str, spec: TensorSpec) -> Slice | None:
            return whole(spec.shape) if name in buffers else None

        load_tensors(place, manifest, require_finite(copy), choose=choose)
        return Snapshot()

    try:
        manifest = read_manifest(place, chosen)
        settings = restore(manifest.config, f"{place}, step {chosen}")
        tokenizer = tokenizers.read(settings.data.tokenizer, TASKS[settings.task].rows)
        specs = {name: tensor.spec for name, tensor in manifest.tensors.items()}
        vocabularies = (spec.shape[0] for name, spec in specs.items() if name.endswith(_EMBEDDINGS))
        config = build_model_config(
            settings.model,
            vocabulary=next(vocabularies, tokenizer.special.vocabulary),
            pad=tokenizer.special.pad,
            dropout=settings.train.dropout,
            head=TASKS[settings.task].head,
            labels=manifest.identity.get("labels"),
            end=tokenizer.special.end,
        )
        adapter = adapter_of(settings)
        if adapter is not None and merge:
            adapter = replace(adapter, lora=adapter.lora.model_copy(update={"merge": True}))
        write_model_folder(out, specs, copy_weights, config, settings.data.tokenizer, adapter=adapter)
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {place} can't be used ({error}); choose another with --step"
        ) from None
    return chosen
