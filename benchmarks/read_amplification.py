"""What all hosts of a slice read in an epoch, over the size of the dataset: blocks are read whole, and a host needs
only some of the records of a block.

    python benchmarks/read_amplification.py [--records 4000000] [--json]

Counts blocks of the first windows of an epoch; reads no data. The default is 1.2 GB of rows of 128 tokens.
"""

from __future__ import annotations

import argparse
import json

from training.data.sampling.order import Shuffled, blocks_of_hosts, geometry

WINDOWS = 2
HOSTS = (1, 2, 8, 64, 512)


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--record-bytes", type=int, default=298)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    shape = geometry(options.records, options.record_bytes)
    order = Shuffled(shape, 1, options.batch)
    windows = min(WINDOWS, shape.windows)
    block_megabytes = shape.block * options.record_bytes / 1e6
    rows = []
    for hosts in HOSTS:
        counts = [count for number in range(windows) for count in blocks_of_hosts(order, 0, number, hosts)]
        read = sum(counts) * shape.block / (windows * shape.window)
        rows.append({"hosts": hosts, "times": round(read, 2), "megabytes": round(max(counts) * block_megabytes, 1)})
    if options.json:
        print(json.dumps({"read": rows}))
        return
    print(f"{shape.blocks} blocks of {shape.block} records, windows of {shape.window // options.batch} steps")
    for row in rows:
        print(f"{row['hosts']:4} hosts: read {row['times']:5} times; a host at most {row['megabytes']} MB a window")


if __name__ == "__main__":
    main()
