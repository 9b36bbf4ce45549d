"""Tokenizers: trained like the public recipe's, saved as a Hugging Face tokenizer folder, and recognised by a hash.

Normalisation and special tokens are those of transformers' examples/tensorflow/language-modeling-tpu/train_unigram.py:
``quotes'' become ", Metaspace pieces, `[CLS] text [SEP]`. The same text gives the same tokenizer, byte for byte:
Unigram vocabularies are trained here (`training.data.prepare.unigram`), and WordPiece ones by the `tokenizers` library
on one thread, twice, see `_wordpiece`.

A folder holds tokenizer.json, tokenizer_config.json and special_tokens_map.json:
`transformers.AutoTokenizer.from_pretrained(folder)` loads it. That function does not read gs://; `fetch` copies a
folder first. Needs `tokenizers` only inside `train` and `load`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import tokenizer_hash
from training.data.prepare import unigram
from training.data.sampling.masking import SpecialTokens, special_tokens
from training.errors import BadInput
from training.storage.hub import tokenizer_folder

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]
ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"}
QUOTES = (("``", '"'), ("''", '"'))
Algorithm = Literal["unigram", "wordpiece"]


@dataclass(frozen=True)
class Tokenizer:
    """What data needs to know of a tokenizer; its `content` is tokenizer.json."""

    url: str
    content: bytes
    hash: str
    special: SpecialTokens


def read(url: str) -> Tokenizer:
    """A tokenizer folder (local, gs:// or a name on the Hub), without any framework. Raises BadInput."""
    url = tokenizer_folder(url)
    where = storage.join(url, FILE)
    try:
        content = storage.read(where)
    except storage.NotFound as error:
        raise BadInput(
            f"{url} is not a tokenizer folder: {error}. Make one with `tpu-train tokenizer --out {url}`"
        ) from None
    try:
        parsed = json.loads(content)
        special = special_tokens(parsed, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{where} is not a tokenizer of the `tokenizers` library: {error!r}") from None
    return Tokenizer(url, content, tokenizer_hash(content), special)


def fetch(url: str, folder: Path) -> Path:
    """A local folder with the tokenizer's files, for AutoTokenizer; `folder` is used only when `url` is in a bucket."""
    url = tokenizer_folder(url)
    if not storage.is_remote(url):
        return Path(url)
    found = storage.listing(url)
    if not any(storage.name_of(each.url) == FILE for each in found):
        raise BadInput(
            f"{url} is not a tokenizer folder: it has no {FILE}. Make one with `tpu-train tokenizer --out {url}`"
        )
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
    return {
        FILE: content,
        **{name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in dump.items()},
    }


def train(documents: Callable[[], Iterable[str]], vocabulary: int, algorithm: Algorithm) -> bytes:
    """tokenizer.json of a tokenizer trained on the documents, with at most `vocabulary` ids. Raises BadInput when the
    text does not fit."""
    tokenizers = _library()
    trained = (
        _unigram(tokenizers, vocabulary, documents)
        if algorithm == "unigram"
        else _wordpiece(tokenizers, vocabulary, documents)
    )
    ids = {token: trained.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    content = json.loads(trained.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] in SPECIAL]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def words(documents: Iterable[str]) -> dict[str, int]:
    """The words of a Unigram vocabulary with their counts: a space is the beginning of a word and becomes part of
    it."""
    special, word = re.compile("|".join(map(re.escape, SPECIAL))), re.compile("▁[^▁]*|[^▁]+")
    counts: Counter[str] = Counter()
    for document in documents:
        for text in special.split(_unquoted(document)):
            marked = text.replace(" ", "▁")
            if marked:
                counts.update(word.findall(marked if marked.startswith("▁") else "▁" + marked))
    return dict(counts)


def _unquoted(text: str) -> str:
    for written, meant in QUOTES:
        text = text.replace(written, meant)
    return text


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


def encoder_of(url: str) -> Callable[[list[str]], list[npt.NDArray[np.int32]]]:
    """`encoder` for a tokenizer folder."""
    return encoder(read(url))


def _unigram(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    counts = words(documents())
    if not counts:
        raise BadInput("the corpus has no text to train a tokenizer on")
    try:
        pieces = unigram.train(counts, vocabulary - len(SPECIAL))
    except ValueError as error:
        raise BadInput(
            f"--vocabulary {vocabulary} is too small: {error}, and there are {len(SPECIAL)} special tokens"
        ) from None
    model = tokenizers.models.Unigram([*((token, 0.0) for token in SPECIAL), *pieces], SPECIAL.index("<unk>"), False)
    trained = tokenizers.Tokenizer(model)
    trained.add_special_tokens(SPECIAL)
    trained.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(*each) for each in QUOTES])
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trained.decoder = tokenizers.decoders.Metaspace()
    return trained


def _wordpiece(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    """The library numbers the marked characters ("##a") in the order of a hash table, and settles ties between pairs by
    those numbers. So they are learned in a first training, and given in order, as if they were special tokens, to a
    second one."""

    def trained(special: list[str]) -> Any:
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
        made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        made.decoder = tokenizers.decoders.WordPiece(prefix="##")
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=vocabulary, special_tokens=special, show_progress=False
        )
        made.train_from_iterator(documents(), trainer=trainer)
        return made

    with _one_thread():
        marked = sorted(token for token in trained(SPECIAL).get_vocab() if token.startswith("##") and len(token) == 3)
        if not marked:
            raise BadInput("the corpus has no text to train a tokenizer on")
        result = trained(SPECIAL + marked)
    if result.get_vocab_size() > vocabulary:
        raise BadInput(
            f"--vocabulary {vocabulary} is too small: the text's characters alone take {result.get_vocab_size()} ids"
        )
    return result


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
        raise BadInput(
            "this needs the `tokenizers` package: run it in the image, or pip install 'tpu-launch[train]'"
        ) from None
    return tokenizers
