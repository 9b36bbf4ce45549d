"""What this host and its devices are like, found in seconds before a run begins: `tpu-train check-devices`.

Every host of a slice runs it at the same time, and reports a fact as soon as it is known: of a host that hangs, or
whose driver ends the process, the launcher knows what came before. The frameworks' halves are in `torch.py` and
`tf.py`; what the facts mean is in `facts.py`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from typing import Any, Protocol

from training import storage
from training.accelerators import ACCELERATORS
from training.distributed.cluster import Cluster, device_kind
from training.distributed.rendezvous import Rendezvous
from training.errors import TrainError
from training.registry import BACKENDS, load

_FILE_BYTES = 8 << 20  # written to the bucket and read again


class Devices(Protocol):
    """The devices of the slice, opened by a framework. `BackendEntry.devices` names the class."""

    local: int
    """How many this host has."""

    total: int
    """How many all hosts have."""

    def memory_bytes(self) -> int | None:
        """Memory of a device; None when the framework does not tell."""

    def wrong_products(self) -> int:
        """Of a bfloat16 matrix product on every device of this process, how many elements are wrong."""

    def sum_ones(self) -> float:
        """A one from every device, summed over all devices of all hosts: a collective."""


OpenDevices = Callable[[Cluster, Rendezvous, str], Devices]


def check(
    backend: str, output: str | None, cluster: Cluster, rendezvous: Rendezvous, report: Callable[[str, Any], None]
) -> None:
    """Finds out about this host and reports each fact. Every host must call it.

    Args:
        backend: Name of the framework that opens the devices.
        output: Where a run would write; measured when it is in Cloud Storage.
        cluster: This host's place.
        rendezvous: Where the hosts meet.
        report: Is given the name and the value of each fact.

    Raises:
        TrainError: A device could not be opened or used, or another host is lost.
    """
    report("phase", "waiting for all hosts")
    token: str = rendezvous.meet("device check", secrets.token_hex(4))[0]
    report("clock", time.time())
    report("disk_free_bytes", shutil.disk_usage("/").free)
    if output and storage.is_remote(output):
        report("phase", "measuring the bucket")
        measure_bucket(storage.join(output, f"device-check-{token}-{cluster.worker}"), report)
    report("phase", "opening the devices")
    kind = device_kind()
    slice_ = ACCELERATORS.get(cluster.accelerator_type or "")
    per_host = int(os.environ.get("CPU_NUM_DEVICES") or 1)
    if kind == "TPU" and slice_ is not None:
        per_host = slice_.devices // slice_.hosts
    report("kind", kind)
    report("devices_expected", per_host)
    try:
        _use_devices(load(BACKENDS[backend].devices), cluster, rendezvous, token, report)
    except TrainError:
        raise
    except Exception as error:  # a framework raises anything
        raise TrainError(f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}") from error
    rendezvous.meet("device check done")
    report("phase", "done")


def _use_devices(
    open_devices: OpenDevices,
    cluster: Cluster,
    rendezvous: Rendezvous,
    token: str,
    report: Callable[[str, Any], None],
) -> None:
    devices = open_devices(cluster, rendezvous, token)
    report("devices", devices.local)
    report("slice_devices", devices.total)
    report("memory_bytes", devices.memory_bytes())
    report("phase", "multiplying matrices")
    report("wrong_products", devices.wrong_products())
    report("phase", "adding up over all devices")
    report("sum", devices.sum_ones())


def measure_bucket(url: str, report: Callable[[str, Any], None], store: storage.Storage = storage) -> None:
    """Writes, reads and deletes one object, and reports the speeds (MB/s), or what failed."""
    data = os.urandom(_FILE_BYTES)
    try:
        began = time.monotonic()
        store.write(url, data)
        written = time.monotonic()
        intact = store.read(url) == data
        read = time.monotonic()
        store.delete(url)
    except TrainError as error:
        report("bucket_error", str(error))
        return
    report("bucket_write_mb_s", round(_FILE_BYTES / 1e6 / max(written - began, 1e-9), 1))
    report("bucket_read_mb_s", round(_FILE_BYTES / 1e6 / max(read - written, 1e-9), 1))
    if not intact:
        report("bucket_error", f"{url}: what was read is not what was written")
