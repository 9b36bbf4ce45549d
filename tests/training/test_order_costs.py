"""Claims of `training.data.sampling.order` about what hosts read, what a window costs, and what a checkpoint says."""

from __future__ import annotations

import time

import numpy as np
import pytest

from training.data.sampling import blocks, order
from training.data.sampling.groups import GROUP_BLOCKS
from training.errors import BadInput

LARGE = {"records": 4_000_000, "record_bytes": 298}  # 1.2 GB of rows of 128 tokens


@pytest.mark.parametrize(("hosts", "times"), [(1, 1.01), (2, 1.1), (8, 1.3), (64, 3.1), (512, 17.5)])
def test_what_all_hosts_read_of_a_window_of_version_1_is_as_documented(hosts: int, times: float) -> None:
    shuffled = order.training_order(1, **LARGE, seed=1, batch=4096)
    counts = order.blocks_of_hosts(shuffled, 4096, 0, 1, hosts)
    assert sum(counts) * shuffled.block / shuffled.bounds(0, 1)[1] <= times
    assert hosts < 64 or max(counts) <= 3 * GROUP_BLOCKS


@pytest.mark.parametrize("hosts", [1, 2, 8, 64, 512])
def test_a_block_of_version_2_is_read_by_one_host_except_in_the_uneven_window(hosts: int) -> None:
    """64 hosts read 1.01 times an epoch, 512 hosts 1.06 times, at most."""
    shuffled = order.training_order(2, **LARGE, seed=1, batch=4096)
    uneven = shuffled.uneven(0)
    for number in ((uneven + 1) % shuffled.windows, uneven):
        counts, cells = order.blocks_of_hosts(shuffled, 4096, 0, number, hosts), shuffled.bounds(0, number)[1]
        assert sum(counts) <= -(-cells // shuffled.block) + (hosts - 1 if number == uneven else 0)
        assert max(counts) <= (cells + 4096) / shuffled.block / hosts + 2


@pytest.mark.parametrize(
    ("batch", "unit", "record_bytes"),
    [(4096, 256, 298), (4096, 0, 1100), (1536, 0, 298), (1000, 256, 298), (96, 0, 298), (65_536, 0, 1100)],
)
def test_other_batches_and_compressed_datasets_are_read_about_once_too(
    batch: int, unit: int, record_bytes: int
) -> None:
    """By 8 hosts."""
    shuffled = order.training_order(2, 4_000_000, record_bytes, unit, seed=1, batch=batch)
    assert not unit or shuffled.block % unit == 0
    number = (shuffled.uneven(0) + 1) % shuffled.windows
    read = sum(order.blocks_of_hosts(shuffled, batch, 0, number, 8)) * shuffled.block
    assert read <= 1.02 * shuffled.bounds(0, number)[1]


def test_the_blocks_are_permuted_once_an_epoch_for_all_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 TB of records there are 3.8 million blocks."""
    counts: list[int] = []
    stream = blocks.stream
    monkeypatch.setattr(blocks, "stream", lambda *numbers: counts.append(numbers[3]) or stream(*numbers))
    shuffled = order.training_order(2, 3_800_000 * 880, 298, seed=11, batch=256)
    for number in (0, 1, 7000, shuffled.windows - 1):
        began = time.process_time()
        records = shuffled.window(2, number)
        assert len(np.unique(records // shuffled.block)) >= blocks.WINDOW_BLOCKS
        assert number == 0 or time.process_time() - began < 1
    assert counts == [shuffled.blocks]


def test_an_order_is_part_of_a_checkpoint_and_the_first_has_no_name() -> None:
    """Checkpoints of the first version do not name the order."""
    assert order.identity(1) == {}
    assert order.identity(2) == {"data.order": 2}
    assert [order.version_of(order.identity(version)) for version in (1, 2)] == [1, 2]


@pytest.mark.parametrize("version", [3, 0, "2", True, None])
def test_an_order_that_this_program_does_not_have_is_refused(version: object) -> None:
    with pytest.raises(BadInput, match=r"version .* of the order of records, and this program has versions 1 to 2"):
        order.version_of({"data.order": version})
