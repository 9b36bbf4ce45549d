"""Datasets on the Hub are streamed: none is kept on the disk, one revision is read, a lost connection costs nothing."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.container import small_runs
from tests.container.hub_downloads import DownloadHub, serve_downloads
from tests.processes import PIPES
from training.data.formats.open_dataset import open_dataset

NAME = "datasets:org/texts"
FILE_BYTES = 64 << 20
MOST_ON_DISK = 1 / 25  # 2 GB of 50


@pytest.fixture
def hub() -> Iterator[DownloadHub]:
    with serve_downloads("datasets/org/texts") as running:
        yield running


@pytest.fixture
def shards(hub: DownloadHub, tmp_path: Path) -> list[str]:
    """The command that makes one split of the dataset."""
    small_runs.write_tokenizer(tmp_path / "tokenizer")
    options = ["--corpus", NAME, "--tokenizer", str(tmp_path / "tokenizer"), "--sequence-length", "8"]
    return ["-m", "training.cli", "shards", *options, "--split", "train", "--evaluation-percent", "0"]


def start(hub: DownloadHub, folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Starts Python with the Hub's address; everything that it and its libraries write is below `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    variables = {**os.environ, "HOME": str(folder / "home"), **own}
    return subprocess.Popen([sys.executable, *arguments], env=variables, text=True, **PIPES)


def bytes_below(folder: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))


def parquet(first: int, rows: int, filler: int = 0) -> bytes:
    """A Parquet file of numbered texts, each with a word of 2 * `filler` characters, in four row groups."""
    chance, out = random.Random(first), io.BytesIO()
    texts = [f"w{number % 90} {chance.randbytes(filler).hex()}" for number in range(first, first + rows)]
    columns = pyarrow.table({"text": texts, "id": list(range(rows))})
    pyarrow.parquet.write_table(columns, out, row_group_size=rows // 4, compression="none", use_dictionary=False)
    return out.getvalue()


@pytest.mark.parametrize("size", [256 << 20, pytest.param(50 << 30, marks=pytest.mark.nightly)])
@pytest.mark.timeout(7200)
def test_a_25th_of_its_size_on_disk_is_enough(hub: DownloadHub, tmp_path: Path, shards: list[str], size: int) -> None:
    """50 GB are one file under many names, so that they take no disk here either."""
    file = parquet(0, 1024, FILE_BYTES // 2048)
    hub.files = {f"data/train-{number:05d}.parquet": file for number in range(size // FILE_BYTES)}
    process, most = start(hub, tmp_path, [*shards, "--out", str(tmp_path / "out")]), 0
    while process.poll() is None:
        most = max(most, bytes_below(tmp_path))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    assert process.returncode == 0, process.communicate()
    out, _ = process.communicate()
    assert f"from {1024 * len(hub.files)} documents" in out
    assert hub.sent >= size
    assert most <= size * MOST_ON_DISK, f"{most >> 20} MB"
    print(f"{size >> 20} MB of the Hub, at most {most >> 10} KB on disk")


@pytest.fixture
def files(hub: DownloadHub) -> dict[str, bytes]:
    hub.files = {f"data/train-{number:05d}.parquet": parquet(1000 * number, 1000, 1000) for number in range(4)}
    return dict(hub.files)


def test_a_failure_of_the_hub_is_said_and_the_next_run_goes_on_to_the_same_bytes(
    hub: DownloadHub, tmp_path: Path, shards: list[str], files: dict[str, bytes]
) -> None:
    def prepare(name: str) -> tuple[int, str]:
        command = [*shards, "--records-per-shard", "100", "--out", str(tmp_path / name)]
        process = start(hub, tmp_path, command)
        _, err = process.communicate(timeout=300)
        return process.returncode, err

    assert prepare("undisturbed")[0] == 0
    hub.refuses_after = hub.sent + sum(map(len, files.values())) // 2
    code, said = prepare("out")
    assert (code, "Traceback" in said) == (2, False), said
    assert f"--corpus {NAME}: HfHubHTTPError: 403" in said
    assert "it continues after the last shard" in said
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out" / "train").glob("*.tfrecord")}
    assert len(written) >= 2
    hub.refuses_after = None
    assert prepare("out")[0] == 0
    ended = {file.name: file for file in (tmp_path / "out" / "train").glob("*.tfrecord")}
    assert {name: ended[name].stat().st_mtime_ns for name in written} == written
    for file in (tmp_path / "undisturbed" / "train").iterdir():
        if file.is_file():
            assert (tmp_path / "out" / "train" / file.name).read_bytes() == file.read_bytes(), file.name


def test_pairs_have_their_classes_names_and_are_those_of_the_same_file_here(hub: DownloadHub, tmp_path: Path) -> None:
    """As GLUE's: classes are numbers, and the file has their names."""
    names, out = ["yes", "perhaps", "no"], io.BytesIO()
    rows = [{"a": f"w{n} w{n % 7}", "b": f"w{n % 50}", "label": n % 3} for n in range(60)]
    text = {"dtype": "string", "_type": "Value"}
    info = {"info": {"features": {"a": text, "b": text, "label": {"names": names, "_type": "ClassLabel"}}}}
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(info)})
    pyarrow.parquet.write_table(table, out)
    hub.files = {"data/train-00000.parquet": out.getvalue()}
    file, classes = tmp_path / "pairs.jsonl", tmp_path / "labels.json"
    file.write_text("".join(json.dumps({**row, "label": names[row["label"]]}) + "\n" for row in rows))
    classes.write_text(json.dumps(names))
    small_runs.write_tokenizer(tmp_path / "tokenizer")
    options = "--task classification --field a --text-pair b --sequence-length 16 --split train --evaluation-percent 0"
    more = [*options.split(), "--tokenizer", str(tmp_path / "tokenizer")]
    for name, corpus in (("hub", [NAME]), ("here", [str(file), "--labels", str(classes)])):
        command = ["-m", "training.cli", "shards", "--corpus", *corpus, *more, "--out", str(tmp_path / name)]
        process = start(hub, tmp_path, command)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    streamed, local = (open_dataset(str(tmp_path / name / "train")) for name in ("hub", "here"))
    assert streamed.manifest.labels == names
    assert [shard.crc32c for shard in streamed.shards] == [shard.crc32c for shard in local.shards]


def test_one_revision_is_one_corpus_for_both_splits(hub: DownloadHub, tmp_path: Path, files: dict[str, bytes]) -> None:
    program = """
import sys
from training.data.prepare.corpus import Corpus
corpus = Corpus("datasets:org/texts")
print(corpus.fingerprint, flush=True)
sys.stdin.readline()  # now the Hub's main is another commit
assert [text.split()[0] for text in corpus.documents()] == [f"w{number % 90}" for number in range(4000)]
print(corpus.fingerprint, Corpus("datasets:org/texts").fingerprint)
"""
    process = start(hub, tmp_path, ["-c", program])
    first, before = process.stdout.readline().strip(), hub.commit
    assert hub.sent == 0, "a fingerprint reads no file"
    hub.commit = "1" * 40
    out, err = process.communicate("\n", timeout=300)
    assert process.returncode == 0, err
    again, other = out.split()
    assert again == first != other
    assert hub.commits == {before}
