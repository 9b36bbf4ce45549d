"""Model folders in Hugging Face's layout, and the values of their `config.json`. Framework-free."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from training import storage
from training.config import Model
from training.errors import BadInput
from training.models.families import BERT_LIKE, DROPOUT, FAMILIES, POSITIONS_AFTER_PAD
from training.registry import MASKED_LM, BackendName, Head
from training.storage.hub import MODEL_FILES, model_folder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
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
    model: Model,
    *,
    vocabulary: int,
    pad: int,
    dropout: float | None,
    head: Head = MASKED_LM,
    labels: Sequence[str] | None = None,
    end: int | None = None,
) -> dict[str, Any]:
    """Returns the values of config.json for a network with this head: those of model.path or model.config, or of the
    named model. `vocabulary` is the tokenizer's size and `pad` the number of its padding token; both, and `dropout`
    (None: 0.1), are for a named model only. `labels` are the names of a classifier's classes. `vocabulary` and `end`,
    the end-of-text token, are for a model.config without its own. Raises BadInput if model.path has no config.json, or
    names no network."""
    try:
        if model.config is not None:
            size = model.vocabulary_size or vocabulary
            values = {"vocab_size": size, "bos_token_id": None, "eos_token_id": end, **model.config}
        else:
            values = _named_config(model, vocabulary, pad, dropout) if model.path is None else read_config(model.path)
    except BadInput as error:
        raise BadInput(f"model.path: {error}") from None
    return _with_fresh_head(values, head, labels, model) if head.is_fresh else values


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """Returns a classifier's classes in the order of their numbers; [] without any. Raises BadInput for bad numbers."""
    try:
        return [name for _, name in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    except (AttributeError, ValueError, TypeError):
        raise BadInput(f"{CONFIG}: id2label does not give each number of a class its name") from None


def require_family(values: Mapping[str, Any], path: str | None, head: Head, backend: BackendName) -> None:
    """Raises BadInput for a starting model that names no network, or whose family the backend can't train.
    `values`: of the model's config.json; `path`: for messages."""
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


def _with_fresh_head(values: dict[str, Any], head: Head, labels: Sequence[str] | None, model: Model) -> dict[str, Any]:
    """Returns `values` with the architecture, labels and problem type of a head. Raises as `_prefix`."""
    names = ("LABEL_0",) if labels is None else labels  # one number a text has transformers' default name
    own = {
        "architectures": [f"{_prefix(values, model.path)}{head.network}"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": head.problem_type,
    }
    return {**{name: value for name, value in values.items() if name not in ("_name_or_path", "num_labels")}, **own}


def _named_config(model: Model, vocabulary: int, pad: int, dropout: float | None) -> dict[str, Any]:
    """Returns the values of config.json for the BERT or RoBERTa of the section's name and sizes."""
    dropout = DROPOUT if dropout is None else dropout
    hidden, layers, heads, intermediate, positions = model.shape
    common = {
        "vocab_size": model.vocabulary_size or vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "hidden_act": "gelu",
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "initializer_range": 0.02,
        "pad_token_id": pad,
        "tie_word_embeddings": True,
    }
    if model.family == "roberta":
        # RoBERTa counts positions from pad + 1.
        own = {"max_position_embeddings": positions + pad + 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        return {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **common, **own}
    own = {"max_position_embeddings": positions, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    return {"model_type": "bert", "architectures": ["BertForMaskedLM"], **common, **own}


def has_weights(folder: str) -> bool:
    """Returns whether a folder has a model's weights, in one file or in several with an index."""
    return any(storage.stat(storage.join(folder, name)) for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def usable_positions(family: str, positions: int | None, pad: int) -> int | None:
    """Returns how many tokens a row of a network can have; None for any number."""
    return positions and positions - (pad + 1 if family in POSITIONS_AFTER_PAD else 0)


def require_positions(family: str, positions: int | None, pad: int, length: int) -> None:
    """Raises BadInput unless a network has a position for each token of a row. `positions`: None for any number."""
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


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Yields a local model folder: `folder` itself, or a copy of the `MODEL_FILES` of one in a bucket, deleted after
    the block."""
    folder = model_folder(folder)
    if not storage.is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for stat in storage.listing(folder):
            name = stat.url.removeprefix(folder.rstrip("/") + "/")
            if "/" not in name and any(fnmatch(name, pattern) for pattern in MODEL_FILES):
                storage.download(stat.url, Path(scratch) / name)
        yield scratch


def read_config(folder: str) -> dict[str, Any]:
    """Returns the values of a model folder's config.json. Raises BadInput if it is absent or has wrong values."""
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
