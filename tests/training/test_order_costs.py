"""Claims of `training.data.sampling.order` about what hosts read and what a window costs."""

import time

import numpy as np
import pytest

from benchmarks.read_amplification import blocks_of_hosts
from training.data.sampling import order
from training.data.sampling.random_bits import UInts

LARGE = {"records": 4_000_000, "record_bytes": 298}  # 1.2 GB of rows of 128 tokens


@pytest.mark.parametrize("hosts", [1, 2, 8, 64, 512])
def test_a_block_is_read_by_one_host_except_in_the_uneven_window(hosts: int) -> None:
    """64 hosts read 1.01 times an epoch, 512 hosts 1.06 times, at most."""
    shuffled = order.training_order(**LARGE, seed=1, batch=4096)
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
        if purpose == "blocks":
            counts.append(numbers[1])
        return stream(seed, purpose, *numbers)

    monkeypatch.setattr(order, "stream", count)
    shuffled = order.training_order(3_800_000 * 880, 298, seed=11, batch=256)
    for number in (0, 1, 7000, shuffled.windows - 1):
        began = time.process_time()
        assert len(np.unique(shuffled.window(2, number) // shuffled.block)) >= order.WINDOW_BLOCKS
        assert number == 0 or time.process_time() - began < 1
    assert counts == [shuffled.blocks]
