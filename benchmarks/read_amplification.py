"""Computes the bytes that all hosts of a slice read in an epoch, over the size of the dataset: blocks are read whole,
and a host needs only some of the records of a block.

    make benchmark NAME=read_amplification [ARGS="--records 4000000 --json"]

Counts the blocks of all windows of the first epoch; reads no data. The default is 1.2 GB of rows of 128 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import finish, row
from training.data.sampling.order import TrainingOrder, host_rows, training_order

HOSTS = (1, 2, 8, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--record-bytes", type=int, default=298)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    order = training_order(options.records, options.record_bytes, seed=1, batch=options.batch)
    rows = []
    for hosts in HOSTS:
        windows = [blocks_of_hosts(order, options.batch, 0, number, hosts) for number in range(order.windows)]
        read = sum(map(sum, windows)) * order.block / options.records
        rows.append(row(f"{hosts} hosts: read in an epoch", "datasets", read, "each record once", 1.0, "at most 1.5"))
    finish("read_amplification", rows, options.json)


def blocks_of_hosts(order: TrainingOrder, batch: int, epoch: int, number: int, hosts: int) -> list[int]:
    """Returns how many blocks each host reads for a window."""
    block = order.window(epoch, number) // order.block  # (cells,)
    start, size = order.bounds(epoch, number)
    row = (epoch * order.records + start + np.arange(size)) % batch  # (cells,)
    lasts = np.array([host_rows(batch, host, hosts)[1] for host in range(hosts)])  # (hosts,)
    host = np.searchsorted(lasts, row, side="right")  # (cells,)
    read = np.unique(host * (block.max() + 1) + block) // (block.max() + 1)  # (reads,) the host of each
    return [int(count) for count in np.bincount(read, minlength=hosts)]


if __name__ == "__main__":
    main()
