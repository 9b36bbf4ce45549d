"""Every kind of corpus streams as documents, mistakes have file and line, and the split follows from the text."""

import csv
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import storage
from training.data.prepare import corpus, tokenizer_training
from training.data.prepare.corpus import Corpus, is_in_split
from training.data.prepare.tokenizer_training import count_words
from training.errors import BadInput


def documents(path: Path | str, field: str = "text") -> list[str]:
    return list(Corpus(str(path), field).documents())


@pytest.mark.parametrize("byte_order_mark", [b"", b"\xef\xbb\xbf"], ids=["", "as Excel writes it"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"one\ntwo\n\n  \n\nthree\r\n", ["one\ntwo", "three"]),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": "  "}\n', ["one"]),
        ("a.csv", b'text,b\r\n"one, with ""quotes"" and\na new line",1\r\n', ['one, with "quotes" and\na new line']),
    ],
)
def test_a_file_is_documents(
    tmp_path: Path, name: str, content: bytes, expected: list[str], byte_order_mark: bytes
) -> None:
    (tmp_path / name).write_bytes(byte_order_mark + content)
    assert documents(tmp_path / name) == expected


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "sub" / "c.csv").write_text("text\nthird\n")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert documents(tmp_path) == ["first", "second", "third"]


def test_a_word_of_a_column_may_hold_a_no_break_space(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("10\u00a0000\tB-X\n")
    assert [*Corpus(str(tmp_path), label="tag").rows()] == [{"text": ["10\u00a0000"], "tag": ["B-X"]}]


@given(st.text(alphabet="aé漢𝔘\n \r", max_size=60), st.integers(1, 9))
def test_lines_do_not_depend_on_size_of_pieces(tmp_path_factory: pytest.TempPathFactory, text: str, piece: int) -> None:
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_PIECE_BYTES", piece)
        read_lines = list(corpus.lines(str(path)))
    expected = text.split("\n")
    assert read_lines == [line.removesuffix("\r") for line in (expected if expected[-1] else expected[:-1])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\n\nb\xff", r"a.txt: not UTF-8 text near byte 7 \(after line 1\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: expected a JSON object"),
        ("a.JSON", b'{"text": "x"}\n', r"a.JSON would be read as text: rename it to .jsonl"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl:1 has no 'text', it has: 'body'. Name the text with --field"),
        ("a.jsonl", b'{"text": 5}\n', r"a.jsonl:1: 'text' is not text but int"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000 + b"\n", r"a.jsonl:2: not JSON: maximum recursion depth"),
        ("a.csv", b"text,b,text\nx,y,z\n", r"a.csv:1: the header names 'text' more than once: rename the columns"),
        ("a.csv", b"text,b\nx\n", r"a.csv:2: 2 columns expected, as in the header"),
        ("a.csv", b"text\nx,y\n", r"a.csv:2: 1 columns expected, as in the header"),
        ("a.csv", b'b,text\n1,"x\n2,y\n', r"a.csv:3: unexpected end of data: is a quotation mark not closed\?"),
        ("a.csv", b'b,text\n1,"x\n2,"y"\n', r"a.csv:3: ',' expected after '\"': is a quotation mark not closed\?"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        documents(tmp_path / name)


def test_a_csv_text_may_be_long_and_an_endless_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = csv.field_size_limit()
    texts = ["x" * 1_000_000, "short"]
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(texts))
    assert documents(tmp_path / "a.csv") == texts
    monkeypatch.setattr(corpus, "_LONGEST_CELL", 1000)
    with pytest.raises(BadInput, match=r"a.csv:2: field larger than field limit \(1000\): is a quotation mark not"):
        documents(tmp_path / "a.csv")
    assert csv.field_size_limit() == limit, "of other code in this process, such as a notebook's"


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    """Scraped text has them, where a program cut a string of UTF-16 in two."""
    rows = [r"cut \ud83d", r"\ude00 end", r"whole \ud83d\ude00", r"swapped \ude00\ud83d", "as text \U0001f600"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    texts = documents(tmp_path / "a.jsonl")
    assert texts == ["cut \ufffd", "\ufffd end", "whole \U0001f600", "swapped \ufffd\ufffd", "as text \U0001f600"]
    assert all(text.encode() for text in texts)
    assert [is_in_split(text, "train", 50) for text in texts].count(True) in range(6)


@pytest.mark.parametrize("name", ["builtin:other", "nothing.txt", "datasets:x"])
def test_a_corpus_that_is_not_there_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(BadInput, match=f"--corpus {name}"):
        documents(name)


@given(st.lists(st.text(max_size=8), max_size=30), st.floats(0, 100))
def test_every_document_is_in_exactly_one_split(texts: list[str], percent: float) -> None:
    for text in texts:
        assert is_in_split(text, "train", percent) != is_in_split(text, "evaluation", percent)
        assert all(is_in_split(text, split, None) for split in ("train", "evaluation"))


def test_the_evaluation_split_has_its_percentage() -> None:
    for percent in (0, 5, 100):
        chosen = sum(is_in_split(str(number), "evaluation", percent) for number in range(20_000))
        assert abs(chosen - 200 * percent) < (100 if percent == 5 else 1)


def test_a_bucket_is_a_folder_too_and_a_fingerprint_changes_with_the_text(tmp_path: Path, gcs: object) -> None:
    for folder in (str(tmp_path), "gs://bucket/x"):
        url = storage.join(folder, "a.jsonl")
        storage.write(url, json.dumps({"text": "one"}).encode())
        first = Corpus(folder).fingerprint
        assert Corpus(folder).fingerprint == first
        storage.write(url, json.dumps({"text": "größere Absätze"}, ensure_ascii=False).encode())
        assert Corpus(folder).fingerprint != first
        assert documents(folder) == ["größere Absätze"]
        assert Corpus(folder, "body").fingerprint != Corpus(folder).fingerprint
    assert Corpus("builtin:pydoc").fingerprint == Corpus("builtin:pydoc").fingerprint


def test_words_begin_with_their_space_and_special_tokens_are_not_words() -> None:
    counts = count_words(["the cat", "the  ``cat''", "a[MASK]b", ""])
    assert counts == {"▁the": 2, "▁cat": 1, "▁": 1, '▁"cat"': 1, "▁a": 1, "▁b": 1}


def test_equally_frequent_words_are_a_sample_of_all_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In text without spaces each sentence is a word that occurs once."""
    monkeypatch.setattr(tokenizer_training, "MAX_WORDS", 300)
    letters = "abcdefghijklmnopqrstuvwxyz"
    once = [f"{letters[number % 26]}{letters[number // 26 % 26]}{number}" for number in range(3000)]
    words = dict.fromkeys(once, 1) | {"zzz": 5, "yyy": 5}
    sample = [word for word, _ in tokenizer_training._most_frequent(words)]
    assert {"zzz", "yyy"} < set(sample)
    assert len(sample) == len(set(sample)) == 300
    assert min(sum(word[0] == letter for word in sample) for letter in letters) >= 3
    assert [word for word, _ in tokenizer_training._most_frequent(dict(reversed(words.items())))] == sample


def test_a_vocabulary_of_text_without_spaces_is_trained_on_short_words(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: dict[str, int] = {}

    def train(words: dict[str, int], size: int) -> dict[str, float]:
        trained.update(words)
        return {"a": -1.0}

    monkeypatch.setattr(tokenizer_training, "_train_sentencepiece", train)
    tokenizer_training._unigram_pieces({"ab" * 1000: 3, "ab": 1}, {"a", "b"}, 10)
    assert max(map(len, trained)) == tokenizer_training.MAX_WORD
    assert sum(len(word) * count for word, count in trained.items()) == 3 * 2000 + 2
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    library = Mock(**{"Tokenizer.return_value": Mock(get_vocab=lambda: {"天": 5}, get_vocab_size=lambda: 6)})
    assert tokenizer_training._train_wordpiece(library, 10, list) is library.Tokenizer(), (
        "no character continues a word"
    )
