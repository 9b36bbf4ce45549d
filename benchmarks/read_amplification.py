"""What all hosts of a slice read in an epoch, over the size of the dataset: blocks are read whole, and a host needs
only some of the records of a block.

    python benchmarks/read_amplification.py [--records 4000000] [--json]

Counts the blocks of all windows of the first epoch; reads no data. The default is 1.2 GB of rows of 128 tokens.
"""

from __future__ import annotations

import argparse
import json

from training.data.sampling.order import blocks_of_hosts, training_order

HOSTS = (1, 2, 8, 64, 512)


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--record-bytes", type=int, default=298)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = []
    order = training_order(options.records, options.record_bytes, seed=1, batch=options.batch)
    block_megabytes = order.block * options.record_bytes / 1e6
    if not options.json:
        print(f"blocks of {order.block} records, {order.windows} windows an epoch")
    for hosts in HOSTS:
        windows = [blocks_of_hosts(order, options.batch, 0, number, hosts) for number in range(order.windows)]
        times = round(sum(map(sum, windows)) * order.block / options.records, 2)
        megabytes = round(max(map(max, windows)) * block_megabytes, 1)
        rows.append({"hosts": hosts, "times": times, "megabytes": megabytes})
        if not options.json:
            print(f"{hosts:4} hosts: read {times:5} times; a host at most {megabytes} MB a window")
    if options.json:
        print(json.dumps({"read": rows}))


if __name__ == "__main__":
    main()
