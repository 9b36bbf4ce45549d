"""The result: a folder in Hugging Face's layout, which `transformers.pipeline("fill-mask" or "text-classification",
model=folder)` loads in plain torch.

It is made of a run's weights, a config.json and the tokenizer's files, whichever backend trained them; no framework is
needed to write it. The order of the writes is: tokenizer, config.json, and last model.safetensors; a folder without it
is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from training import storage
from training.checkpoint.admin import find_checkpoints
from training.checkpoint.reader import load_tensors
from training.checkpoint.safetensors_file import Damaged, TensorSpec, encode
from training.checkpoint.snapshot import Snapshot, StartSnapshot
from training.checkpoint.store import read_manifest
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.errors import BadInput
from training.models.hugging_face import CONFIG, WEIGHTS, build_model_config
from training.registry import TASKS
from training.storage.hub import tokenizer_folder

PREFIX = "model/"
_OF_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ckpt",
)
_EMBEDDINGS = "embeddings.word_embeddings.weight"


def write_model_folder(
    folder: str,
    weights: Mapping[str, TensorSpec],
    copy: StartSnapshot,
    config: Mapping[str, Any],
    tokenizer: str,
) -> None:
    """Writes a model folder. `weights` and `copy` are as in `Backend.layout` and `Backend.copy`; tensors of other
    groups are left out."""
    tokenizer = tokenizer_folder(tokenizer)
    for each in storage.listing(tokenizer):
        name = storage.name_of(each.url)
        inside = each.url.removeprefix(tokenizer.rstrip("/") + "/").count("/") == 0
        if (
            inside and name != CONFIG and not name.endswith(_OF_WEIGHTS)
        ):  # the tokenizer's folder may be another model's
            storage.write(storage.join(folder, name), storage.read(each.url))
    storage.write(
        storage.join(folder, CONFIG),
        json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True).encode() + b"\n",
    )
    names = [name for name in sorted(weights) if name.startswith(PREFIX)]
    data, places = encode([(name.removeprefix(PREFIX), weights[name]) for name in names], {"format": "pt"})
    copy({PREFIX + name: place for name, place in places.items()}).wait()
    storage.write(storage.join(folder, WEIGHTS), data)


def export_checkpoint(run: str, out: str, step: int | None = None) -> int:
    """Writes the model of a run's checkpoint (the newest, unless `step` is given) to `out`, and returns its step.
    Raises BadInput."""
    place, steps = find_checkpoints(run)
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise BadInput(f"{place} has no committed step {chosen}; it has {', '.join(map(str, steps))}")
    tensors: dict[str, tuple[TensorSpec, bytes]] = {}

    def keep_weights(loaded: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        tensors.update({name: (spec, bytes(data)) for name, (spec, data) in loaded.items() if name.startswith(PREFIX)})

    try:
        manifest = read_manifest(place, chosen)
        load_tensors(place, manifest, keep_weights)
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {place} is damaged ({error}); choose another with --step"
        ) from None
    settings = TrainerConfig.model_validate(manifest.config)
    tokenizer = tokenizers.read(settings.data.tokenizer)
    vocabulary = next(
        (info.shape[0] for name, (info, _) in tensors.items() if name.endswith(_EMBEDDINGS)),
        tokenizer.special.vocabulary,
    )
    config = build_model_config(
        settings.model,
        vocabulary=vocabulary,
        pad=tokenizer.special.pad,
        dropout=settings.train.dropout,
        head=TASKS[settings.task].head,
        labels=manifest.identity.get("labels"),
    )

    def copy(places: Mapping[str, memoryview]) -> Snapshot:
        return Snapshot(
            (np.frombuffer(place, np.uint8), np.frombuffer(tensors[name][1], np.uint8))
            for name, place in places.items()
        )

    write_model_folder(out, {name: info for name, (info, _) in tensors.items()}, copy, config, settings.data.tokenizer)
    return chosen
