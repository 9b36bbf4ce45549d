"""Datasets of packed rows whose content is known, batches of them, the rows that were masked, and what hosts share."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.packed_datasets import pack_rows
from training.data.formats.dataset import Dataset
from training.data.loading.batches import MlmBatches
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.sampling.masking import Masking, SpecialTokens

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)
PLAN = DatasetPlan("train", 8, "t" * 64, TOKENS.vocabulary, records_per_shard=10)


def sample_ids(count: int) -> npt.NDArray[np.int32]:
    """Rows that are all different: the record's number is in the first tokens. (count, 8)"""
    rows = np.random.default_rng(0).integers(5, TOKENS.vocabulary, (count, PLAN.length))
    for place in range(3):
        rows[:, place] = 5 + np.arange(count) // 90**place % 90
    return rows.astype(np.int32)


def make_samples(folder: Path | str, count: int, per_shard: int = 10, **changes: Any) -> Dataset:
    """A dataset of `sample_ids(count)` in a folder, local or gs://. changes: of PLAN"""
    return pack_rows(folder, replace(PLAN, records_per_shard=per_shard, **changes), sample_ids(count))


def mlm_batches(dataset: Dataset, *, seed: int = 1, **how: Any) -> MlmBatches:
    """Returns training batches of 16 rows on one host, unless `how`, the fields of HostSlice, says otherwise."""
    return MlmBatches(dataset, HostSlice(**{"tokenizer": TOKENS, "global_batch_size": 16, **how}), Masking(), seed)


def unmask(batch: Any) -> Any:
    """Returns the rows before masking. `batch`: MlmBatch or Masked"""
    ids, used = batch.input_ids.copy(), batch.weights > 0
    ids[np.nonzero(used)[0], batch.positions[used]] = batch.labels[used]
    return ids


def join(parts: Iterable[Any]) -> Any:
    """Returns the batch of which hosts have these parts, in the order of the hosts."""
    first, *_ = parts = list(parts)
    return type(first)(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(first)})


def require_equal(one: Any, other: Any) -> None:
    """Fails where two batches differ."""
    for name, values in vars(one).items():
        np.testing.assert_array_equal(values, getattr(other, name), err_msg=name)


def require_alike_on_hosts(open_batches: Callable[..., Any], hosts: int, steps: Iterable[int]) -> None:
    """Fails unless `hosts` hosts have, in any order of steps, the rows of the batches that one host alone has.

    `open_batches`: opens training batches; `host` and `hosts` are fields of HostSlice."""
    alone, several = open_batches(), [open_batches(host=host, hosts=hosts) for host in range(hosts)]
    for step in steps:
        require_equal(join(each.batch(step) for each in several), alone.batch(step))
    for each in (alone, *several):
        each.close()
