"""What each device holds of the state after a step, fresh and restored, and how many calls copied the state, on the
virtual TPU: for a test.

python -m tests.virtual_tpu.shards FOLDER        prints one JSON object
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c

from tests.container import small_runs
from training.backends.protocol import Backend
from training.batch import Signals
from training.config import from_document
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.run_end import weights_crc32c
from training.run_setup import open_backend, open_task
from training.yaml_file import Document

TO_DEVICES, TO_HOST = "TransferToDeviceTime", "TransferFromDeviceTime"  # torch_xla's metrics


def step_and_look(folder: Path, state: dict[str, bytes] | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """One step from fresh weights or from `state`. Returns what devices hold, and the state as a checkpoint has it."""
    document = Document("here", small_runs.document(folder), {})
    config, cluster = from_document(document), Cluster(0, ("localhost",), "v3-8")
    task = open_task(config, cluster)
    backend: Any = open_backend(config, cluster, SingleHost(), task)
    specs = backend.tensor_specs()
    if state:
        backend.load_state({name: (specs[name], memoryview(data)) for name, data in state.items()})
    calls = {"upload": count_calls(TO_DEVICES, backend.upload)}
    backend.step(0, next(backend.batches(task, 0)).arrays, Signals()).result()
    buffers = {name: bytearray(spec.size) for name, spec in specs.items()}
    views, checksums = {name: memoryview(buffer) for name, buffer in buffers.items()}, list[dict[str, str]]()
    calls["snapshot"] = count_calls(TO_HOST, lambda: backend.snapshot_state(views).wait())
    calls["checksum"] = count_calls(TO_HOST, lambda: checksums.append(weights_crc32c(backend, 0)))
    weights = b"".join(bytes(data) for name, data in sorted(buffers.items()) if name.startswith("model/"))
    assert checksums == [{"": f"{google_crc32c.value(weights):08x}"}]
    calls["unplanned"] = backend.counters()["device_to_host_syncs"]
    return {**look(backend), **calls, "tensors": len(specs), "buffers": len(backend.state.buffers())}, {
        name: bytes(buffer) for name, buffer in buffers.items()
    }


def count_calls(metric: str, action: Callable[[], object]) -> int:
    """How often torch_xla copies between host and devices in an action; one call may copy many tensors."""
    import torch_xla.debug.metrics as xla_metrics

    before = (xla_metrics.metric_data(metric) or [0])[0]
    action()
    return int((xla_metrics.metric_data(metric) or [0])[0] - before)


def look(backend: Backend | Any) -> dict[str, Any]:
    """Tensors that are split over the devices, and tensors whose copies differ."""
    from torch_xla import _XLAC

    split, different = [], []
    for name, value in backend.state.buffers().items():
        (shards,) = _XLAC._get_local_shards([value])
        copies = [shard for shard, _ in shards]
        if len(copies) != backend.devices or any(copy.shape != value.shape for copy in copies):
            split.append(name)
        elif any(not copy.equal(copies[0]) for copy in copies):
            different.append(name)
    return {"devices": backend.devices, "split": split, "different": different}


if __name__ == "__main__":
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
    fresh, state = step_and_look(Path(sys.argv[1]), None)
    resumed, _ = step_and_look(Path(sys.argv[1]), state)
    print(json.dumps({"fresh": fresh, "resumed": resumed, "jax": "jax" in sys.modules}))
