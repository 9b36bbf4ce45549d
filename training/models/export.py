"""Writes a run's result as a folder in Hugging Face's layout: weights, config.json and the tokenizer's files, whichever
backend trained them. Needs no framework.

The tokenizer is written first, then config.json, and last model.safetensors: a folder without that is not finished.

A run with LoRA is written as peft's two files, which peft and vLLM load onto the starting model, or as a model with the
additions merged into its weights. The layout is peft's (https://github.com/huggingface/peft,
`PeftModel.save_pretrained`): `adapter_config.json`, and `adapter_model.safetensors` with the trained parameters, named
`base_model.model.<parameter>`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from training import storage as default_storage
from training.checkpoint.admin import choose_step, find_checkpoints
from training.checkpoint.format import Manifest, read_manifest
from training.checkpoint.reader import load_tensors, require_finite
from training.checkpoint.snapshot import Snapshot, StartSnapshot
from training.checkpoint.tensors import Damaged, Slice, TensorSpec, encode, whole
from training.config import Lora, TrainerConfig, restore
from training.data import tokenizer as tokenizers
from training.errors import BadInput
from training.models.hugging_face import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    WEIGHTS,
    ModelRequirements,
    build_model_config,
    is_of_head,
)
from training.registry import TASKS
from training.storage import Storage, join, name_of
from training.storage.hub import GENERATION, TOKENIZER_FILES, model_folder, tokenizer_folder

PREFIX = "model/"
_EMBEDDINGS = "embeddings.word_embeddings.weight"


def write_model_folder(
    folder: str,
    weights: Mapping[str, TensorSpec],
    snapshot_state: StartSnapshot,
    config: Mapping[str, Any],
    tokenizer: str,
    storage: Storage = default_storage,
    run: TrainerConfig | None = None,
    merge: bool = False,
) -> None:
    """Writes a model folder, a path or URL, from one host that holds all weights. `weights`, `snapshot_state`: of
    Backend, whose copy it waits for; tensors of the optimizer are left out. `config`: values of config.json.
    `tokenizer`: a folder, or a name on the Hub, of which only `TOKENIZER_FILES` are copied; of a starting model in
    `run`, `GENERATION` is. With LoRA and such a model, writes peft's two files, or with `lora.merge` or `merge` a whole
    model, and deletes an earlier export's adapter. Raises StorageError, BadInput, and errors of `snapshot_state`."""
    copied = [join(tokenizer_folder(tokenizer), name) for name in TOKENIZER_FILES]
    start = run.model.path if run else None
    for url in [*copied, join(model_folder(start), GENERATION)] if start else copied:
        if storage.stat(url):
            storage.write(join(folder, name_of(url)), storage.read(url))
    specs = {name.removeprefix(PREFIX): spec for name, spec in sorted(weights.items()) if name.startswith(PREFIX)}

    def copy(buffers: Mapping[str, memoryview]) -> None:
        snapshot_state({PREFIX + name: buffer for name, buffer in buffers.items()}).wait()

    lora = run.lora if run and start else None
    if run and lora and not (lora.merge or merge):
        _write_adapter(folder, run, lora, specs, copy, storage)
        return
    for name in (ADAPTER_CONFIG, ADAPTER):  # of an earlier export: transformers would load them instead
        if storage.stat(join(folder, name)):
            storage.delete(join(folder, name))
    text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True)
    storage.write(join(folder, CONFIG), text.encode() + b"\n")
    data, buffers = encode([(name, specs[name]) for name in specs if ".lora_" not in name], {"format": "pt"})
    copy(buffers)
    if lora:
        _merge_additions(lora, specs, buffers, copy)
    storage.write(join(folder, WEIGHTS), data)


def export_checkpoint(run: str, out: str, step: int | None = None, *, merge: bool = False) -> int:
    """Writes the model of a checkpoint to the folder `out`: peft's files for a run with LoRA from a starting model,
    unless it merges or `merge` is set. `run`: of `find_checkpoints`; both may be URLs; `step`: None for the newest.
    Returns the step. Raises BadInput if checkpoint or tokenizer are absent or damaged, the tokenizer is another than
    the run's, or a tensor is not finite; StorageError."""
    place, steps = find_checkpoints(run)
    chosen = choose_step(place, steps, step)

    def copy_weights(buffers: Mapping[str, memoryview]) -> Snapshot:
        """Reads the checkpoint's tensors of these names into their buffers; the Snapshot is done. Raises Damaged."""

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
        _require_tokenizer(place, manifest, settings, tokenizer.hash)
        specs = {name: tensor.spec for name, tensor in manifest.tensors.items()}
        vocabularies = (spec.shape[0] for name, spec in specs.items() if name.endswith(_EMBEDDINGS))
        vocabulary, head = next(vocabularies, tokenizer.special.vocabulary), TASKS[settings.task].head
        # No value of config.json follows from the length of rows.
        needs = ModelRequirements(vocabulary, tokenizer.special.pad, 0, head, manifest.identity.get("labels"))
        config = build_model_config(settings.model, needs, settings.train.dropout, tokenizer.special.end)
        write_model_folder(out, specs, copy_weights, config, settings.data.tokenizer, run=settings, merge=merge)
    except Damaged as error:
        raise BadInput(
            f"checkpoint of step {chosen} in {place} can't be used ({error}); choose another with --step"
        ) from None
    return chosen


