"""Trains tokenizers like the public recipe's: the same text gives the same tokenizer, byte for byte.

Normalisation and special tokens are those of transformers' examples/tensorflow/language-modeling-tpu/train_unigram.py:
``quotes'' become ", Metaspace pieces, `[CLS] text [SEP]`. Unigram vocabularies are trained by
`training.data.prepare.unigram`, WordPiece ones by the `tokenizers` library on one thread, in two passes
(`_train_wordpiece`). Needs the `tokenizers` library.

What can fail half-way: `write_tokenizer` writes tokenizer.json last. Without it a folder is not a tokenizer, and the
same command writes the rest again.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from training import storage
from training.data.prepare import unigram
from training.data.tokenizer import FILE, SPECIAL, library
from training.data.tokenizer import files as tokenizer_files
from training.errors import BadInput

QUOTES = (("``", '"'), ("''", '"'))
Algorithm = Literal["unigram", "wordpiece"]


def train_tokenizer(documents: Callable[[], Iterable[str]], vocabulary: int, algorithm: Algorithm) -> bytes:
    """Trains a tokenizer on documents.

    Args:
        documents: is called to read the corpus; must give the same documents each time.
        vocabulary: the largest number of ids, special tokens included.
        algorithm: of the model.

    Returns:
        The content of tokenizer.json.

    Raises:
        BadInput: there is no text, or it needs more ids.
    """
    tokenizers = library()
    train = _train_unigram if algorithm == "unigram" else _train_wordpiece
    trained = train(tokenizers, vocabulary, documents)
    ids = {token: trained.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    content = json.loads(trained.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def write_tokenizer(url: str, content: bytes, *, overwrite: bool = False) -> bool:
    """Writes a tokenizer folder.

    Args:
        url: the folder, local or gs://.
        content: of tokenizer.json.
        overwrite: replace another tokenizer.

    Returns:
        False where this very tokenizer was already there.

    Raises:
        BadInput: the folder holds another tokenizer.
        StorageError: storage can't be read or written.
    """
    files = tokenizer_files(content)
    existing = {name: _read_if_there(storage.join(url, name)) for name in files}
    if existing == files:
        return False
    different = [name for name, stored in existing.items() if stored not in (None, files[name])]
    if different and not overwrite:
        raise BadInput(
            f"{url} holds another tokenizer ({', '.join(different)} differs): use another --out, or --overwrite to "
            "replace it"
        )
    for name in sorted(files, key=lambda name: name == FILE):
        storage.write(storage.join(url, name), files[name])
    return True


def _read_if_there(url: str) -> bytes | None:
    try:
        return storage.read(url)
    except storage.NotFound:
        return None


def count_words(documents: Iterable[str]) -> dict[str, int]:
    """The words that a Unigram vocabulary is trained on, with their counts; a space is part of the word behind it."""
    special, word = re.compile("|".join(map(re.escape, SPECIAL))), re.compile("▁[^▁]*|[^▁]+")
    counts: Counter[str] = Counter()
    for document in documents:
        for text in special.split(_replace_quotes(document)):
            marked = text.replace(" ", "▁")
            if marked:
                counts.update(word.findall(marked if marked.startswith("▁") else "▁" + marked))
    return dict(counts)


def _replace_quotes(text: str) -> str:
    for quotes, replacement in QUOTES:
        text = text.replace(quotes, replacement)
    return text


def _train_unigram(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    counts = count_words(documents())
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
    trained.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(*quotes) for quotes in QUOTES])
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trained.decoder = tokenizers.decoders.Metaspace()
    return trained


def _train_wordpiece(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    """Trains twice, so that the result does not depend on a hash table's order.

    The library numbers the marked characters ("##a") in the order of a hash table, and breaks ties between pairs by
    those numbers. So a first training finds them, and a second one gets them in sorted order, as special tokens.
    """

    def train(special: list[str]) -> Any:
        trained = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
        trained.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        trained.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        trained.decoder = tokenizers.decoders.WordPiece(prefix="##")
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=vocabulary, special_tokens=special, show_progress=False
        )
        trained.train_from_iterator(documents(), trainer=trainer)
        return trained

    with _one_thread():
        first = train(SPECIAL).get_vocab()
        marked = sorted(token for token in first if token.startswith("##") and len(token) == 3)
        if not marked:
            raise BadInput("the corpus has no text to train a tokenizer on")
        trained = train(SPECIAL + marked)
    if trained.get_vocab_size() > vocabulary:
        raise BadInput(
            f"--vocabulary {vocabulary} is too small: the text's characters alone take {trained.get_vocab_size()} ids"
        )
    return trained


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sets TOKENIZERS_PARALLELISM=false, and restores it."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
