"""A mixture's epoch has each record as often as it should, on any hosts; parts that do not fit are refused."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.packed_datasets import pack_rows
from tests.training import test_labelled_batches as labelled
from training.cli.main import tpu_train
from training.data.formats.dataset import Dataset, check_dataset, open_dataset
from training.data.loading.batches import MlmBatches
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan, write_mixture
from training.data.sampling.masking import Masking
from training.errors import BadInput

LENGTH = 12


def packed(folder: Path | str, count: int, first: int, **changes: str) -> Dataset:
    """Rows of the ids first + row number."""
    plan = DatasetPlan("train", LENGTH, "t", labelled.TOKENS.vocabulary, 7, **changes)
    return pack_rows(folder, plan, np.repeat(first + np.arange(count, dtype=np.int32)[:, None], LENGTH, axis=1))


def rows(dataset: Dataset, steps: range, host: int = 0, hosts: int = 1) -> list[list[tuple[int, ...]]]:
    """Records, ids and labels of each step's rows of one host."""
    batches = MlmBatches(dataset, HostSlice(labelled.TOKENS, 8, host, hosts), Masking(), 5)
    found = []
    for step in steps:
        batch = batches.batch(step)
        columns = (batch.records, *batch.input_ids.T, *batch.labels.T)
        found.append([tuple(map(int, row)) for row in zip(*columns, strict=True)])
    batches.close()
    return found


def test_an_epoch_has_each_record_as_often_as_the_mixture_says(tmp_path: Path) -> None:
    parts = {"web": (20, 20, 1), "books": (12, 60, 3)}
    for name, (count, first, _) in parts.items():
        packed(tmp_path / name, count, first)
    given = [f"--part={tmp_path / name}={times}" for name, (_, _, times) in parts.items()]
    command = ["dataset", "mix", *given, f"--out={tmp_path / 'mixed'}"]
    told = CliRunner().invoke(tpu_train, command, catch_exceptions=False)
    assert "20 records, 1 times, 35.7% of an epoch" in told.output
    assert CliRunner().invoke(tpu_train, command).output == told.output, "the same mixture again changes nothing"
    mixed = check_dataset(str(tmp_path / "mixed"), rows="packed", tokenizer=None)
    epoch = rows(mixed, range(7))  # of 56 records
    labels = Counter(row[-1] for step in epoch for row in step)
    assert labels == {first + n: times for count, first, times in parts.values() for n in range(count)}
    assert len({row[0] for step in epoch for row in step}) == mixed.records == 56
    halves = [rows(mixed, range(3, 9), host, 2) for host in (0, 1)]
    again = rows(mixed, range(3, 9))
    assert [first + second for first, second in zip(*halves, strict=True)] == again, "on any number of hosts"
    assert again[:4] == epoch[3:], "whatever was read before"


def test_parts_in_a_bucket_are_mixed_and_read_from_there(tmp_path: Path, gcs: object) -> None:
    sizes = {"web": (20, 20, 1), "books": (12, 60, 3)}
    read = []
    for root in (str(tmp_path), "gs://bucket/data"):
        for name, (count, first, _) in sizes.items():
            packed(f"{root}/{name}", count, first)
        mixed = write_mixture(f"{root}/mixed", {f"{root}/{name}": times for name, (_, _, times) in sizes.items()})
        assert open_dataset(f"{root}/mixed") == mixed
        read.append(rows(mixed, range(7)))
    assert read[0] == read[1]
    assert all(shard.folder.startswith("gs://bucket/data/") for shard in mixed.shards)


def test_labelled_rows_are_mixed_too_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    for name, count in (("one", 30), ("two", 20)):
        labelled.make(tmp_path / name, count)
    mixed = write_mixture(str(tmp_path / "mixed"), {str(tmp_path / "one"): 2, str(tmp_path / "two"): 1})
    expected = labelled.expected(30) + labelled.expected(30) + labelled.expected(20)
    parts = list(labelled.labelled_evaluation(mixed, HostSlice(labelled.TOKENS, 8)))
    assert labelled.contents(parts) == expected
    shard = tmp_path / "two" / mixed.shards[-1].name
    shard.unlink()
    with pytest.raises(BadInput, match=f"{shard} is missing"):
        labelled.batches(open_dataset(str(tmp_path / "mixed")))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed(tmp_path / "plain", 10, 20)
    labelled.make(tmp_path / "labelled", 10)
    plain = str(tmp_path / "plain")
    for other, message in (({"labelled": 1}, "differ in rows"), ({}, "at least two different parts")):
        with pytest.raises(BadInput, match=message):
            write_mixture(str(tmp_path / "mixed"), {plain: 1, **{str(tmp_path / name): n for name, n in other.items()}})
    shutil.copytree(plain, tmp_path / "copy")
    write_mixture(str(tmp_path / "mixed"), {plain: 1, str(tmp_path / "copy"): 1})
    with pytest.raises(BadInput, match="holds another dataset"):
        write_mixture(str(tmp_path / "mixed"), {plain: 2, str(tmp_path / "copy"): 1})
    for wrong in ("plain", "plain=0", "plain=x", "=2"):
        told = CliRunner().invoke(tpu_train, ["dataset", "mix", f"--part={wrong}", f"--out={tmp_path / 'other'}"])
        assert "expected FOLDER=TIMES" in str(told.exception or told.output)