def _require_tokenizer(place: str, manifest: Manifest, settings: TrainerConfig, found: str) -> None:
    """Raises BadInput if the checkpoint's data had another tokenizer than the one with the hash `found`; not if its
    hash is unknown."""
    trained = manifest.identity.get("tokenizer")
    if trained and trained != found:
        raise BadInput(
            f"the tokenizer in {settings.data.tokenizer} is not the one that the model in {place} was trained with "
            f"(hash {found:.12}, the model's {trained!s:.12}): its ids mean other words. Put the model's own back "
            "there, for instance from an earlier export"
        )


_A, _B = ".lora_A.weight", ".lora_B.weight"
_TASK_TYPES = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}  # peft's; it has none for MaskedLM

Copy = Callable[[Mapping[str, memoryview]], None]  # fills the buffers with the named weights
_FRESH = tuple(entry.head.network for entry in TASKS.values() if entry.head.is_fresh)


def _write_adapter(
    folder: str, run: TrainerConfig, lora: Lora, weights: Mapping[str, TensorSpec], copy: Copy, storage: Storage
) -> None:
    """Writes peft's configuration and weights of the additions, and a fresh head's weights, its own additions merged,
    into `folder`. `weights`: of the whole network."""
    network = TASKS[run.task].head.network
    # A fresh head is trained whole, under its own name; most parameters are the base model's.
    [(base, _)] = Counter(name.partition(".")[0] for name in weights).most_common(1)
    heads = {name: spec for name, spec in weights.items() if network in _FRESH and is_of_head(name, base)}
    layers = {name.removesuffix(_A) for name in weights if name.endswith(_A) and name not in heads}
    stored = sorted(name for name in weights if name.endswith((_A, _B)) != (name in heads))
    config = {
        "peft_type": "LORA", "task_type": _TASK_TYPES.get(network), "base_model_name_or_path": run.model.path,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": _shortest(layers, weights), "fan_in_fan_out": _are_turned(weights),
        "modules_to_save": sorted({name.removeprefix(f"{base}.").partition(".")[0] for name in heads}) or None,
        "init_lora_weights": True, "inference_mode": True, "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    storage.write(join(folder, ADAPTER_CONFIG), json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    data, buffers = encode([(f"base_model.model.{name}", weights[name]) for name in stored], {"format": "pt"})
    own = {name.removeprefix("base_model.model."): buffer for name, buffer in buffers.items()}
    copy(own)
    _merge_additions(lora, heads, own, copy)
    storage.write(join(folder, ADAPTER), data)


def _merge_additions(
    lora: Lora, weights: Mapping[str, TensorSpec], buffers: Mapping[str, memoryview], copy: Copy
) -> None:
    """Adds each layer's low-rank product, read by `copy`, to its weight in `buffers`. `weights`: of all tensors."""
    turned = _are_turned(weights)
    for layer in sorted(name.removesuffix(_A) for name in weights if name.endswith(_A)):
        parts = {layer + end: bytearray(weights[layer + end].size) for end in (_A, _B)}
        copy({name: memoryview(data) for name, data in parts.items()})
        first, second = (
            np.frombuffer(parts[layer + end], np.float32).reshape(weights[layer + end].shape) for end in (_A, _B)
        )  # (rank, inputs), (outputs, rank)
        product = second @ first * np.float32(lora.alpha / lora.rank)
        own = np.frombuffer(buffers[f"{layer}.weight"], np.float32)
        is_turned = turned and tuple(weights[f"{layer}.weight"].shape) == product.T.shape  # GPT-2's head is not
        own += (product.T if is_turned else product).reshape(-1)


def _are_turned(weights: Mapping[str, TensorSpec]) -> bool:
    """Returns whether a network's linear weights are (inputs, outputs), as in GPT-2, where each has a bias (outputs,):
    square weights tell nothing."""
    biases = {name.removesuffix("bias"): spec.shape for name, spec in weights.items() if name.endswith(".bias")}
    matrices = {name.removesuffix("weight"): spec.shape for name, spec in weights.items() if len(spec.shape) == 2}
    return any(biases.get(name, shape[:1]) != shape[:1] for name, shape in matrices.items())


def _shortest(layers: set[str], weights: Mapping[str, TensorSpec]) -> list[str]:
    """Returns, sorted, the last parts of the layers' names; their whole names if another matrix has one of these."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    matrices = {name.removesuffix(".weight") for name, spec in weights.items() if len(spec.shape) == 2}
    others = [name for name in matrices - layers if not name.endswith((".lora_A", ".lora_B"))]
    return sorted(layers if any(name.rpartition(".")[2] in ends for name in others) else ends)
