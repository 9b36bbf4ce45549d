"""Datasets on the Hub are streamed: none is kept on the disk, one revision is read, a lost connection costs nothing.
A run starts from a model on the Hub."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.container import small_runs
from tests.container.hub import Hub, Repository
from tests.processes import PIPES, run_python
from training.data.formats.open_dataset import open_dataset

NAME = "datasets:org/texts"
FILE_BYTES = 64 << 20
MOST_ON_DISK = 1 / 25  # 2 GB of 50


def serve_texts(hub: Hub, files: dict[str, bytes]) -> None:
    hub.repositories["datasets/org/texts"] = Repository(files=files)


def variables(hub: Hub, folder: Path) -> dict[str, str]:
    """The Hub's address; everything that a process and its libraries write is below `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    home = str(folder / "home")
    return {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HOME": home, "TMPDIR": str(folder / "tmp")}


def start(hub: Hub, folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **variables(hub, folder)}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **PIPES)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """The command that makes one split of the dataset."""
    small_runs.write_tokenizer(tmp_path / "tokenizer")
    options = ["--corpus", NAME, "--tokenizer", str(tmp_path / "tokenizer"), "--sequence-length", "8"]
    return ["-m", "training.cli", "shards", *options, "--split", "train", "--evaluation-percent", "0"]


def parquet(first: int, rows: int, filler: int) -> bytes:
    """A Parquet file of numbered texts, each with a word of 2 * `filler` characters, in four row groups."""
    chance, out = random.Random(first), io.BytesIO()
    texts = [f"w{number % 90} {chance.randbytes(filler).hex()}" for number in range(first, first + rows)]
    columns = pyarrow.table({"text": texts, "id": list(range(rows))})
    pyarrow.parquet.write_table(columns, out, row_group_size=rows // 4, compression="none", use_dictionary=False)
    return out.getvalue()


@pytest.mark.parametrize("size", [256 << 20, pytest.param(50 << 30, marks=pytest.mark.nightly)])
@pytest.mark.timeout(7200)
def test_a_25th_of_its_size_on_disk_is_enough(hub: Hub, tmp_path: Path, shards: list[str], size: int) -> None:
    """50 GB are one file under many names, so that they take no disk here either."""
    file, count = parquet(0, 1024, FILE_BYTES // 2048), size // FILE_BYTES
    serve_texts(hub, {f"data/train-{number:05d}.parquet": file for number in range(count)})
    process, most = start(hub, tmp_path, [*shards, "--out", str(tmp_path / "out")]), 0
    while process.poll() is None:
        most = max(most, sum(file.lstat().st_blocks * 512 for file in tmp_path.rglob("*")))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"from {1024 * count} documents" in out
    assert hub.sent >= size
    assert most <= size * MOST_ON_DISK, f"{most >> 20} MB"
    print(f"{size >> 20} MB of the Hub, at most {most >> 10} KB on disk")


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    found = {f"data/train-{number:05d}.parquet": parquet(1000 * number, 1000, 1000) for number in range(4)}
    serve_texts(hub, found)
    return found


def test_a_failure_of_the_hub_is_said_and_the_next_run_goes_on_to_the_same_bytes(
    hub: Hub, tmp_path: Path, shards: list[str], files: dict[str, bytes]
) -> None:
    def prepare(name: str) -> tuple[int, str]:
        process = start(hub, tmp_path, [*shards, "--records-per-shard", "100", "--out", str(tmp_path / name)])
        _, err = process.communicate(timeout=300)
        return process.returncode, err

    assert prepare("undisturbed")[0] == 0
    hub.refuses_after = hub.sent + sum(map(len, files.values())) // 2
    code, said = prepare("out")
    assert (code, "Traceback" in said) == (2, False), said
    assert f"--corpus {NAME}: HfHubHTTPError: 403" in said
    assert "it continues after the last shard" in said
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "train").glob("*.tfrecord")}
    assert len(written) >= 2
    hub.refuses_after = None
    assert prepare("out")[0] == 0
    assert {file: file.stat().st_mtime_ns for file in written} == written
    for file in (tmp_path / "undisturbed" / "train").iterdir():
        if file.is_file():
            assert (tmp_path / "out" / "train" / file.name).read_bytes() == file.read_bytes(), file.name


