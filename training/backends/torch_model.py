"""Networks for the torch backends: built by name or read from a folder, and the sums of each task.

Model code is Hugging Face's; only the classes in use are imported, because importing all of transformers takes seconds. Attention is the plain
("eager") form: the fused one asks the mask for its values, which costs a device-to-host round trip each step under XLA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.config import Model
from training.errors import BadInput


def build(model: Model, *, vocabulary: int, pad: int, sequence_length: int, dropout: float, seed: int) -> torch.nn.Module:
    """A masked-language model in training mode on the CPU. The same seed gives the same weights on every host."""
    network = _named(model, vocabulary, pad, dropout, seed) if model.path is None else _from_folder(model.path, dropout)
    have = network.config.max_position_embeddings - (pad + 1 if model.family == "roberta" else 0)
    if sequence_length > have:
        raise BadInput(
            f"the dataset's rows have {sequence_length} tokens, but the model has only {have} positions; set model.max_positions, or make shorter rows"
        )
    if vocabulary > network.config.vocab_size:
        raise BadInput(
            f"the tokenizer has {vocabulary} tokens, but the model only {network.config.vocab_size}; "
            "train with the model's own tokenizer, or set model.vocabulary_size"
        )
    network.train()
    return network


def _named(model: Model, vocabulary: int, pad: int, dropout: float, seed: int) -> Any:
    hidden, layers, heads, intermediate, positions = model.shape
    sizes = {
        "vocab_size": model.vocabulary_size or vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": pad,
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    if model.family == "roberta":
        from transformers.models.roberta.configuration_roberta import RobertaConfig
        from transformers.models.roberta.modeling_roberta import RobertaForMaskedLM

        # RoBERTa counts positions from pad + 1.
        return RobertaForMaskedLM(
            RobertaConfig(**sizes, max_position_embeddings=positions + pad + 1, type_vocab_size=1, layer_norm_eps=1e-5)
        )
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForMaskedLM

    return BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=positions))


def _from_folder(path: str, dropout: float) -> Any:
    from transformers import AutoModelForMaskedLM

    try:
        return AutoModelForMaskedLM.from_pretrained(
            path, attn_implementation="eager", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"model.path {path}: {error}") from None


def mlm_sums(network: Any, batch: dict[str, Tensor]) -> Tensor:
    """(3,): weighted loss, weights, weighted hits (protocol.SUMS), over this host's rows. The head sees the masked positions only."""
    ids = batch["input_ids"].long()  # (rows, sequence)
    # Rows have no padding. Without any mask the model would look for some, which costs a device-to-host round trip each step.
    hidden = network.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]  # (rows, sequence, width)
    positions = batch["positions"].long().unsqueeze(-1).expand(-1, -1, hidden.shape[-1])  # (rows, predictions, width)
    head = network.cls if hasattr(network, "cls") else network.lm_head
    logits = head(torch.gather(hidden, 1, positions)).float().flatten(0, 1)  # (rows * predictions, vocabulary)
    labels = batch["labels"].long().flatten().clamp(min=0)  # (rows * predictions,)
    weights = batch["weights"].flatten()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    hits = (logits.argmax(-1) == labels).float()
    return torch.stack([(losses * weights).sum(), weights.sum(), (hits * weights).sum()])
