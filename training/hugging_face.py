"""A model's `config.json` in Hugging Face's terms: what the torch backends build from, and what the result is written with. Framework-free."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import storage
from training.config import Model
from training.errors import BadInput

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def config_of(model: Model, *, vocabulary: int, pad: int, dropout: float) -> dict[str, Any]:
    """The values of config.json. `vocabulary` is the tokenizer's. Raises BadInput when model.path has none."""
    if model.path is not None:
        return _read(model.path)
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


@contextlib.contextmanager
def local(folder: str) -> Iterator[str]:
    """The folder itself, or for as long as the block runs a copy of it when it is in a bucket."""
    if not storage.is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for each in storage.listing(folder):
            storage.download(each.url, Path(scratch) / storage.name_of(each.url))
        yield scratch


def _read(folder: str) -> dict[str, Any]:
    url = storage.join(folder, CONFIG)
    try:
        value: dict[str, Any] = json.loads(storage.read(url))
    except storage.NotFound:
        raise BadInput(f"model.path {folder} is not a model folder: it has no {CONFIG}") from None
    except ValueError as error:
        raise BadInput(f"{url} is not JSON: {error}") from None
    return value
