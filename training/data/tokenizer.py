"""Tokenizers: trained like the public recipe's, saved as a Hugging Face tokenizer folder, and recognised by a hash.

Normalisation and special tokens are those of transformers' examples/tensorflow/language-modeling-tpu/train_unigram.py: ``quotes'' become ",
Metaspace pieces, `[CLS] text [SEP]`. The same text gives the same tokenizer, byte for byte (training runs on one thread for that).

A folder holds tokenizer.json, tokenizer_config.json and special_tokens_map.json: `transformers.AutoTokenizer.from_pretrained(folder)` loads it. That
function does not read gs://; `fetch` copies a folder first. Needs `tokenizers` only inside `train` and `load`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.masking import SpecialTokens, special_tokens
from training.errors import BadInput

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]
ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"}
Algorithm = Literal["unigram", "wordpiece"]


@dataclass(frozen=True)
class Tokenizer:
    """What data needs to know of a tokenizer; its `content` is tokenizer.json."""

    url: str
    content: bytes
    hash: str
    special: SpecialTokens


def read(url: str) -> Tokenizer:
    """A tokenizer folder, local or gs://, without any framework. Raises BadInput."""
    where = storage.join(url, FILE)
    try:
        content = storage.read(where)
    except storage.NotFound as error:
        raise BadInput(f"{url} is not a tokenizer folder: {error}. Make one with `tpu-train tokenizer --out {url}`") from None
    try:
        parsed = json.loads(content)
        special = special_tokens(parsed, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{where} is not a tokenizer of the `tokenizers` library: {error!r}") from None
    return Tokenizer(url, content, hash_of(content), special)


def hash_of(content: bytes) -> str:
    """Names what turns text into ids: tokenizer.json without the truncation and padding that `save_pretrained` may have left in it."""
    parsed = {key: value for key, value in json.loads(content).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fetch(url: str, folder: Path) -> Path:
    """A local folder with the tokenizer's files, for AutoTokenizer; `folder` is used only when `url` is in a bucket."""
    if not storage.is_remote(url):
        return Path(url)
    found = storage.listing(url)
    if not any(storage.name_of(each.url) == FILE for each in found):
        raise BadInput(f"{url} is not a tokenizer folder: it has no {FILE}. Make one with `tpu-train tokenizer --out {url}`")
    for each in found:
        storage.download(each.url, folder / storage.name_of(each.url))
    return folder


def files(content: bytes) -> dict[str, bytes]:
    """The folder's files for a tokenizer.json."""
    config: dict[str, Any] = {
        **ROLES,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    dump = {CONFIG: config, "special_tokens_map.json": ROLES}
    return {FILE: content, **{name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in dump.items()}}


def train(documents: Iterable[str], vocabulary: int, algorithm: Algorithm) -> bytes:
    """tokenizer.json of a tokenizer trained on the documents. Raises BadInput when the text is too small for the vocabulary."""
    # Several threads would add up scores in an order that depends on timing.
    with _one_thread():
        tokenizers = _library()
        trained = _unigram(tokenizers, vocabulary, documents) if algorithm == "unigram" else _wordpiece(tokenizers, vocabulary, documents)
        ids = {token: trained.token_to_id(token) for token in ("[CLS]", "[SEP]")}
        trained.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=list(ids.items())
        )
        text: str = trained.to_str(pretty=True)
        return (text + "\n").encode()


def load(tokenizer: Tokenizer) -> Any:
    """The `tokenizers.Tokenizer`, without truncation or padding."""
    loaded = _library().Tokenizer.from_str(tokenizer.content.decode())
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[npt.NDArray[np.int32]]]:
    """Texts to ids with special tokens around each, on all cores."""
    loaded = load(tokenizer)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def encode(texts: list[str]) -> list[npt.NDArray[np.int32]]:
        return [np.array(each.ids, np.int32) for each in loaded.encode_batch_fast(texts)]

    return encode


def _unigram(tokenizers: Any, vocabulary: int, documents: Iterable[str]) -> Any:
    trained = tokenizers.Tokenizer(tokenizers.models.Unigram())
    trained.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Replace("``", '"'), tokenizers.normalizers.Replace("''", '"')]
    )
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trained.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=vocabulary, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False)
    return _trained(trained, trainer, documents, vocabulary)


def _wordpiece(tokenizers: Any, vocabulary: int, documents: Iterable[str]) -> Any:
    trained = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    trained.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trained.decoder = tokenizers.decoders.WordPiece(prefix="##")
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    return _trained(trained, trainer, documents, vocabulary)


def _trained(tokenizer: Any, trainer: Any, documents: Iterable[str], vocabulary: int) -> Any:
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for document in documents:
            seen += 1
            yield document

    try:
        tokenizer.train_from_iterator(counted(), trainer=trainer)
    except Exception as error:
        if type(error) is not Exception:  # the Rust library raises plain Exception; a reader's own error goes through
            raise
        raise BadInput(
            f"a tokenizer of {vocabulary} ids can't be trained on this text: {error}. Give more text or a smaller --vocabulary"
        ) from error
    if not seen:
        raise BadInput("the corpus has no text to train a tokenizer on")
    return tokenizer


class _one_thread:
    """TOKENIZERS_PARALLELISM=false for a while."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = self.before


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise BadInput("this needs the `tokenizers` package: run it in the image, or pip install 'tpu-launch[train]'") from None
    return tokenizers
