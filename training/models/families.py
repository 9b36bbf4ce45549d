"""Families of encoders, in the terms of Hugging Face's transformers. Framework-free.

transformers does not say how the masked-LM head is applied to some positions only, and which parameters a fresh head
has. Unlisted families are tried if their masked-LM head is built like one of these; the result is compared with the
network's own before it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DROPOUT = 0.1  # the rate of named models, as BERT's (https://arxiv.org/abs/1810.04805, A.2)


@dataclass(frozen=True)
class Family:
    """Names in the networks of a family."""

    prefix: str  # how the names of its networks begin: BertForMaskedLM
    # What a network with a fresh head (training.registry.Head) has beside its encoder: a starting model may lack these.
    fresh_parameters: tuple[str, ...] = ("classifier.",)


# By model_type of config.json: the families that can get a fresh head.
FAMILIES = {
    "bert": Family("Bert", ("classifier.", "bert.pooler.")),
    "roberta": Family("Roberta"),
    "distilbert": Family("DistilBert", ("classifier.", "pre_classifier.")),
    "modernbert": Family("ModernBert", ("classifier.", "head.")),
    "electra": Family("Electra"),
    "albert": Family("Albert", ("classifier.", "albert.pooler.")),
}

# The families that this program builds itself, and whose layers it knows.
BERT_LIKE = ("bert", "roberta")

# Families whose positions count from the padding token's number + 1.
POSITIONS_AFTER_PAD = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "longformer",
    "mpnet",
)

# The modules that make a masked-LM head, applied one after the other to hidden states, in PyTorch.
MASKED_LM_HEADS = (
    ("cls",),  # BERT, DeBERTa
    ("lm_head",),  # RoBERTa, Longformer, MPNet
    ("predictions",),  # ALBERT
    ("generator_predictions", "generator_lm_head"),  # ELECTRA
    ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),  # DistilBERT
    ("head", "decoder"),  # ModernBERT
)

# Keys of config.json that are rates of dropout; each family has some of them.
DROPOUT_RATES = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "hidden_dropout",
    "attention_dropout",
    "dropout",
    "embedding_dropout",
    "mlp_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
)


def dropout_rates(values: Mapping[str, object], rate: float | None) -> dict[str, float]:
    """Returns the names of dropout rates among the values of a network's configuration, each with `rate`; {} for None,
    which keeps the network's own."""
    return {} if rate is None else {name: rate for name in DROPOUT_RATES if name in values}
