"""`tpu-train check-devices`: measures this host and its devices in seconds, before a run begins.

Every host of a slice runs it at the same time, and prints each fact as soon as it is known, as one line
`check-devices {"name": value}`, so that the launcher knows how far a host came that hangs or crashes.
`find_problems` judges the facts of one host; launcher/device_check judges what only a comparison of hosts shows. Each
framework's half is in its backend's folder.
"""

import glob
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training import storage
from training.accelerators import ACCELERATORS
from training.distributed.cluster import Cluster, device_kind
from training.distributed.rendezvous import Rendezvous
from training.errors import TrainError
from training.registry import BACKENDS, load

PREFIX = "check-devices "
OLDER_TORCH_XLA = "image.build_args: {REQUIREMENTS: requirements-2.8.txt} takes the torch_xla before"

OPENING = "opening the devices"  # a phase
_CAP_SYS_ADMIN = 21  # the capability's bit (linux/capability.h)
_FREE_BYTES = 10 << 30  # on the container's disk; less is reported

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A defect of a host."""

    message: str
    fix: str = ""  # advice for the user
    fatal: bool = True  # a run would fail on it


def print_fact(name: str, value: Any) -> None:
    """Prints a fact as a line that `parse_facts` reads."""
    print(PREFIX + json.dumps({name: value}), flush=True)


def parse_facts(lines: Iterable[str]) -> dict[str, Any]:
    """Returns the facts in a host's output, each with its last value. Ignores damaged lines."""
    facts: dict[str, Any] = {}
    for line in lines:
        _rank, mark, fact = line.partition(PREFIX)  # TorchTPU's processes print theirs after "rank N: "
        if mark:
            try:
                told = json.loads(fact)
            except ValueError:
                continue  # another process wrote into the line
            facts.update(told if isinstance(told, dict) else {})
    return facts


def find_problems(facts: Facts, hosts: int, accelerator_type: str | None = None) -> list[Problem]:
    """Returns the problems of one of `hosts` hosts, which reported `facts`; [] for none. Judges nothing by a fact that
    is lost. Only little free disk is not fatal. `accelerator_type`, such as "v3-8", only adds advice for v2 and v3."""
    slice_ = ACCELERATORS.get(accelerator_type or "")
    older = f"; {OLDER_TORCH_XLA}" if slice_ is not None and slice_.generation.name in ("v2", "v3") else ""
    recreate = f"`tpu-launch down`, then `up`: a host of a slice can't be exchanged{older}"
    problems = []
    if error := facts.get("error"):
        phase = facts.get("phase", "beginning")
        files = ""
        if phase == OPENING and "user" in facts:
            devices = ", ".join(facts.get("device_files", [])) or "no /dev/accel* or /dev/vfio/*"
            files = f" (user {facts['user']}, effective capabilities {facts.get('capabilities', '?')}; {devices})"
        as_root = "leave run.user out, so that the container runs as root; else "
        # The drivers of some generations demand root with CAP_SYS_ADMIN.
        may_open = facts.get("user") == 0 and int(facts.get("capabilities", "0"), 16) >> _CAP_SYS_ADMIN & 1
        fix = as_root + recreate if files and not may_open else recreate
        problems.append(Problem(f"{phase}: {error}{files}", fix))
    expected, count, total = facts.get("devices_expected"), facts.get("devices"), facts.get("slice_devices")
    if count is not None and expected is not None and count != expected:
        problems.append(Problem(f"{count} {facts.get('kind', '')} devices, and it should have {expected}", recreate))
    if count is not None and count == expected and total is not None and total != expected * hosts:
        message = f"it sees {total} devices in the slice, which should have {expected * hosts}"
        problems.append(Problem(message, recreate))
    if facts.get("wrong_products"):
        problems.append(Problem(f"{facts['wrong_products']} elements of a matrix product are wrong", recreate))
    if None not in (facts.get("sum"), total) and facts["sum"] != total:
        problems.append(Problem(f"ones of {total} devices add up to {facts['sum']:g}", recreate))
    if error := facts.get("bucket_error"):
        problems.append(Problem(f"output: {error}", "the hosts' service account needs roles/storage.objectUser"))
    free = facts.get("disk_free_bytes")
    if free is not None and free < _FREE_BYTES:
        fix = "docker system prune --all, on that host"
        problems.append(Problem(f"{free / 2**30:.1f} GiB of disk are free", fix, fatal=False))
    return problems


