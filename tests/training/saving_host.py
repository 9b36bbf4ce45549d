"""A host that saves one checkpoint, as a process: saving_host.py FOLDER WORKER HOSTS PORT BYTES. Prints the seconds
from the last arrival to the commit."""

import sys
import time
from collections.abc import Mapping

import numpy as np

from training.checkpoint.retention import Keep
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import join
from training.distributed.shutdown import ShutdownRequest

TENSORS = 16


def main(folder: str, worker: int, hosts: int, port: int, size: int) -> None:
    cluster = Cluster(worker, ("127.0.0.1",) * hosts, run_id="r", rendezvous_port=port)
    layout = {f"model/{index}": TensorSpec("F32", (size // TENSORS // 4,), size // TENSORS) for index in range(TENSORS)}

    def copy(places: Mapping[str, memoryview]) -> Snapshot:
        return Snapshot((np.frombuffer(place, np.uint8), np.uint8(worker)) for place in places.values())

    rendezvous = join(cluster, ShutdownRequest(), start_seconds=60, seconds=60, lost_seconds=10)
    saver = CheckpointWriter(folder, cluster, rendezvous, RunDescription({}, {}, "c", "t"), Keep(2))
    saver.save(1, layout, copy, {})  # imports, connects
    saver.wait()
    rendezvous.meet("go")
    began = time.monotonic()
    saver.save(2, layout, copy, {})
    saver.wait()
    print(time.monotonic() - began, flush=True)
    rendezvous.meet("end")
    rendezvous.close(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
