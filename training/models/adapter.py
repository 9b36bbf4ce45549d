"""LoRA's result: peft's two files, which peft and vLLM load onto the starting model, or a model with the additions
merged into its weights. Needs no framework.

The layout is peft's (https://github.com/huggingface/peft, `PeftModel.save_pretrained`): `adapter_config.json`, and
`adapter_model.safetensors` with the trained parameters, named `base_model.model.<parameter>`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from training.checkpoint.tensors import TensorSpec, encode
from training.config import Lora, TrainerConfig
from training.models.families import is_of_head
from training.registry import TASKS
from training.storage import Storage, join

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_TASK_TYPES = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}  # peft's; it has none for MaskedLM

Copy = Callable[[Mapping[str, memoryview]], None]


@dataclass(frozen=True)
class Adapter:
    """Writes the weights that a run with LoRA trained, or merges them into the starting model's."""

    lora: Lora
    base: str  # the starting model
    network: str  # of training.registry.Head

    def write(self, folder: str, weights: Mapping[str, TensorSpec], copy: Copy, storage: Storage) -> None:
        """Writes peft's configuration and weights of the adapter, and a fresh head's weights, into `folder`. `weights`:
        of the whole network; `copy`: fills buffers with the named weights."""
        layers = {name.removesuffix(_A) for name in weights if name.endswith(_A)}
        # A fresh head is trained whole, under its own name.
        base = next(iter(layers)).partition(".")[0]
        heads = [name for name in weights if is_of_head(name, base)] if self.network in _FRESH else []
        stored = sorted([name for name in weights if name.endswith((_A, _B))] + heads)
        config = {
            "peft_type": "LORA", "task_type": _TASK_TYPES.get(self.network), "base_model_name_or_path": self.base,
            "r": self.lora.rank, "lora_alpha": self.lora.alpha, "lora_dropout": 0.0, "bias": "none",
            "target_modules": _shortest(layers, weights), "fan_in_fan_out": _are_turned(weights),
            "modules_to_save": sorted({name.removeprefix(f"{base}.").partition(".")[0] for name in heads}) or None,
            "init_lora_weights": True, "inference_mode": True, "use_dora": False, "use_rslora": False,
        }  # fmt: skip
        storage.write(join(folder, ADAPTER_CONFIG), json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
        data, buffers = encode([(f"base_model.model.{name}", weights[name]) for name in stored], {"format": "pt"})
        copy({name.removeprefix("base_model.model."): buffer for name, buffer in buffers.items()})
        storage.write(join(folder, ADAPTER), data)

    def merge(self, weights: Mapping[str, TensorSpec], buffers: Mapping[str, memoryview], copy: Copy) -> None:
        """Adds each layer's low-rank product to its weight in `buffers`. `weights`, `copy`: as for `write`."""
        turned = _are_turned(weights)
        for layer in sorted(name.removesuffix(_A) for name in weights if name.endswith(_A)):
            parts = {layer + end: bytearray(weights[layer + end].size) for end in (_A, _B)}
            copy({name: memoryview(data) for name, data in parts.items()})
            first, second = (
                np.frombuffer(parts[layer + end], np.float32).reshape(weights[layer + end].shape) for end in (_A, _B)
            )  # (rank, inputs), (outputs, rank)
            product = second @ first * np.float32(self.lora.alpha / self.lora.rank)
            own = np.frombuffer(buffers[f"{layer}.weight"], np.float32)
            own += (product.T if turned else product).reshape(-1)


_FRESH = tuple(entry.head.network for entry in TASKS.values() if entry.head.is_fresh)


def adapter_of(config: TrainerConfig) -> Adapter | None:
    """Returns the `Adapter` that writes what a run with LoRA trains; None without LoRA or a starting model."""
    if config.lora is None or config.model.path is None:
        return None
    return Adapter(config.lora, config.model.path, TASKS[config.task].head.network)


def _are_turned(weights: Mapping[str, TensorSpec]) -> bool:
    """Returns whether the weights of layers with LoRA are (inputs, outputs), as in GPT-2; False if all are square."""
    layers = [name.removesuffix(_A) for name in weights if name.endswith(_A)]
    return any(weights[f"{layer}.weight"].shape[1] != weights[layer + _A].shape[1] for layer in layers)


def _shortest(layers: set[str], weights: Mapping[str, TensorSpec]) -> list[str]:
    """Returns the last parts of the layers' names, or whole names where another matrix has the same last part."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    matrices = {name.removesuffix(".weight") for name, spec in weights.items() if len(spec.shape) == 2}
    others = [name for name in matrices - layers if not name.endswith((".lora_A", ".lora_B"))]
    return sorted(layers if any(name.rpartition(".")[2] in ends for name in others) else ends)
