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
from training.hugging_face import config_of, local


def build(model: Model, *, vocabulary: int, pad: int, sequence_length: int, dropout: float, seed: int) -> torch.nn.Module:
    """A masked-language model in training mode on the CPU. The same seed gives the same weights on every host."""
    values = config_of(model, vocabulary=vocabulary, pad=pad, dropout=dropout)
    network = _fresh(values, seed) if model.path is None else _from_folder(model.path, dropout)
    positions = network.config.max_position_embeddings - (pad + 1 if network.config.model_type == "roberta" else 0)
    if sequence_length > positions:
        raise BadInput(
            f"the dataset's rows have {sequence_length} tokens, but the model has only {positions} positions; set model.max_positions, or make shorter rows"
        )
    if vocabulary > network.config.vocab_size:
        raise BadInput(
            f"the tokenizer has {vocabulary} tokens, but the model only {network.config.vocab_size}; "
            "train with the model's own tokenizer, or set model.vocabulary_size"
        )
    network.train()
    return network


def _fresh(values: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    if values["model_type"] == "roberta":
        from transformers.models.roberta.configuration_roberta import RobertaConfig
        from transformers.models.roberta.modeling_roberta import RobertaForMaskedLM

        return RobertaForMaskedLM(RobertaConfig(**values, attn_implementation="eager"))
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForMaskedLM

    return BertForMaskedLM(BertConfig(**values, attn_implementation="eager"))


def _from_folder(path: str, dropout: float) -> Any:
    """A model folder's network and weights. A weight that the folder lacks is refused: it would be random."""
    from transformers import AutoModelForMaskedLM

    try:
        with local(path) as folder:
            network, report = AutoModelForMaskedLM.from_pretrained(
                folder,
                attn_implementation="eager",
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
            )
    except (OSError, ValueError) as error:
        raise BadInput(f"model.path {path}: {error}") from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise BadInput(f"model.path {path} lacks {len(missing)} of the model's weights: {', '.join(missing[:5])}")
    return network


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
