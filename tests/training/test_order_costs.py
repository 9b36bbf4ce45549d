"""Claims of `training.data.sampling.order` about what hosts read, and about what a checkpoint must agree with."""

from __future__ import annotations

import pytest

from training.data.sampling import order
from training.data.sampling.order import GROUP_BLOCKS, Shuffled, blocks_of_hosts, geometry


@pytest.mark.parametrize(("hosts", "times"), [(1, 1.01), (2, 1.1), (8, 1.3), (64, 3.1), (512, 17.5)])
def test_what_all_hosts_read_of_an_epoch_is_as_documented(hosts: int, times: float) -> None:
    """1.2 GB of rows of 128 tokens, a batch of 4,096."""
    shuffled = Shuffled(geometry(4_000_000, 298), seed=1, batch=4096)
    blocks = blocks_of_hosts(shuffled, 0, 1, hosts)
    assert sum(blocks) * shuffled.geometry.block / shuffled.geometry.window <= times
    assert hosts < 64 or max(blocks) <= 3 * GROUP_BLOCKS


def test_another_order_is_another_identity_and_the_first_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of all versions so far do not name the order."""
    assert order.identity() == {}
    monkeypatch.setattr(order, "ORDER_VERSION", 2)
    assert order.identity() == {"data.order": 2}
