"""Trains tokenizers like the public recipe's: the same text gives the same tokenizer, byte for byte.

Normalisation and special tokens are those of transformers' examples/tensorflow/language-modeling-tpu/train_unigram.py:
``quotes'' become ", Metaspace pieces, `[CLS] text [SEP]`. sentencepiece trains Unigram vocabularies on one thread,
because with more its sums depend on their order; `tokenizers` trains WordPiece ones on one thread, in two passes
(`_train_wordpiece`). `tokenizers`' own Unigram trainer walks a hash table whose order is new in every process.

Failure model: `write_tokenizer` writes tokenizer.json last. Without it a folder is not a tokenizer, and the same
command writes the rest again.
"""

import hashlib
import heapq
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from training import storage
from training.data.tokenizer import FILE, SPECIAL, library
from training.data.tokenizer import files as tokenizer_files
from training.errors import BadInput

QUOTES = (("``", '"'), ("''", '"'))
Algorithm = Literal["unigram", "wordpiece"]
MAX_WORDS = 1 << 18  # the most frequent words decide a Unigram vocabulary
MAX_PIECE = 16  # characters
MAX_WORD = 512  # characters; the time of sentencepiece's trainer grows with the square of a word's length
RESERVED = re.compile("[\t\r\n\0▅]")  # characters with a meaning of their own in sentencepiece's input


def train_tokenizer(documents: Callable[[], Iterable[str]], vocabulary: int, algorithm: Algorithm) -> bytes:
    """Trains a tokenizer with at most `vocabulary` ids, special tokens included. Returns the content of tokenizer.json.
    `documents` is called to read the corpus, for "wordpiece" twice, and must give the same documents each time.
    "wordpiece" also turns TOKENIZERS_PARALLELISM off. Raises BadInput when there is no text, its characters need more
    ids, or `tokenizers` is not installed."""
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
    """Writes a tokenizer folder: `content` as tokenizer.json, and the two files that `tokenizer.files` adds. Returns
    False when all three were already there. Raises BadInput when one of them differs, unless `overwrite` allows
    replacing it, and StorageError."""
    files = tokenizer_files(content)
    existing = {name: _read_or_none(storage.join(url, name)) for name in files}
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


def _read_or_none(url: str) -> bytes | None:
    """Returns the content of a file; None if it does not exist."""
    try:
        return storage.read(url)
    except storage.NotFound:
        return None


def count_words(documents: Iterable[str]) -> dict[str, int]:
    """Counts the words (word -> count) that a Unigram vocabulary is trained on: text between special tokens, with plain
    quotation marks, cut before each space. A word begins with that space, as ▁; so does the first of a text."""
    special, word = re.compile("|".join(map(re.escape, SPECIAL))), re.compile("▁[^▁]*|[^▁]+")
    counts: Counter[str] = Counter()
    for document in documents:
        for quotes, replacement in QUOTES:
            document = document.replace(quotes, replacement)
        for text in special.split(document):
            marked = text.replace(" ", "▁")
            if marked:
                counts.update(word.findall(marked if marked.startswith("▁") else "▁" + marked))
    return dict(counts)


def _train_unigram(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    """Returns a `tokenizers.Tokenizer` with a Unigram model, whose pieces sentencepiece trains on the words' counts.
    Raises BadInput if there is no text, or `vocabulary` has no room for its characters and the special tokens."""
    counts = count_words(documents())
    if not counts:
        raise BadInput("the corpus has no text to train a tokenizer on")
    characters = {character for word in counts for character in word}
    if len(characters) > vocabulary - len(SPECIAL):
        raise BadInput(
            f"--vocabulary {vocabulary} is too small: the text has {len(characters)} different characters, and there "
            f"are {len(SPECIAL)} special tokens"
        )
    pieces = _unigram_pieces(counts, characters, vocabulary - len(SPECIAL))
    model = tokenizers.models.Unigram([*((token, 0.0) for token in SPECIAL), *pieces], SPECIAL.index("<unk>"), False)
    trained = tokenizers.Tokenizer(model)
    trained.add_special_tokens(SPECIAL)
    trained.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(*quotes) for quotes in QUOTES])
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trained.decoder = tokenizers.decoders.Metaspace()
    return trained


def _unigram_pieces(counts: Mapping[str, int], characters: set[str], size: int) -> list[tuple[str, float]]:
    """Returns at most `size` pieces and their log probabilities, best first; every character is a piece."""
    lines: Counter[str] = Counter()
    for word, count in _most_frequent(counts):
        for part in filter(None, RESERVED.split(word)):
            for start in range(0, len(part), MAX_WORD):
                lines[part[start : start + MAX_WORD]] += count
    scores = _train_sentencepiece(lines, size) if lines else {}
    # Reserved characters, such as line ends, become the least probable pieces.
    missing, lowest = characters - scores.keys(), min(scores.values(), default=0.0)
    ranked = sorted(scores.items(), key=lambda entry: (entry[0] not in characters, -entry[1], entry[0]))
    kept = ranked[: size - len(missing)] + [(character, lowest) for character in missing]
    return sorted(kept, key=lambda entry: (-entry[1], entry[0]))


def _train_sentencepiece(words: Mapping[str, int], size: int) -> dict[str, float]:
    """Trains about `size` pieces on words and their counts. Returns piece -> log probability."""
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{word}\t{count}" for word, count in sorted(words.items())]),
        input_format="tsv",
        model_writer=trained,
        model_type="unigram",
        vocab_size=size + 1,  # and <unk>
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentencepiece_length=MAX_PIECE,
        max_sentence_length=1 << 30,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        split_by_number=False,
        num_threads=1,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    return {model.id_to_piece(id): round(min(model.get_score(id), 0.0), 6) for id in range(1, len(model))}


def _most_frequent(words: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the MAX_WORDS most frequent words and their counts. A hash orders equally frequent ones: in text without
    spaces every sentence is a word that occurs once, and the alphabet's first would be a sample of few characters."""

    def rank(entry: tuple[str, int]) -> tuple[int, bytes]:
        word, count = entry
        return -count, hashlib.blake2b(word.encode(), digest_size=16).digest()

    return heapq.nsmallest(MAX_WORDS, words.items(), key=rank)


def _train_wordpiece(tokenizers: Any, vocabulary: int, documents: Callable[[], Iterable[str]]) -> Any:
    """Returns a `tokenizers.Tokenizer` with a WordPiece model of lower-cased text. Raises BadInput if there is no text,
    or `vocabulary` has no room for its characters. Sets TOKENIZERS_PARALLELISM to false. Trains twice, so that the
    result does not depend on a hash table's order: the library numbers marked characters ("##a") in it, and breaks ties
    between pairs by these numbers. The second training gets those of the first, sorted, as special tokens."""

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

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    first = train(SPECIAL).get_vocab()
    marked = sorted(token for token in first if token.startswith("##") and len(token) == 3)
    if not set(first) - set(SPECIAL):
        raise BadInput("the corpus has no text to train a tokenizer on")
    trained = train(SPECIAL + marked)
    if trained.get_vocab_size() > vocabulary:
        raise BadInput(
            f"--vocabulary {vocabulary} is too small: the text's characters alone take {trained.get_vocab_size()} ids"
        )
    return trained