def measure_access(folder: str = "/dev", status: str = "/proc/self/status") -> dict[str, Any]:
    """Returns the facts "user" (this process's effective id), "capabilities" (effective, hexadecimal) and
    "device_files" (`crw------- 0:0 /dev/accel0` for each TPU device file: mode, owner and group, path)."""
    lines = Path(status).read_text().splitlines() if Path(status).exists() else []
    capabilities = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    paths = sorted(glob.glob(f"{folder}/accel[0-9]*") + glob.glob(f"{folder}/vfio/*"))
    files = [(path, os.stat(path)) for path in paths]
    return {
        "user": os.geteuid(),
        "capabilities": capabilities[0] if capabilities else "0",
        "device_files": [f"{stat.filemode(at.st_mode)} {at.st_uid}:{at.st_gid} {path}" for path, at in files],
    }


_FILE_BYTES = 8 << 20  # written to the bucket and read again


class Devices(Protocol):
    """The devices of the slice, opened by a framework. `BackendEntry.devices` names the class."""

    local: int  # number of this host's devices
    total: int  # number of all hosts' devices

    def memory_bytes(self) -> int | None:
        """Returns the memory of a device; None if the framework does not report it."""

    def wrong_products(self) -> int:
        """Multiplies bfloat16 matrices on every device of this process and returns how many elements are wrong."""

    def sum_ones(self) -> float:
        """Returns the sum of a one from every device of all hosts. A collective: all hosts must call it."""


def check_host(
    backend: str, output: str | None, cluster: Cluster, rendezvous: Rendezvous, report: Callable[[str, Any], None]
) -> None:
    """Passes facts about this host to `report`, by name, as `find_problems` reads them: each phase that begins, clock,
    free disk, user and rights, kind, number and memory of its devices, whether these multiply right and add up with all
    hosts', which must call it together, and whether and how fast `output` is written and read, if that is in Cloud
    Storage (not for None or a local folder). A wrong sum or a refusal of the bucket is a fact; raises TrainError if a
    device can't be opened or used, a host is lost, or a stop is requested."""
    report("phase", "waiting for all hosts")
    token: str = rendezvous.meet("device check", secrets.token_hex(4))[0]
    report("clock", time.time())
    report("disk_free_bytes", shutil.disk_usage("/").free)
    if output and storage.is_remote(output):
        report("phase", "measuring the bucket")
        measure_bucket(storage.join(output, f"device-check-{token}-{cluster.worker}"), report)
    for name, value in measure_access().items():
        report(name, value)
    report("phase", OPENING)
    kind = device_kind()
    slice_ = ACCELERATORS.get(cluster.accelerator_type or "")
    per_host = int(os.environ.get("CPU_NUM_DEVICES") or 1)
    if kind == "TPU" and slice_ is not None:
        per_host = slice_.devices // slice_.hosts
    report("kind", kind)
    report("devices_expected", per_host)
    try:
        devices: Devices = load(BACKENDS[backend].devices)(cluster, rendezvous)
        report("devices", devices.local)
        report("slice_devices", devices.total)
        report("memory_bytes", devices.memory_bytes())
        report("phase", "multiplying matrices")
        report("wrong_products", devices.wrong_products())
        report("phase", "adding up over all devices")
        report("sum", devices.sum_ones())
    except TrainError:
        raise
    except Exception as error:  # a framework raises anything
        raise TrainError(f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}") from error
    rendezvous.meet("device check done")
    report("phase", "done")


def measure_bucket(url: str, report: Callable[[str, Any], None]) -> None:
    """Writes an object of 8 MiB at `url`, reads and deletes it. Calls `report` with facts: the two speeds (MB/s), and
    for an error (then no speeds) or wrong bytes "bucket_error"."""
    data = os.urandom(_FILE_BYTES)
    try:
        began = time.monotonic()
        storage.write(url, data)
        written = time.monotonic()
        try:
            intact = storage.read(url) == data
            read = time.monotonic()
        finally:
            storage.delete(url)
    except TrainError as error:
        report("bucket_error", str(error))
        return
    report("bucket_write_mb_s", round(_FILE_BYTES / 1e6 / max(written - began, 1e-9), 1))
    report("bucket_read_mb_s", round(_FILE_BYTES / 1e6 / max(read - written, 1e-9), 1))
    if not intact:
        report("bucket_error", f"{url}: the object that was read differs from the one written")
