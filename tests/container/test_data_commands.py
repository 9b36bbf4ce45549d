"""Claims about `tpu-train tokenizer`, `shards` and `dataset` as a user runs them, and about tokenizers' folders."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from tests.processes import run_python
from tests.training.mutations import flip
from training import storage
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.loading.record_source import open_source
from training.data.prepare.corpus import Corpus
from training.errors import BadInput

PYDOC = ("--corpus", "builtin:pydoc")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def succeed(*arguments: str | Path) -> str:
    return run_python("-m", "training.cli", *map(str, arguments))


def refused(*arguments: str | Path) -> str:
    done = run(*arguments)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "unigram"
    succeed("tokenizer", *PYDOC, "--vocabulary", "600", "--out", folder)
    return folder


@pytest.mark.parametrize("algorithm", ["unigram", "wordpiece"])
def test_the_same_text_gives_the_same_tokenizer_byte_for_byte(tmp_path: Path, algorithm: str) -> None:
    """Two processes, because a hash table's order changes between processes."""
    for name in ("one", "two"):
        succeed("tokenizer", *PYDOC, "--vocabulary", "600", "--algorithm", algorithm, "--out", tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert "already there; nothing to do" in succeed(
        "tokenizer", *PYDOC, "--vocabulary", "600", "--algorithm", algorithm, "--out", tmp_path / "one"
    )
    assert "holds another tokenizer" in refused(
        "tokenizer", *PYDOC, "--vocabulary", "601", "--algorithm", algorithm, "--out", tmp_path / "one"
    )


def test_every_character_of_the_text_is_a_piece(tmp_path: Path) -> None:
    """Also those that sentencepiece reserves in its input."""
    (tmp_path / "text.txt").write_text("one\ttwo\nthree ▅ four\u2028𝔘 \0\n\nfive six seven eight nine ten\n")
    succeed("tokenizer", "--corpus", tmp_path / "text.txt", "--vocabulary", "60", "--out", tmp_path / "out")
    loaded = tokenizers.load(tokenizers.read(str(tmp_path / "out")))
    assert {"\t", "\n", "▅", "\u2028", "𝔘", "\0", *"onetwhrfu"} <= loaded.get_vocab().keys()
    assert loaded.get_vocab_size() <= 60


@pytest.mark.parametrize("algorithm", ["unigram", "wordpiece"])
def test_transformers_loads_a_tokenizer_folder(tmp_path: Path, algorithm: str) -> None:
    succeed("tokenizer", *PYDOC, "--vocabulary", "600", "--algorithm", algorithm, "--out", tmp_path)
    loaded, ours = AutoTokenizer.from_pretrained(str(tmp_path)), tokenizers.read(str(tmp_path))
    assert len(loaded) == ours.special.vocabulary == 600
    assert (loaded.mask_token_id, loaded.pad_token_id) == (ours.special.mask, ours.special.pad)
    assert set(loaded.all_special_ids) == ours.special.special
    ids = loaded("the continue statement", add_special_tokens=True).input_ids
    assert (ids[0], ids[-1]) == (loaded.cls_token_id, loaded.sep_token_id)
    assert loaded.decode(ids, skip_special_tokens=True).strip() == "the continue statement"
    [encoded] = tokenizers.encoder(ours)(["the continue statement"])
    assert encoded.tolist() == ids
    loaded.save_pretrained(str(tmp_path / "again"))
    assert tokenizers.read(str(tmp_path / "again")).hash == ours.hash, "saving it again makes it no other tokenizer"


def test_a_quoted_word_is_normalised_as_in_the_public_recipe(tokenizer: Path) -> None:
    encode = tokenizers.encoder(tokenizers.read(str(tokenizer)))
    one, other = encode(["``the''", '"the"'])
    assert one.tolist() == other.tolist()


def test_shards_of_the_built_in_corpus(tokenizer: Path, tmp_path: Path) -> None:
    command = ("shards", *PYDOC, "--tokenizer", tokenizer, "--sequence-length", "64", "--out", tmp_path)
    said = succeed(*command, "--records-per-shard", "1000")
    assert "records of 64 tokens in" in said
    train, evaluation = open_dataset(str(tmp_path / "train")), open_dataset(str(tmp_path / "evaluation"))
    hashes = {each.manifest.tokenizer_hash for each in (train, evaluation)}
    assert hashes == {tokenizers.read(str(tokenizer)).hash}
    assert train.records > 10 * evaluation.records > 0
    loaded, encode = AutoTokenizer.from_pretrained(str(tokenizer)), tokenizers.encoder(tokenizers.read(str(tokenizer)))
    stream = np.concatenate(encode([text for text in Corpus("builtin:pydoc").documents() if not _in_evaluation(text)]))
    rows = open_source(train).read(0, train.records, train.records)["input_ids"]
    assert rows.reshape(-1).tolist() == stream[: rows.size].tolist()
    assert len(stream) - rows.size < 64
    assert "statement" in loaded.decode(rows[:50].reshape(-1).tolist())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert succeed(*command, "--records-per-shard", "1000").count("already there") == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "holds another dataset" in refused(*command, "--records-per-shard", "999")
    succeed(*command, "--records-per-shard", "999", "--overwrite", "--split", "train")
    assert open_dataset(str(tmp_path / "train")).shards[0].records == 999


def _in_evaluation(text: str) -> bool:
    from training.data.prepare.corpus import is_in_split

    return is_in_split(text, "evaluation", 5)


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    """Row groups of three rows, and pages with checksums."""
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, path, row_group_size=3, write_page_checksum=True)


