"""The order and masking of records: functions of seed and step, on any number of hosts and whatever was read before."""

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import integers

from benchmarks.read_amplification import blocks_of_hosts
from tests.packed_datasets import batch_records
from tests.processes import wait_until
from tests.training import mlm_rows
from tests.training.mlm_rows import TOKENS, make_samples, mlm_batches, require_alike_on_hosts, require_equal, unmask
from training.data.loading.batches import mlm_evaluation
from training.data.loading.reader import prefetch
from training.data.loading.record_source import HostSlice
from training.data.sampling import order, random_bits
from training.data.sampling.masking import Masker, Masking, SpecialTokens, special_tokens
from training.data.sampling.order import TrainingOrder
from training.data.sampling.random_bits import UInts
from training.errors import BadInput

WIDE_TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=1000)


def rows(count: int, length: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).integers(0, 1000, (count, length)).astype(np.int32)
    rows[:, 0], rows[:, -1] = 0, 1
    return rows


def test_splitmix64_gives_its_published_numbers() -> None:
    # Seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert random_bits.counted(np.uint64(1234567), np.arange(5, dtype=np.uint64)).tolist() == expected
    assert random_bits.mix_int(1234567 + random_bits.GOLDEN) == expected[0]


@given(integers(0, 8), integers(2, 80), integers(1, 100), integers(0, 2**63), integers(-1, 50), integers(0, 9))
def test_labels_restore_the_row(count: int, length: int, percent: int, seed: int, epoch: int, data: int) -> None:
    ids = rows(count, length, data)
    masked = Masker(Masking(percent), WIDE_TOKENS, seed)(ids, epoch, np.arange(count))
    assert np.array_equal(unmask(masked), ids)
    used = masked.weights > 0
    special = np.isin(ids, list(WIDE_TOKENS.special))
    assert not special[np.nonzero(used)[0], masked.positions[used]].any(), "special tokens are never predicted"
    candidates = (~special).sum(axis=1)
    wanted = np.minimum(np.clip((candidates * percent + 50) // 100, 1, Masking(percent).places(length)), candidates)
    assert used.sum(axis=1).tolist() == wanted.tolist()
    assert (masked.labels[~used] == 0).all()
    assert (masked.positions[~used] == 0).all()


@given(integers(1, 20), integers(0, 2**63))
def test_a_row_is_masked_alike_in_any_company(place: int, seed: int) -> None:
    ids, masker = rows(21, 32), Masker(Masking(), WIDE_TOKENS, seed)
    together = masker(ids, np.arange(21) % 3, np.arange(100, 121))
    alone = masker(ids[place : place + 1], place % 3, np.array([100 + place]))
    require_equal(type(alone)(*(values[place : place + 1] for values in vars(together).values())), alone)


def test_80_percent_mask_10_percent_random_10_percent_kept() -> None:
    masked = Masker(Masking(), WIDE_TOKENS, 1)(rows(4000, 128), 0, np.arange(4000))
    used = masked.weights > 0
    shown, count = masked.input_ids[np.nonzero(used)[0], masked.positions[used]], used.sum()
    assert abs((shown == WIDE_TOKENS.mask).mean() - 0.8) < 4 * (0.16 / count) ** 0.5
    assert abs((shown == masked.labels[used]).mean() - 0.1) < 4 * (0.09 / count) ** 0.5 + 0.001
    random = shown[(shown != WIDE_TOKENS.mask) & (shown != masked.labels[used])]
    assert len(np.unique(random)) == 995, "random ids are all ordinary ids"
    assert not np.isin(random, list(WIDE_TOKENS.special)).any()


def test_each_position_is_as_likely_as_any_other() -> None:
    masked = Masker(Masking(), WIDE_TOKENS, 3)(np.full((20_000, 40), 500, np.int32), 0, np.arange(20_000))
    counts = np.bincount(masked.positions[masked.weights > 0], minlength=40)
    expected = 20_000 * 6 / 40
    assert ((counts - expected) ** 2 / expected).sum() < 80  # chi-squared with 39 degrees: p < 0.0001 above


def test_special_tokens_come_from_tokenizer_json() -> None:
    names = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]
    added = [{"id": number, "content": name, "special": True} for number, name in enumerate(names)]
    content: dict[str, Any] = {"added_tokens": added, "model": {"type": "Unigram", "vocab": [["x", 0.0]] * 60}}
    assert special_tokens(content, "t") == SpecialTokens(4, 3, frozenset(range(5)), 60)
    content["model"] = {"type": "WordPiece", "vocab": {"a": 70}}
    assert special_tokens(content, "t").vocabulary == 71
    content["added_tokens"] = added[:4]
    with pytest.raises(BadInput, match=r"gs://b/t: the tokenizer has no mask token \(one of \[MASK\], <mask>\)"):
        special_tokens(content, "gs://b/t")
    content = {"added_tokens": [{"id": 1, "content": "<|endoftext|>", "special": True}], "model": {"vocab": {"a": 0}}}
    assert special_tokens(content, "t", "documents") == SpecialTokens(-1, 1, frozenset({1}), 2, 1)
    with pytest.raises(BadInput, match=r"^t: the tokenizer has no end-of-text token \(one of <stop>\)"):
        special_tokens(content, "t", "documents", end="<stop>")
    assert special_tokens(content, "t", "class-labelled", "<none>", "<|endoftext|>").pad == 1


def of_rows(records: int, *, seed: int, batch: int) -> TrainingOrder:
    """The order of compact rows of 128 tokens."""
    return order.training_order(records, 298, seed=seed, batch=batch)


@given(integers(1, 400), integers(1, 9), integers(1, 40), integers(1, 70), integers(0, 2**64))
def test_batches_drop_and_repeat_nothing(records: int, block: int, depth: int, batch: int, seed: int) -> None:
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    shuffled = TrainingOrder(records, block, divisors[seed % len(divisors)], depth % 4 + 1, seed, batch)
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
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    count, per_shard, seed = (data.draw(integers(1, most)) for most in (150, 60, 2**63))
    dataset = make_samples(tmp_path_factory.mktemp("dataset"), count, per_shard=per_shard)
    for hosts in (2, 3, 4, 8):
        steps = data.draw(st.lists(integers(0, 30), min_size=1, max_size=4))
        require_alike_on_hosts(partial(mlm_batches, dataset, global_batch_size=24, seed=seed), hosts, steps)


@pytest.mark.parametrize(("records", "batch", "hosts"), [(50, 24, 1), (50, 24, 3), (48, 24, 2), (1, 8, 8), (23, 24, 4)])
def test_evaluation_covers_each_record_once(tmp_path: Path, records: int, batch: int, hosts: int) -> None:
    dataset = make_samples(tmp_path, records)
    parts = (mlm_evaluation(dataset, HostSlice(TOKENS, batch, host, hosts), Masking()) for host in range(hosts))
    whole = list(map(mlm_rows.join, zip(*parts, strict=True)))
    assert {len(step_batch.records) for step_batch in whole} == {batch}
    seen = np.concatenate([step_batch.records for step_batch in whole])
    assert seen.tolist() == [*range(records), *[-1] * (len(whole) * batch - records)]
    assert all((step_batch.weights[step_batch.records < 0] == 0).all() for step_batch in whole)
    for one, other in zip(whole, mlm_evaluation(dataset, HostSlice(TOKENS, batch), Masking()), strict=True):
        require_equal(one, other)


def test_a_batch_size_that_hosts_can_not_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="global batch size 24 can't be divided among 5 hosts"):
        mlm_batches(make_samples(tmp_path, 50), global_batch_size=24, hosts=5)


