"""Families of networks that are computed faster than by transformers' own modules, or whose names differ. Needs no
framework.

Any other family trains through its own modules: its masked-LM head at all positions, unless it is built like one of
`MASKED_LM_HEADS` and gives the network's own result; a fresh head is what lies outside the network's base model.
"""

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

# Families with BERT's layers, in which our attention and dropout replace transformers'.
PATCHED = (*BERT_LIKE, "xlm-roberta", "camembert", "electra")

# Families whose positions count from the padding token's number + 1.
POSITIONS_AFTER_PAD = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "longformer", "mpnet",
)  # fmt: skip

# Decoders whose logits are `lm_head` of the last layer's output, and nothing more: it may be computed piece by piece.
PLAIN_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3")

# Decoders whose layers differ in their parameters alone, so that they run as a scan: loss and gradients are the same to
# 1e-6 (tests/container/test_family_parity.py).
SCANNED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2")

# Families whose attention over long rows is `models.torch.long_attention`.
LONG_ATTENTION = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "modernbert",
)  # fmt: skip

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
    "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout", "dropout",
    "embedding_dropout", "mlp_dropout", "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout",
    "pooler_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
)  # fmt: skip


def is_of_head(name: str, base: str) -> bool:
    """Returns whether a parameter is outside the base model, whose names begin with `base`, or in its pooler: a
    starting model may lack it, and a run with a fresh head trains it."""
    return not name.startswith(f"{base}.") or ".pooler." in name


def dropout_rates(values: Mapping[str, object], rate: float | None) -> dict[str, float]:
    """Returns the names of dropout rates of a network with this configuration, each with `rate`; {} for None, which
    keeps the network's own."""
    # Decoders' classifiers of words drop 0.1 by this name, which their configurations lack.
    names = {"classifier_dropout", *(name for name in DROPOUT_RATES if name in values)}
    return {} if rate is None else dict.fromkeys(sorted(names), rate)
