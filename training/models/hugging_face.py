"""Model folders in Hugging Face's layout, the values of their `config.json`, and what differs between families of
networks. Framework-free.

Families in the tables below are computed faster than by transformers' own modules, or their names differ. Any other
family trains through its own modules: its masked-LM head at all positions, unless it is built like one of
`MASKED_LM_HEADS` and gives the network's own result; a fresh head is what lies outside the network's base model.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training import storage
from training.config import Model
from training.errors import BadInput
from training.registry import MASKED_LM, BackendName, Head
from training.storage.hub import model_folder

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
    """Returns the names of dropout rates of a network with this configuration, and "classifier_dropout", each with
    `rate`; {} for None, which keeps the network's own."""
    # Decoders' classifiers of words drop 0.1 by this name, which their configurations lack.
    names = {"classifier_dropout", *(name for name in DROPOUT_RATES if name in values)}
    return {} if rate is None else dict.fromkeys(sorted(names), rate)


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of an adapter alone
# Keys of config.json that are sizes of a network. Some families have them under other names.
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class ModelRequirements:
    """Says what the data needs of the model: embeddings for its tokens, positions for its rows, a head for its task."""

    vocabulary: int
    pad: int
    sequence_length: int  # of the longest row
    head: Head = MASKED_LM
    labels: tuple[str, ...] | None = None  # names of the classes, of a classifier