def test_prefetch_gives_values_and_exceptions_in_order_and_computes_ahead() -> None:
    computed: list[int] = []

    def compute(k: int) -> int:
        computed.append(k)
        if k == 9:
            raise BadInput("record 9")
        return k

    ahead = prefetch(compute, 5, 3)
    assert [next(ahead) for _ in range(4)] == [5, 6, 7, 8]
    wait_until(lambda: len(computed) >= 7)
    assert computed[:7] == list(range(5, 12))
    with pytest.raises(BadInput, match="record 9"):
        next(ahead)


@pytest.mark.parametrize("hosts", [1, 2, 8, 64, 512])
def test_a_block_is_read_by_one_host_except_in_the_uneven_window(hosts: int) -> None:
    """64 hosts read 1.01 times an epoch, 512 hosts 1.06 times, at most."""
    shuffled = of_rows(4_000_000, seed=1, batch=4096)
    uneven = shuffled.uneven_window(0)
    for number in ((uneven + 1) % shuffled.windows, uneven):
        counts, cells = blocks_of_hosts(shuffled, 4096, 0, number, hosts), shuffled.bounds(0, number)[1]
        assert sum(counts) <= -(-cells // shuffled.block) + (hosts - 1 if number == uneven else 0)
        assert max(counts) <= (cells + 4096) / shuffled.block / hosts + 2


@pytest.mark.parametrize(("batch", "record_bytes"), [(4096, 1100), (1536, 298), (1000, 298), (96, 298), (65_536, 1100)])
def test_other_batches_are_read_about_once_too(batch: int, record_bytes: int) -> None:
    shuffled = order.training_order(4_000_000, record_bytes, seed=1, batch=batch)
    number = (shuffled.uneven_window(0) + 1) % shuffled.windows
    read = sum(blocks_of_hosts(shuffled, batch, 0, number, 8)) * shuffled.block
    assert read <= 1.02 * shuffled.bounds(0, number)[1]


def test_the_blocks_are_permuted_once_an_epoch_for_all_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 TB of records there are 3.8 million blocks."""
    counts: list[int] = []
    stream = order.stream

    def count(seed: int, purpose: str, *numbers: int) -> UInts:
        counts.extend(numbers[1:2] if purpose == "blocks" else ())
        return stream(seed, purpose, *numbers)

    monkeypatch.setattr(order, "stream", count)
    shuffled = order.training_order(3_800_000 * 880, 298, seed=11, batch=256)
    for number in (0, 1, 7000, shuffled.windows - 1):
        began = time.process_time()
        assert len(np.unique(shuffled.window(2, number) // shuffled.block)) >= order.WINDOW_BLOCKS
        assert number == 0 or time.process_time() - began < 1
    assert counts == [shuffled.blocks]