def test_only_needed_columns_of_a_parquet_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"image": map(os.urandom, [1 << 20] * 8), "text": map(str, range(8)), "label": range(8)}
    write_parquet(tmp_path / "a.parquet", columns)
    read, sizes = storage.read, list[int]()

    def counted(url: str, start: int, end: int, *, generation: int) -> bytes:
        sizes.append(end - start)
        return read(url, start, end, generation=generation)

    monkeypatch.setattr(storage, "read", counted)
    rows = list(Corpus(str(tmp_path / "a.parquet"), label="label").rows())
    assert rows == [{"text": str(number), "label": number} for number in range(8)]
    assert 0 < sum(sizes) < 1 << 20


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-20], r"a.parquet: damaged after row 0, or not Parquet: "),
        (lambda data: data.replace(b"text 5", b"text 6"), r"a.parquet: damaged after row 0, or not Parquet: .*CRC"),
        (lambda data: data.replace(b"body", b"bodi"), r"a.parquet: row 1 has no 'body', it has: 'bodi'. Name the text"),
    ],
    ids=["cut", "flipped", "renamed"],
)
def test_damaged_parquet_is_told_with_its_place(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"body": [f"text {number}" for number in range(9)]}), path, row_group_size=3,
        write_page_checksum=True, compression="none", use_dictionary=False, write_statistics=False,
    )  # fmt: skip
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=message):
        list(Corpus(str(path), "body").documents())


def test_a_datasets_name_is_a_corpus(tokenizer: Path, tmp_path: Path) -> None:
    """A folder that `datasets.load_dataset` takes: no network."""
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in list(Corpus("builtin:pydoc").documents())[:10]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    out = ("--tokenizer", tokenizer, "--evaluation-percent", "0", "--split", "train", "--out")
    succeed("shards", "--corpus", f"datasets:{tmp_path / 'data'}", *out, tmp_path / "one")
    succeed("shards", "--corpus", tmp_path / "data" / "train.jsonl", *out, tmp_path / "two")
    one, two = (open_dataset(str(tmp_path / name / "train")) for name in ("one", "two"))
    assert [shard.crc32c for shard in one.shards] == [shard.crc32c for shard in two.shards]


def test_verify_and_preview_show_a_dataset(tokenizer: Path, tmp_path: Path) -> None:
    succeed("shards", *PYDOC, "--tokenizer", tokenizer, "--split", "train", "--out", tmp_path)
    url = tmp_path / "train"
    assert "600 ids" in succeed("dataset", "show", url)
    assert "are as they were written" in succeed("dataset", "verify", url, "--tokenizer", tokenizer)
    shown = succeed("dataset", "preview", url, "--tokenizer", tokenizer, "--rows", "2")
    assert "128 tokens, 19 to predict (" in shown
    assert "[" in shown.split("\n", 2)[2]
    [shard] = url.glob("*.tfrecord")
    flip(shard, shard.stat().st_size // 2)
    done = run("dataset", "verify", url)
    assert done.returncode == 2
    assert f"{shard}: record " in done.stdout


def test_labelled_texts_become_a_classification_dataset(tokenizer: Path, tmp_path: Path) -> None:
    rows = [[f"{'many words ' * (number % 40)}{number}", f"c{number % 7}"] for number in range(200)]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "category"], *rows])
    options = ("--tokenizer", tokenizer, "--sequence-length", "64", "--out", tmp_path / "out")
    shards = ("shards", "--task", "classification", "--corpus", tmp_path / "train.csv", *options)
    said = succeed(*shards, "--label", "category", "--evaluation-percent", "20")
    assert "records of 16 or 32 or 64 tokens" in said
    train, evaluation = (open_dataset(str(tmp_path / "out" / part)) for part in ("train", "evaluation"))
    assert train.records + evaluation.records == 200
    assert train.manifest.labels == evaluation.manifest.labels == [f"c{number}" for number in range(7)]
    assert "labels     7: c0, c1" in succeed("dataset", "show", train.url)
    assert "are as they were written" in succeed("dataset", "verify", train.url)
    assert ": c" in succeed("dataset", "preview", train.url, "--tokenizer", tokenizer, "--global-batch-size", "16")
    assert "has no 'label', it has: 'text', 'category'" in refused(*shards)


def test_a_dataset_that_the_library_does_not_find_is_said(tokenizer: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", tokenizer, "--split", "evaluation", "--out", tmp_path / "out")
    assert "--corpus datasets:/nowhere: " in refused("shards", "--corpus", "datasets:/nowhere", *options)


def test_a_vocabulary_below_the_number_of_characters_is_said(tmp_path: Path) -> None:
    for algorithm in ("unigram", "wordpiece"):
        small = ("--vocabulary", "50", "--algorithm", algorithm)
        said = refused("tokenizer", *PYDOC, *small, "--out", tmp_path / algorithm)
        assert "--vocabulary 50 is too small" in said