def build_model_config(
    model: Model, needs: ModelRequirements, dropout: float | None, end: int | None = None
) -> dict[str, Any]:
    """Returns the values of config.json for a network with the head that is needed: those of model.path (a folder, or a
    name on the Hub, which it downloads) or model.config, or of the named model. `dropout` (None: 0.1) and the padding
    are for a named model, `end`, the end-of-text token, is for a model.config without its own, and the vocabulary for
    both. Raises BadInput if config.json is absent or bad or, for a fresh head, names no network; StorageError."""
    try:
        if model.config is not None:
            size = model.vocabulary_size or needs.vocabulary
            values = {"vocab_size": size, "bos_token_id": None, "eos_token_id": end, **model.config}
        else:
            values = _named_config(model, needs, dropout) if model.path is None else read_config(model.path)
    except BadInput as error:
        raise BadInput(f"model.path: {error}") from None
    return _with_fresh_head(values, needs, model) if needs.head.is_fresh else values


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """Returns the names in `id2label` in the order of their numbers, which may have gaps; [] without it. Raises
    BadInput for a number that is not whole."""
    try:
        return [name for _, name in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    except (AttributeError, ValueError, TypeError):
        raise BadInput(f"{CONFIG}: id2label does not give each number of a class its name") from None


def require_family(values: Mapping[str, Any], path: str | None, head: Head, backend: BackendName) -> None:
    """Raises BadInput for a starting model whose family the backend can't train or, for a fresh head, that names no
    network. `values`: of the model's config.json; `path`: for messages."""
    family = values.get("model_type")
    if head.is_fresh:
        _prefix(values, path)
    if backend == "tensorflow" and family not in BERT_LIKE:
        raise BadInput(
            f"model.path {path} is a {family} model, and backend: tensorflow trains one of: {', '.join(BERT_LIKE)}; "
            "take backend: torch-xla"
        )


def _prefix(values: Mapping[str, Any], path: str | None) -> str:
    """Returns how the names of a family's networks begin: "Llama" of LlamaForCausalLM. Raises BadInput if neither the
    table nor the model's `architectures` tells."""
    if values.get("model_type") in FAMILIES:
        return FAMILIES[values["model_type"]].prefix
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    prefix = re.match(r"(\w+?)(For[A-Z]\w*|LMHeadModel|Model)$", name)
    if prefix is None:
        raise BadInput(
            f"model.path {path} is a {values.get('model_type')} model whose {CONFIG} names no network in architectures"
        )
    return prefix[1]


def _with_fresh_head(values: dict[str, Any], needs: ModelRequirements, model: Model) -> dict[str, Any]:
    """Returns `values` with the architecture, labels (None: one number) and problem type of the needed head, and for
    decoders the data's padding. Raises BadInput if nothing tells how names of the family's networks begin."""
    names = ("LABEL_0",) if needs.labels is None else needs.labels  # one number a text has transformers' default name
    own: dict[str, Any] = {
        "architectures": [f"{_prefix(values, model.path)}{needs.head.network}"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": needs.head.problem_type,
    }
    size, own_pad = values.get("vocab_size"), values.get("model_type") in (*FAMILIES, *POSITIONS_AFTER_PAD)
    if not own_pad and not (type(size) is int and size <= needs.pad):  # `check_capacity` refuses one that is too small
        own["pad_token_id"] = needs.pad  # decoders take the last token that is none
    return {**{name: value for name, value in values.items() if name not in ("_name_or_path", "num_labels")}, **own}


def _named_config(model: Model, needs: ModelRequirements, dropout: float | None) -> dict[str, Any]:
    """Returns the values of config.json for the masked-LM BERT or RoBERTa of the section's name and sizes. `needs`
    gives the padding and, unless the section does, the vocabulary; `dropout` None: 0.1."""
    dropout = DROPOUT if dropout is None else dropout
    hidden, layers, heads, intermediate, positions = model.shape
    common = {
        "vocab_size": model.vocabulary_size or needs.vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "hidden_act": "gelu",
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "initializer_range": 0.02,
        "pad_token_id": needs.pad,
        "tie_word_embeddings": True,
    }
    if model.family == "roberta":
        # RoBERTa counts positions from pad + 1.
        own = {"max_position_embeddings": positions + needs.pad + 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        return {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **common, **own}
    own = {"max_position_embeddings": positions, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    return {"model_type": "bert", "architectures": ["BertForMaskedLM"], **common, **own}


def has_weights(folder: str) -> bool:
    """Returns whether a folder (local or gs://) has model.safetensors or its index of several files; reads neither."""
    return any(storage.stat(storage.join(folder, name)) for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def usable_positions(family: str, positions: int | None, pad: int) -> int | None:
    """Returns how many tokens a row can have: `positions` of config.json, less pad + 1 in some families; None: any."""
    return positions and positions - (pad + 1 if family in POSITIONS_AFTER_PAD else 0)


def require_positions(family: str, positions: int | None, pad: int, length: int) -> None:
    """Raises BadInput if a row of `length` tokens has more than the network has positions: `positions` of config.json
    (None: any number), less pad + 1 in some families."""
    if (left := usable_positions(family, positions, pad)) and length > left:
        raise BadInput(
            f"the dataset's rows have {length} tokens, but the model has only {left} positions; set "
            "model.max_positions, or make shorter rows"
        )


def check_capacity(network_config: Any, requirements: ModelRequirements) -> None:
    """Raises BadInput unless the network has a position for each token of a row, and an embedding for each token of the
    tokenizer. `network_config`: transformers' PretrainedConfig."""
    family, network_config = network_config.model_type, network_config.get_text_config()
    positions = getattr(network_config, "max_position_embeddings", None)
    require_positions(family, positions, requirements.pad, requirements.sequence_length)
    if requirements.vocabulary > network_config.vocab_size:
        raise BadInput(
            f"the tokenizer has {requirements.vocabulary} tokens, but the model only {network_config.vocab_size}; "
            "train with the model's own tokenizer, or set model.vocabulary_size"
        )


def read_config(folder: str) -> dict[str, Any]:
    """Returns the values of config.json of a model folder, or of a name on the Hub, which it downloads, weights too.
    Raises BadInput if the Hub does not give it, or it is absent, is no JSON, has no model_type or, in `FAMILIES`, a bad
    size; StorageError if it can't be read."""
    url = storage.join(model_folder(folder), CONFIG)
    try:
        values: dict[str, Any] = json.loads(storage.read(url))
    except storage.NotFound:
        raise BadInput(f"{folder} is not a model folder: it has no {CONFIG}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{url} is not JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise BadInput(f"{url} is no model's: it has no model_type")
    for name in SIZES if values["model_type"] in FAMILIES else ():
        size = values.get(name, 1)
        if type(size) is not int or not 0 < size < 1 << 31:
            raise BadInput(f"{url}: {name} must be a whole number above 0, not {size!r:.80}")
    return values
