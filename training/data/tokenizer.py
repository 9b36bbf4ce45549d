"""Reads tokenizer folders, identifies them by a hash, and encodes text.

A folder holds tokenizer.json, tokenizer_config.json and special_tokens_map.json, as Hugging Face tokenizers do:
`transformers.AutoTokenizer.from_pretrained(folder)` loads it. `training.data.prepare.tokenizer_training` makes such
folders. Only `load` needs the `tokenizers` library.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import tokenizer_hash
from training.data.sampling.masking import SpecialTokens, special_tokens
from training.errors import BadInput
from training.storage.hub import tokenizer_folder

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
SPECIAL = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]
ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"}

Encode = Callable[[list[str]], list[npt.NDArray[np.int32]]]


@dataclass(frozen=True)
class Tokenizer:
    """The content of a tokenizer folder: `content` is tokenizer.json, `hash` its `tokenizer_hash`."""

    url: str
    content: bytes
    hash: str
    special: SpecialTokens


def read(url: str, rows: str = "packed") -> Tokenizer:
    """Reads a tokenizer folder (local, gs://, or a name on the Hub, which is downloaded), without any framework. Raises
    BadInput without a tokenizer.json that has the special tokens that `rows`, a manifest's kind, need; StorageError."""
    url = tokenizer_folder(url)
    file_url = storage.join(url, FILE)
    try:
        content = storage.read(file_url)
    except storage.NotFound as error:
        raise BadInput(
            f"{url} is not a tokenizer folder: {error}. Make one with `tpu-train tokenizer --out {url}`"
        ) from None
    try:
        named = {} if rows == "packed" else _named_tokens(url)
        special = special_tokens(json.loads(content), file_url, rows, named.get("pad_token"), named.get("eos_token"))
        return Tokenizer(url, content, tokenizer_hash(content), special)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{file_url} is not a tokenizer of the `tokenizers` library: {error!r:.200}") from None


def _named_tokens(url: str) -> dict[str, str]:
    """Returns role ("eos_token") -> token of a folder's tokenizer_config.json; {} without one. Raises BadInput if that
    is no JSON object, and StorageError."""
    config_url = storage.join(url, CONFIG)
    try:
        values = json.loads(storage.read(config_url)).items()
    except storage.NotFound:
        return {}
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"{config_url} is not a JSON object: {error!r:.200}") from None
    tokens = {role: value.get("content") if isinstance(value, dict) else value for role, value in values}
    return {role: token for role, token in tokens.items() if isinstance(token, str)}


def files(content: bytes) -> dict[str, bytes]:
    """Returns name -> content of a folder: tokenizer.json, and AutoTokenizer's two files, which are always the same."""
    config: dict[str, Any] = {
        **ROLES,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    values = {CONFIG: config, SPECIAL_TOKENS: ROLES}
    return {
        FILE: content,
        **{name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in values.items()},
    }


def load(tokenizer: Tokenizer) -> Any:
    """Returns the `tokenizers.Tokenizer`, without truncation or padding. Raises BadInput if the library is missing or
    refuses the tokenizer."""
    tokenizers = library()
    try:
        loaded = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    except Exception as error:  # the library raises Exception itself
        place = storage.join(tokenizer.url, FILE)
        raise BadInput(f"{place} is not a tokenizer of the `tokenizers` library: {error!s:.200}") from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def encoder(tokenizer: Tokenizer) -> Encode:
    """Returns a function from texts to the ids of each, with special tokens around them. Sets TOKENIZERS_PARALLELISM,
    unless it is set, so that encoding uses all cores. Raises BadInput as `load`."""
    loaded = load(tokenizer)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def encode(texts: list[str]) -> list[npt.NDArray[np.int32]]:
        return [np.array(encoding.ids, np.int32) for encoding in loaded.encode_batch_fast(texts)]

    return encode


def word_encoder(tokenizer: Tokenizer) -> Callable[[list[tuple[str, ...]]], list[npt.NDArray[np.int32]]]:
    """Returns a function from lists of words to (2, tokens) of each: ids, with special tokens around them; and the
    number of the word that begins at the token, -1 at all others. Raises BadInput as `load`."""
    loaded = load(tokenizer)
    if hasattr(loaded.pre_tokenizer, "add_prefix_space"):
        loaded.pre_tokenizer.add_prefix_space = True  # byte-level: a word after a space is another token

    def encode(texts: list[tuple[str, ...]]) -> list[npt.NDArray[np.int32]]:
        rows = []
        for encoding in loaded.encode_batch(texts, is_pretokenized=True):
            words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)  # (tokens,)
            begins = np.diff(words, prepend=-1) != 0
            rows.append(np.stack([np.array(encoding.ids, np.int32), np.where(begins, words, -1)]))
        return rows

    return encode


class PairEncoder:
    """Encodes pairs of texts as transformers does, cut from the end of the longer one until they fit. `cut` counts the
    pairs that were cut so far."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        """`length`: the most tokens of a pair. Raises BadInput as `load`, or if special tokens leave no room."""
        self._loaded, self.cut = load(tokenizer), 0
        special = self._loaded.num_special_tokens_to_add(is_pair=True)
        if length <= special:
            raise BadInput(f"--sequence-length {length} has no room for text: a pair has {special} special tokens")
        self._loaded.enable_truncation(length, strategy="longest_first")

    def __call__(self, pairs: list[tuple[str, ...]]) -> list[npt.NDArray[np.int32]]:
        """Returns (2, tokens) of each pair: ids, with special tokens, and the number of the text, 0 or 1."""
        encodings = self._loaded.encode_batch(pairs)
        self.cut += sum(bool(encoding.overflowing) for encoding in encodings)
        return [np.array([encoding.ids, encoding.type_ids], np.int32) for encoding in encodings]


def library() -> Any:
    """Imports and returns the `tokenizers` package. Raises BadInput if it is missing."""
    try:
        import tokenizers
    except ImportError:
        raise BadInput(
            "this needs the `tokenizers` package: run it in the image, or pip install 'tpu-launch[train]'"
        ) from None
    return tokenizers
