"""The order of records and batches: functions of the step, on any number of hosts and whatever was read before."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packed_datasets import batch_records
from tests.processes import wait_until
from tests.training.mlm_rows import TOKENS, mlm_batches
from training.data.formats.dataset import Dataset
from training.data.loading.batches import MlmBatch, MlmBatches, mlm_evaluation
from training.data.loading.reader import prefetch
from training.data.loading.record_source import HostSlice
from training.data.sampling import order
from training.data.sampling.masking import Masking
from training.data.sampling.order import TrainingOrder
from training.errors import BadInput

MASKING = Masking()


def batches(dataset: Dataset, **how: Any) -> MlmBatches:
    return mlm_batches(dataset, global_batch_size=24, **how)


def equal(one: MlmBatch, other: MlmBatch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def joined(parts: list[MlmBatch]) -> MlmBatch:
    return MlmBatch(*(np.concatenate(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


def small(records: int, block: int, depth: int, seed: int, batch: int) -> TrainingOrder:
    """An order small enough to have many blocks, lanes and windows."""
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    return TrainingOrder(records, block, divisors[seed % len(divisors)], depth % 4 + 1, seed, batch)


def of_rows(records: int, *, seed: int, batch: int) -> TrainingOrder:
    """The order of compact rows of 128 tokens."""
    return order.training_order(records, 298, seed=seed, batch=batch)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**64))
def test_batches_drop_and_repeat_nothing(records: int, block: int, depth: int, batch: int, seed: int) -> None:
    shuffled = small(records, block, depth, seed, batch)
    steps = -(-3 * records // batch)
    epochs, seen = map(np.concatenate, zip(*(batch_records(shuffled, k) for k in range(steps)), strict=True))
    assert epochs.tolist() == [place // records for place in range(steps * batch)]
    for epoch in range(3):
        assert sorted(seen[epochs == epoch].tolist()) == list(range(records))


def test_the_order_is_pinned() -> None:
    """Between versions a seed must keep its meaning, for resumed runs. Another order is another ORDER_VERSION."""
    assert batch_records(of_rows(1000, seed=7, batch=8), 3)[1].tolist() == [21, 455, 117, 120, 345, 814, 508, 267]
    expected = [474908, 312645, 737548, 688430, 741921, 383102, 152752, 416484]
    assert batch_records(of_rows(1_000_000, seed=7, batch=8), 100_000)[1].tolist() == expected


@pytest.mark.parametrize("first", [0, 20_000])
def test_a_record_is_anywhere_in_the_epoch(first: int) -> None:
    """Mean place of 50 records in 50 epochs is its middle, within 5 standard errors. The last are in a short block."""
    records, batch = 20_050, 32
    shuffled = TrainingOrder(records, 64, 16, 1, 3, batch)
    assert shuffled.windows > 10
    places = []
    for epoch in range(50):
        seen = np.concatenate([shuffled.window(epoch, number) for number in range(shuffled.windows)])
        places.append(np.flatnonzero((seen >= first) & (seen < first + 50)).mean() / records)
    assert abs(np.mean(places) - 0.5) < 5 * 12**-0.5 / 50**0.5


@pytest.mark.parametrize("batch", [32, 256, 4096])
def test_neighbours_are_spread_over_batches(batch: int) -> None:
    """In a batch of B rows a record meets on average about B / WINDOW_BLOCKS records of its own block."""
    shuffled = of_rows(450_000, seed=5, batch=batch)
    mates = [Counter((batch_records(shuffled, k)[1] // shuffled.block).tolist()) for k in range(60)]
    others = [count - 1 for counts in mates for count in counts.values() for _ in range(count)]
    assert np.mean(others) < 1.6 * batch / order.WINDOW_BLOCKS
    assert max(others) < (12 if batch <= 256 else 45)


@settings(max_examples=25)
@given(st.data())
def test_batches_do_not_depend_on_the_number_of_hosts(
    samples: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 150))
    dataset = samples.make(tmp_path_factory.mktemp("dataset"), count, per_shard=data.draw(st.integers(1, 60)))
    seed = data.draw(st.integers(0, 2**63))
    alone = batches(dataset, seed=seed)
    for hosts in (2, 3, 4, 8):
        several = [batches(dataset, seed=seed, host=host, hosts=hosts) for host in range(hosts)]
        for k in data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4)):
            assert equal(joined([host.batch(k) for host in several]), alone.batch(k))


@pytest.mark.parametrize(("records", "batch", "hosts"), [(50, 24, 1), (50, 24, 3), (48, 24, 2), (1, 8, 8), (23, 24, 4)])
def test_evaluation_covers_each_record_once(samples: Any, tmp_path: Path, records: int, batch: int, hosts: int) -> None:
    dataset = samples.make(tmp_path, records)
    parts = [list(mlm_evaluation(dataset, HostSlice(TOKENS, batch, host, hosts), MASKING)) for host in range(hosts)]
    whole = [joined(list(parts_of_hosts)) for parts_of_hosts in zip(*parts, strict=True)]
    assert {len(step_batch.records) for step_batch in whole} == {batch}
    seen = np.concatenate([step_batch.records for step_batch in whole])
    assert seen.tolist() == [*range(records), *[-1] * (len(whole) * batch - records)]
    assert all((step_batch.weights[step_batch.records < 0] == 0).all() for step_batch in whole)
    again = list(mlm_evaluation(dataset, HostSlice(TOKENS, batch), MASKING))
    assert all(equal(one, other) for one, other in zip(whole, again, strict=True))


def test_a_batch_size_that_hosts_can_not_share_is_refused(samples: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="global batch size 24 can't be divided among 5 hosts"):
        batches(samples.make(tmp_path, 50), host=0, hosts=5)


def test_prefetch_gives_values_in_order_and_computes_ahead() -> None:
    computed: list[int] = []
    ahead = prefetch(lambda k: computed.append(k) or k, 5, 3)
    assert [next(ahead) for _ in range(4)] == [5, 6, 7, 8]
    wait_until(lambda: len(computed) >= 7)
    assert computed[:7] == list(range(5, 12))
    ahead.close()


def test_prefetch_delivers_an_exception_in_its_turn() -> None:
    def fail(k: int) -> int:
        if k == 2:
            raise BadInput("record 2")
        return k

    ahead = prefetch(fail, 0, 8)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(BadInput, match="record 2"):
        next(ahead)
