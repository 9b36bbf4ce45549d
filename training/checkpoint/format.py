"""What makes a set of parts a checkpoint: the format, as pure functions.

    <run folder>/checkpoints/step-00000040/part-0-of-2.9f31c2d4.safetensors      written by host 0
                                           part-1-of-2.9f31c2d4.safetensors      written by host 1
                                           manifest.json                         written last, by host 0, create-only:
                                           the commit

Failure model. Hosts may die, be cut off or be slow at any byte; the store never tears an object (`storage.write` is all
or nothing) but may lose or flip what it holds. So:
* Without a manifest nothing is a checkpoint, whatever else lies in the folder. The manifest is written after all hosts
  have met and told the size and crc32c of the part that each has finished writing. Nothing is renamed, ever.
* Parts carry a token of the process group that wrote them (`9f31c2d4`), so a host of an earlier attempt that wakes up
  late writes beside a committed checkpoint, never over it.
* Only the newest start of a run commits: host 0 looks for later claims before and after it writes the manifest
  (`training.run_setup.fence`). What is left of two that look at the same moment is decided by the create-only write.
* A manifest names its parts with size and crc32c, and carries a crc32c of itself. Restoring verifies all of it and
  falls back to an older checkpoint.
* Deleting removes the manifest first: a half-deleted checkpoint is no checkpoint.
* Only safetensors and JSON: nothing is executed by reading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import google_crc32c

FORMAT = 1
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """A checkpoint, or a part of one, is not what was committed. The message says what differs."""


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint."""

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True)
class TensorSpec:
    """dtype is safetensors' name: F32, BF16, I64."""

    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint. `step` steps are done; step number `step`, on batch number `step`, comes next."""

    step: int
    parts: tuple[Part, ...]
    identity: Mapping[str, Any]  # what must be equal to continue: model, data, seed, batch size
    state: Mapping[str, Any]  # small values that the run carries along, such as its first loss
    config: Mapping[str, Any]
    code: str  # hash of the trainer's source
    tensors: int
    run_id: str = ""
    attempt: int = 0
    hosts: int = 1


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder's name tells, None for other names."""
    match = _STEP_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def part_name(worker: int, hosts: int, token: str) -> str:
    return f"part-{worker}-of-{hosts}.{token}.safetensors"


def assign(tensors: Mapping[str, TensorSpec], hosts: int) -> list[list[str]]:
    """Which host writes which tensors, balanced by bytes: the largest first, each to the host that has least. Every
    tensor exactly once."""
    loads = [0] * hosts
    result: list[list[str]] = [[] for _ in range(hosts)]
    for name in sorted(tensors, key=lambda each: (-tensors[each].size, each)):
        host = loads.index(min(loads))
        loads[host] += tensors[name].size
        result[host].append(name)
    return [sorted(names) for names in result]


def dump(manifest: Manifest) -> bytes:
    """As JSON, with a crc32c over everything else in it."""
    body = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**body, "crc32c": _checksum(body)}, indent=1, sort_keys=True).encode() + b"\n"


def load(data: bytes) -> Manifest:
    """The manifest that `dump` wrote. Raises Damaged."""
    try:
        body = json.loads(data)
        checksum = body.pop("crc32c")
        version = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({error})") from None
    if checksum != _checksum({"format": version, **body}):
        raise Damaged(f"{MANIFEST} has a wrong crc32c")
    if version != FORMAT:
        raise Damaged(f"{MANIFEST} has format {version}; this version reads format {FORMAT}")
    return Manifest(**{**body, "parts": tuple(Part(**part) for part in body["parts"])})


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each key in which two identities differ."""
    keys = sorted({*saved, *wanted})
    return [
        f"{key}: the checkpoint has {saved.get(key)!r}, this run {wanted.get(key)!r}"
        for key in keys
        if saved.get(key) != wanted.get(key)
    ]


def arrange(
    tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, slice], int]:
    """How a safetensors file begins, where in it each tensor's bytes go, and its size.

    The layout (https://github.com/huggingface/safetensors#format): 8 bytes length of the header, the header as JSON,
    then the tensors.
    """
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, info in tensors:
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, offset + info.size]}
        offset += info.size
    text = json.dumps(
        {"__metadata__": dict(metadata), **header} if metadata else header, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {name: slice(*(start + each for each in entry["data_offsets"])) for name, entry in header.items()}
    return len(text).to_bytes(8, "little") + text, places, start + offset


def encode(
    tensors: Sequence[tuple[str, TensorSpec]],
    metadata: Mapping[str, str] | None = None,
    allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
) -> tuple[memoryview, dict[str, memoryview]]:
    """An empty safetensors file and, for each tensor, the place in it where its bytes go, so that a snapshot of the
    state is the file already."""
    head, places, size = arrange(tensors, metadata)
    data = allocate(size)
    data[: len(head)] = head
    return data, {name: data[place] for name, place in places.items()}


def decode(data: bytes | memoryview) -> dict[str, tuple[TensorSpec, memoryview]]:
    """The tensors of a safetensors file. Raises Damaged when it isn't one."""
    view = memoryview(data)
    return {name: (info, view[place]) for name, (info, place) in places_in(view, len(view)).items()}


def head_size(data: bytes | memoryview) -> int:
    """From the first 8 bytes of a safetensors file: how many come before its tensors."""
    return 8 + int.from_bytes(data[:8], "little")


def places_in(head: bytes | memoryview, size: int) -> dict[str, tuple[TensorSpec, slice]]:
    """Where each tensor is in a safetensors file of `size` bytes that begins with `head`. Raises Damaged."""
    try:
        start = head_size(head)
        header = json.loads(bytes(head[8:start]))
        header.pop("__metadata__", None)
        result = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - start:
                raise Damaged(f"tensor {name} lies outside its part")
            result[name] = (
                TensorSpec(entry["dtype"], tuple(entry["shape"]), end - begin),
                slice(start + begin, start + end),
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"not a safetensors file ({error})") from None
    return result


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{google_crc32c.value(json.dumps(body, sort_keys=True).encode()):08x}"
