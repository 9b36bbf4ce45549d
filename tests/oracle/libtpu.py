"""Asks the real libtpu of an image how it understands an environment, on a machine without a TPU.

When a client is made, libtpu turns the TPU_* variables into flags and writes them to $TPU_LOG_DIR, before it looks for
chips and fails. Each question is a process of its own: libtpu reads its environment once.
"""

import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.accelerators import ACCELERATORS, Accelerator
from training.distributed.cluster import Cluster, tpu_environment

# libtpu prefixes its own flags with a code that may change from release to release.
_FLAG = re.compile(r"argv\[\d+\]: '--(?:[0-9a-f]{6,}_)?([\w]+)=(.*)'")

# In PJRT_Api: functions are pointers from byte 40 on, in this order.
_ERROR_MESSAGE, _PLUGIN_INITIALIZE, _CLIENT_CREATE = 1, 3, 10
_SECONDS = 60


@dataclass(frozen=True)
class Understood:
    """What libtpu made of an environment."""

    flags: dict[str, str]  # for example "host_bounds": "1,1,4"
    error: str  # why there is no client


class _Api(ctypes.Structure):
    _fields_ = [("header", ctypes.c_char * 40), ("functions", ctypes.c_void_p * 64)]


class _CreateArguments(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("fields", ctypes.c_void_p * 10)]


class _MessageArguments(ctypes.Structure):
    _pointers = [(name, ctypes.c_void_p) for name in ("extension", "error", "message")]
    _fields_ = [("size", ctypes.c_size_t), *_pointers, ("length", ctypes.c_size_t)]


def library() -> str:
    """The libtpu.so that this image's framework loads."""
    spec = importlib.util.find_spec("libtpu")
    assert spec.submodule_search_locations
    return f"{spec.submodule_search_locations[0]}/libtpu.so"


def ask(environment: Mapping[str, str]) -> Understood:
    """Makes libtpu create a client in a process with `environment`. Fails when it crashes or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _create_client({**environment, "TPU_LOG_DIR": folder}, writing)
        os.close(writing)
        with os.fdopen(reading) as answer:
            error = answer.read()
        _, status = os.waitpid(child, 0)
        assert status == 0, f"libtpu ended with wait status {status} for {dict(environment)}"
        logs = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.INFO.*"))]
    flags = {name: value for log in logs for name, value in _FLAG.findall(log)}
    return Understood(flags, error)


def _create_client(environment: Mapping[str, str], answer: int) -> None:
    """In the child: writes the error to `answer` and ends the process."""
    import signal

    signal.alarm(_SECONDS)  # a hang ends by a signal, which the parent sees
    for name in [name for name in os.environ if name.startswith("TPU_")]:
        del os.environ[name]
    os.environ.update(environment)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    plugin = ctypes.CDLL(library())
    plugin.GetPjrtApi.restype = ctypes.POINTER(_Api)
    api = plugin.GetPjrtApi().contents
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    initialize = _MessageArguments(16)
    function(api.functions[_PLUGIN_INITIALIZE])(ctypes.byref(initialize))
    arguments = _CreateArguments(ctypes.sizeof(_CreateArguments))
    error = function(api.functions[_CLIENT_CREATE])(ctypes.byref(arguments))
    message = b""
    if error:
        asked = _MessageArguments(ctypes.sizeof(_MessageArguments), None, error)
        function(api.functions[_ERROR_MESSAGE])(ctypes.byref(asked))
        message = ctypes.string_at(asked.message, asked.length)
    os.write(answer, message)
    os._exit(0)


def hosts_to_ask(accelerator: Accelerator) -> list[int]:
    """Returns worker indices: all of up to 8 hosts, else the first two, the middle and the last; only these differ."""
    last = accelerator.hosts - 1
    return list(range(accelerator.hosts)) if last < 8 else [0, 1, accelerator.hosts // 2, last]


def expected_flags(accelerator: Accelerator, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what libtpu must have understood: what GKE's device plugin gives (`addPodsliceOrSliceEnvs`)."""
    addresses = ",".join(f"{name}:8471" for name in environment["TPU_WORKER_HOSTNAMES"].split(","))
    dimensions = (*accelerator.topology, 1)[:3]
    chips = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[accelerator.chips_per_host]
    flags = {
        "chips_per_host_bounds": ",".join(map(str, chips)),
        "host_bounds": ",".join(str(size // each) for size, each in zip(dimensions, chips, strict=True)),
        "slice_builder_worker_addresses": addresses,
        "slice_builder_worker_port": "8471",
    }
    if accelerator.generation.name in ("v4", "v5p"):
        whole = min(dimensions) >= 4
        flags["wrap"] = ",".join([str(whole).lower()] * 3)
        flags["ici_resilient"] = str(whole).lower()
    elif accelerator.generation.name in ("v5e", "v6e"):
        flags["wrap"] = ",".join(str(size == 16).lower() for size in dimensions)
    return flags


def compare() -> list[str]:
    """Asks for every accelerator type. Returns a line for each difference."""
    differences: list[str] = []
    for accelerator in ACCELERATORS.values():
        addresses = tuple(f"10.{number >> 8}.{number & 255}.2" for number in range(accelerator.hosts))
        for worker in hosts_to_ask(accelerator):
            environment = tpu_environment(Cluster(worker, addresses, accelerator.name))
            understood = ask(environment)
            wanted = {**expected_flags(accelerator, environment), "client": "an error"}
            seen = {**understood.flags, "client": "an error" if understood.error else "none"}
            differences += [
                f"{accelerator.name} host {worker}: {name}: expected {value}, libtpu understood {seen.get(name)}"
                for name, value in wanted.items()
                if seen.get(name) != value
            ]
    return differences


if __name__ == "__main__":
    sys.exit("\n".join(compare()))