CLASSES = ["O", "B-ORG", "B-PER"]
WORDS = [[f"w{n} w{n % 7}".split(), []][n % 9 == 0] for n in range(60)]


@pytest.mark.parametrize(
    ("options", "columns", "of_class", "count"),
    [
        ("--task classification --field a --text-pair b",
         {"a": [f"w{n} w{n % 7}" for n in range(60)], "b": [f"w{n % 50}" for n in range(60)],
          "label": [n % 3 for n in range(60)]}, datasets.ClassLabel(names=CLASSES), 60),
        ("--task token-classification --field a",
         {"a": WORDS, "label": [[len(word) % 3 for word in words] for words in WORDS]},
         datasets.List(datasets.ClassLabel(names=CLASSES)), 53),
    ],
    ids=["pairs", "words"],
)  # fmt: skip
def test_a_datasets_name_is_a_corpus_and_names_the_classes_of_its_numbers(
    hub: Hub, tmp_path: Path, options: str, columns: dict[str, Any], of_class: Any, count: int
) -> None:
    """As GLUE's: a name on the Hub or a folder that the library takes; a user's own file has the names."""
    table = datasets.Dataset.from_dict(columns).cast_column("label", of_class)
    file, classes, folder = tmp_path / "rows.jsonl", tmp_path / "labels.json", tmp_path / "data"
    table.to_parquet(folder / "train-00000.parquet")
    serve_texts(hub, {"data/train-00000.parquet": (folder / "train-00000.parquet").read_bytes()})
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    classes.write_text(json.dumps(CLASSES))
    small_runs.write_tokenizer(tmp_path / "tokenizer")
    more = f"{options} --sequence-length 16 --split train --evaluation-percent 0 --tokenizer {tmp_path}/tokenizer"

    def shards(name: str, *corpus: str) -> list[str]:
        return ["shards", "--corpus", *corpus, *more.split(), "--out", str(tmp_path / name)]

    run_python("-m", "training.cli", *shards("hub", NAME), **variables(hub, tmp_path))
    for arguments in (shards("folder", f"datasets:{folder}"), shards("here", str(file), "--labels", str(classes))):
        small_runs.command(*arguments)
    found = [open_dataset(str(tmp_path / name / "train")) for name in ("hub", "folder", "here")]
    assert found[0].manifest.labels == found[1].manifest.labels == CLASSES
    assert found[0].records == count
    assert len({tuple(shard.crc32c for shard in dataset.shards) for dataset in found}) == 1


def test_one_revision_is_one_corpus_for_both_splits(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
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


@pytest.mark.nightly
def test_a_run_starts_from_a_name_on_the_hub(folder: Path, hub: Hub) -> None:
    first = small_runs.document(folder, train__steps=8, checkpoint__every_steps=None)
    before = small_runs.trained(folder, "first", first)
    files = {file.name: file.read_bytes() for file in (folder / "runs" / "first" / "model").iterdir()}
    hub.repositories["org/model"] = Repository(files=files)
    second = {**first, "model": {"path": "org/model"}, "data": {**first["data"], "tokenizer": "org/model"}}
    after = small_runs.trained(folder, "second", second, HF_ENDPOINT=hub.url, HF_HOME=str(folder / "cache"))
    assert after["first_loss"] < before["first_loss"] - 0.3, "it goes on from the trained weights"
    assert {file.name for file in (folder / "runs" / "second" / "model").iterdir()} == files.keys()


def test_a_model_that_the_hub_does_not_give_is_named_with_what_to_do(tmp_path: Path, hub: Hub) -> None:
    program = (
        "from training import errors\nfrom training.storage import hub\n"
        "try: hub.model_folder('org/other')\nexcept errors.BadInput as error: print(error)"
    )
    for endpoint in (hub.url, "http://127.0.0.1:9"):  # not there; no Hub there
        told = run_python("-c", program, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path))
        assert told.startswith(
            "model.path org/other: there is no such folder, and the Hub did not give a model of that name: "
        )
        assert "give its folder (local or gs://)" in told
