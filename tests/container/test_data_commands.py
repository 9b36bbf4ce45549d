"""Claims about `tpu-train tokenizer`, `shards` and `dataset` as a user runs them, and about tokenizers' folders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from tests.container.small_runs import command, write_csv
from tests.processes import run_python
from tests.training.mutations import flip
from training import storage
from training.cli.main import tpu_train
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.loading.record_source import open_source
from training.data.prepare.corpus import Corpus, is_in_split
from training.errors import BadInput

PYDOC = ("--corpus", "builtin:pydoc")
ALGORITHMS = ("unigram", "wordpiece")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a tokenizer of each algorithm."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for algorithm in ALGORITHMS:
        command("tokenizer", *PYDOC, "--vocabulary", "600", "--algorithm", algorithm, "--out", folder / algorithm)
    return {algorithm: folder / algorithm for algorithm in ALGORITHMS}


@pytest.fixture(scope="module")
def tokenizer(made: dict[str, Path]) -> Path:
    return made["unigram"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_text_gives_the_same_tokenizer_byte_for_byte(
    made: dict[str, Path], tmp_path: Path, algorithm: str
) -> None:
    """In another process, because a hash table's order changes between processes."""
    again = ("tokenizer", *PYDOC, "--algorithm", algorithm, "--vocabulary")
    run_python("-m", "training.cli", *again, "600", "--out", str(tmp_path))
    for path in made[algorithm].iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    assert "already there; nothing to do" in command(*again, "600", "--out", tmp_path)
    with pytest.raises(BadInput, match="holds another tokenizer"):
        command(*again, "601", "--out", tmp_path)
    with pytest.raises(BadInput, match="--vocabulary 50 is too small"):  # for the characters
        command(*again, "50", "--out", tmp_path / "small")


def test_every_character_of_the_text_is_a_piece(tmp_path: Path) -> None:
    """Also those that sentencepiece reserves in its input."""
    (tmp_path / "text.txt").write_text("one\ttwo\nthree ▅ four\u2028𝔘 \0\n\nfive six seven eight nine ten\n")
    command("tokenizer", "--corpus", tmp_path / "text.txt", "--vocabulary", "60", "--out", tmp_path / "out")
    loaded = tokenizers.load(tokenizers.read(str(tmp_path / "out")))
    assert {"\t", "\n", "▅", "\u2028", "𝔘", "\0", *"onetwhrfu"} <= loaded.get_vocab().keys()
    assert loaded.get_vocab_size() <= 60


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_transformers_loads_a_tokenizer_folder(made: dict[str, Path], tmp_path: Path, algorithm: str) -> None:
    folder = str(made[algorithm])
    loaded, ours = AutoTokenizer.from_pretrained(folder), tokenizers.read(folder)
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
    one, other = tokenizers.encoder(tokenizers.read(str(tokenizer)))(["``the''", '"the"'])
    assert one.tolist() == other.tolist()


def test_shards_of_the_built_in_corpus(tokenizer: Path, tmp_path: Path) -> None:
    shards = ("shards", *PYDOC, "--tokenizer", tokenizer, "--sequence-length", "64", "--out", tmp_path)
    assert "records of 64 tokens in" in command(*shards, "--records-per-shard", "1000")
    train, evaluation = open_dataset(str(tmp_path / "train")), open_dataset(str(tmp_path / "evaluation"))
    assert {each.manifest.tokenizer_hash for each in (train, evaluation)} == {tokenizers.read(str(tokenizer)).hash}
    assert train.records > 10 * evaluation.records > 0
    loaded, encode = AutoTokenizer.from_pretrained(str(tokenizer)), tokenizers.encoder(tokenizers.read(str(tokenizer)))
    texts = [text for text in Corpus("builtin:pydoc").documents() if not is_in_split(text, "evaluation", 5)]
    stream = np.concatenate(encode(texts))
    rows = open_source(train).read(0, train.records, train.records)["input_ids"]
    assert rows.reshape(-1).tolist() == stream[: rows.size].tolist()
    assert len(stream) - rows.size < 64
    assert "statement" in loaded.decode(rows[:50].reshape(-1).tolist())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert command(*shards, "--records-per-shard", "1000").count("already there") == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(BadInput, match="holds another dataset"):
        command(*shards, "--records-per-shard", "999")
    command(*shards, "--records-per-shard", "999", "--overwrite", "--split", "train")
    assert open_dataset(str(tmp_path / "train")).shards[0].records == 999


def test_only_needed_columns_of_a_parquet_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"image": [b"%d" % row * (1 << 20) for row in range(8)], "text": [*map(str, range(8))]}
    table = pyarrow.table({**columns, "label": [*range(8)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3, compression="none")
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


def test_verify_and_preview_show_a_dataset(tokenizer: Path, tmp_path: Path) -> None:
    command("shards", *PYDOC, "--tokenizer", tokenizer, "--split", "train", "--out", tmp_path)
    url = tmp_path / "train"
    assert "600 ids" in command("dataset", "show", url)
    assert "are as they were written" in command("dataset", "verify", url, "--tokenizer", tokenizer)
    shown = command("dataset", "preview", url, "--tokenizer", tokenizer, "--rows", "2")
    assert "128 tokens, 19 to predict (" in shown
    assert "[" in shown.split("\n", 2)[2]
    [shard] = url.glob("*.tfrecord")
    flip(shard, shard.stat().st_size // 2)
    done = CliRunner().invoke(tpu_train, ["dataset", "verify", str(url)])
    assert isinstance(done.exception, BadInput)
    assert f"{shard}: record " in done.stdout


def test_labelled_texts_become_a_classification_dataset(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{'many words ' * (number % 40)}{number}", "category": f"c{number % 7}"} for number in range(200)]
    corpus = write_csv(tmp_path / "train.csv", rows)
    options = ("--tokenizer", tokenizer, "--sequence-length", "64", "--out", tmp_path / "out")
    shards = ("shards", "--task", "classification", "--corpus", corpus, *options)
    assert "records of 16 or 32 or 64 tokens" in command(*shards, "--label", "category", "--evaluation-percent", "20")
    train, evaluation = (open_dataset(str(tmp_path / "out" / part)) for part in ("train", "evaluation"))
    assert train.records + evaluation.records == 200
    assert train.manifest.labels == evaluation.manifest.labels == [f"c{number}" for number in range(7)]
    assert "labels     7: c0, c1" in command("dataset", "show", train.url)
    assert "are as they were written" in command("dataset", "verify", train.url)
    assert ": c" in command("dataset", "preview", train.url, "--tokenizer", tokenizer, "--global-batch-size", "16")
    with pytest.raises(BadInput, match="has no 'label', it has: 'text', 'category'"):
        command(*shards)


def test_a_dataset_that_the_library_does_not_find_is_said() -> None:
    with pytest.raises(BadInput, match="--corpus datasets:/nowhere: "):
        list(Corpus("datasets:/nowhere").documents())
