"""The checkpoint format: which files of a folder form a checkpoint, and how its manifest is encoded.

    <run folder>/checkpoints/step-00000040/part-0-of-2.9f31c2d4.safetensors      written by host 0
                                           part-1-of-2.9f31c2d4.safetensors      written by host 1
                                           manifest.json                         written last, by host 0, create-only:
                                           the commit

The manifest lists each tensor with its global shape and its slices (offsets and sizes in that shape, and the part that
holds them). A slice is a tensor of its part's safetensors file, named by `tensors.key_in_part`. The order of the slices
in the file, and so the place of each, follow from the manifest (`slices_by_part`, `tensors.plan_file`).

Failure model. Hosts may die, be cut off or be slow at any byte; the store never tears an object (`storage.write` is all
or nothing) but may lose or flip what it holds. Therefore:
* A folder without a manifest is not a checkpoint, whatever else lies in it. Host 0 writes the manifest after every host
  has reported the size and crc32c of its finished part. Nothing is ever renamed.
* Part names carry a token of the process group that wrote them (`9f31c2d4`), so a host of an earlier attempt that
  resumes late writes beside a committed checkpoint, never over it.
* Only a finite state is committed: the loop ends at the first step that is not finite, and each host checks its part in
  host memory. Restoring skips a checkpoint that is not finite, like a damaged one.
* Only the newest start of a run commits: host 0 looks for later claims before and after it writes the manifest
  (`training.distributed.agreement`). A host that was suspended between look and write may commit a step of an older
  attempt. The newest start keeps that checkpoint if it is complete, and replaces it otherwise.
* A manifest names its parts and slices with their crc32c, and carries a crc32c of itself. Restoring verifies the
  slices that each host reads, and that those of each tensor hold every element exactly once; otherwise it falls back to
  an older checkpoint.
* Deletion removes the manifest first: a half-deleted checkpoint is not a checkpoint.
* Only safetensors and JSON: reading executes nothing.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c

from training import storage as default_storage
from training.checkpoint.tensors import (
    Damaged,
    HeldSlice,
    Slice,
    StateSlices,
    TensorSpec,
    key_in_part,
    partition_error,
    whole,
)
from training.storage import NotFound, Storage, join

FORMAT = 3
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint."""

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True)
class StoredSlice:
    """A slice, the index of the part that holds it, and the CRC-32C of its bytes (0 until it is written)."""

    part: int
    box: Slice
    crc32c: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its global specification, and the slices that hold it."""

    spec: TensorSpec
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class PartSlice:
    """A slice in the file of its part: the tensor's name, and the slice's name and specification there."""

    name: str
    stored: StoredSlice
    key: str
    spec: TensorSpec


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint. `step` steps are done; step number `step`, on batch number `step`, comes next."""

    step: int
    parts: tuple[Part, ...]
    identity: Mapping[str, Any]  # must equal the run's to continue: model, data, seed, batch size
    state: Mapping[str, Any]  # small values that the run carries along, such as its first loss
    config: Mapping[str, Any]
    code: str  # hash of the trainer's source
    tensors: Mapping[str, StoredTensor]
    run_id: str = ""
    attempt: int = 0
    hosts: int = 1

    @property
    def size(self) -> int:
        """Returns the number of bytes of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def best_step(self) -> int | None:
        """Returns the step with the best figure when this checkpoint was saved; None if the run had compared none."""
        best = self.state.get("best")
        return None if best is None else int(best["step"])


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """Returns the step of a step folder's name (not its path), step-00000040; None for other names."""
    match = _STEP_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def part_name(worker: int, hosts: int, token: str) -> str:
    """Returns the name of a host's part. `token` belongs to the process group that writes it."""
    return f"part-{worker}-of-{hosts}.{token}.safetensors"


def assign_slices(tensors: Mapping[str, TensorSpec], split: StateSlices, hosts: int) -> dict[str, StoredTensor]:
    """Returns the manifest's tensors: each slice in the part of one of the hosts that hold it, balanced by bytes: the
    largest first, each to the host with the fewest bytes. Tensors that are not `split` are one slice. The checksums
    are not filled in yet."""
    loads = [0] * hosts
    held = {name: split.get(name) or [HeldSlice(whole(tensors[name].shape), tuple(range(hosts)))] for name in tensors}
    parts: dict[str, list[StoredSlice]] = {name: [] for name in sorted(tensors)}
    sizes = {name: tensors[name].size // len(slices) for name, slices in held.items()}
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        for slice_ in held[name]:
            host = min(slice_.hosts, key=lambda worker: (loads[worker], worker))
            loads[host] += sizes[name]
            parts[name].append(StoredSlice(host, slice_.box))
    return {name: StoredTensor(tensors[name], tuple(slices)) for name, slices in parts.items()}


def slices_by_part(tensors: Mapping[str, StoredTensor], parts: int) -> list[list[PartSlice]]:
    """Returns the slices in each of `parts` parts, in the order of its file: by the names of tensors."""
    files: list[list[PartSlice]] = [[] for _ in range(parts)]
    for name, tensor in sorted(tensors.items()):
        for stored in tensor.slices:
            key = key_in_part(name, stored.box, tensor.spec.shape)
            files[stored.part].append(PartSlice(name, stored, key, tensor.spec.cut(stored.box)))
    return files


def add_checksums(tensors: Mapping[str, StoredTensor], checksums: Sequence[Sequence[int]]) -> dict[str, StoredTensor]:
    """Returns the tensors with each slice's CRC-32C. `checksums`: of each part, in the order of `slices_by_part`."""
    files = slices_by_part(tensors, len(checksums))
    pairs = [pair for entries, of in zip(files, checksums, strict=True) for pair in zip(entries, of, strict=True)]
    found = {(entry.name, entry.stored): checksum for entry, checksum in pairs}
    return {
        name: replace(tensor, slices=tuple(replace(each, crc32c=found[name, each]) for each in tensor.slices))
        for name, tensor in tensors.items()
    }


def dump_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest as JSON, with a crc32c over everything else in it."""
    body = to_json(manifest)
    return render({**body, "crc32c": _checksum(body)}).encode()


def load_manifest(data: bytes) -> Manifest:
    """Decodes the bytes that `dump_manifest` wrote. Raises Damaged for other bytes, or another format."""
    try:
        body = json.loads(data)
        checksum = body.pop("crc32c")
        version = body["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({error})") from None
    if checksum != _checksum(body):
        raise Damaged(f"{MANIFEST} has a wrong crc32c")
    if version != FORMAT:
        raise Damaged(f"{MANIFEST} has format {version}; this version reads format {FORMAT}")
    del body["format"]
    try:
        parts = tuple(Part(**part) for part in body.pop("parts"))
        tensors = {name: _load_tensor(name, value, len(parts)) for name, value in body.pop("tensors").items()}
        manifest = Manifest(**body, parts=parts, tensors=tensors)
        _check_values(manifest)
        return manifest
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{MANIFEST} is not of format {version} ({error})") from None


def _check_values(manifest: Manifest) -> None:
    """Raises TypeError or ValueError for values that `dump_manifest` never writes, even if the crc32c is right."""
    for part in manifest.parts:
        if not isinstance(part.name, str) or "/" in part.name or part.name in ("", ".", "..", MANIFEST):
            raise ValueError(f"a part can't be named {part.name!r:.80}")
    tensors = manifest.tensors.values()
    numbers = [manifest.step, manifest.attempt, manifest.hosts, *(tensor.spec.size for tensor in tensors)]
    numbers += [each.crc32c for tensor in tensors for each in tensor.slices]
    numbers += [number for part in manifest.parts for number in (part.size, part.crc32c)]
    for number in numbers:
        if type(number) is not int or number < 0:
            raise TypeError(f"{number!r:.80} is no whole number")
    objects = (manifest.identity, manifest.state, manifest.config)
    for kind, values in ((dict, objects), (str, (manifest.code, manifest.run_id))):
        for value in values:
            if not isinstance(value, kind):
                raise TypeError(f"{value!r:.80} is no {kind.__name__}")


def _load_tensor(name: str, value: Mapping[str, Any], parts: int) -> StoredTensor:
    """Decodes a tensor of a manifest that has `parts` parts. Raises Damaged unless its slices, all in these parts, hold
    every element exactly once; KeyError, TypeError or others for another form."""
    spec = TensorSpec(value["dtype"], tuple(value["shape"]), value["size"])
    slices = tuple(
        StoredSlice(entry["part"], Slice(tuple(entry["offsets"]), tuple(entry["sizes"])), entry["crc32c"])
        for entry in value["slices"]
    )
    for stored in slices:
        if not 0 <= stored.part < parts:
            raise Damaged(f"{MANIFEST}: tensor {name}: there is no part number {stored.part} among {parts}")
    error = partition_error(spec.shape, [stored.box for stored in slices])
    if error:
        raise Damaged(f"{MANIFEST}: tensor {name}: {error}")
    return StoredTensor(spec, slices)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Returns a manifest as JSON values, without its crc32c."""
    fields = {
        name: getattr(manifest, name)
        for name in ("step", "identity", "state", "config", "code", "run_id", "attempt", "hosts")
    }
    tensors = {
        name: {
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "size": tensor.spec.size,
            "slices": [{"part": stored.part, **vars(stored.box), "crc32c": stored.crc32c} for stored in tensor.slices],
        }
        for name, tensor in manifest.tensors.items()
    }
    return {"format": FORMAT, **fields, "parts": [vars(part) for part in manifest.parts], "tensors": tensors}


def render(body: Mapping[str, Any]) -> str:
    """Formats a manifest's JSON for people: keys sorted, and one line for each tensor, of which there are some."""
    others = {name: value for name, value in body.items() if name != "tensors"}
    tensors = sorted(body["tensors"].items())
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in tensors)
    return json.dumps(others, indent=1, sort_keys=True).removesuffix("\n}") + f',\n "tensors": {{\n{rows}\n }}\n}}\n'


def list_folders(folder: str, storage: Storage = default_storage) -> dict[int, set[str]]:
    """Lists the step folders directly in a run's checkpoint folder, committed or not: step -> file names; {} for none.
    Raises StorageError."""
    folders: dict[int, set[str]] = {}
    for entry in storage.listing(folder):
        *_, parent, name = entry.url.split("/")
        step = step_of(parent)
        above = entry.url.removesuffix(f"/{parent}/{name}")
        if step is not None and above.rstrip("/") == folder.rstrip("/"):  # else a checkpoint that was set aside
            folders.setdefault(step, set()).add(name)
    return folders


def committed_steps(folder: str, storage: Storage = default_storage) -> list[int]:
    """Returns the steps with a manifest, newest first. Raises StorageError."""
    return sorted((step for step, names in list_folders(folder, storage).items() if MANIFEST in names), reverse=True)


def read_manifest(folder: str, step: int, storage: Storage = default_storage) -> Manifest:
    """Returns the manifest of a step. Raises Damaged when it is missing, can't be decoded, or is of another step;
    StorageError when it can't be read."""
    try:
        manifest = load_manifest(storage.read(join(folder, step_folder(step), MANIFEST)))
    except NotFound:
        raise Damaged(f"{MANIFEST} is missing") from None
    if manifest.step != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def read_manifests(folder: str, steps: Iterable[int], storage: Storage = default_storage) -> dict[int, Manifest | str]:
    """Returns the manifests of steps, and in place of one that is missing or damaged, how. Raises StorageError."""
    manifests: dict[int, Manifest | str] = {}
    for step in steps:
        try:
            manifests[step] = read_manifest(folder, step, storage)
        except Damaged as error:
            manifests[step] = str(error)
    return manifests


def describe(step: int, manifest: Manifest | str) -> tuple[str, str, str, str, str]:
    """Returns the columns of a table: step, bytes (or how the manifest is damaged), parts, attempt and loss."""
    if isinstance(manifest, str):
        return str(step), f"damaged: {manifest}", "", "", ""
    loss = manifest.state.get("last_loss")
    parts, shown_loss = len(manifest.parts), "" if loss is None else f"{loss:.5f}"
    return str(step), f"{manifest.size:,}", str(parts), str(manifest.attempt), shown_loss


def delete_checkpoint(folder: str, step: int, names: Iterable[str], storage: Storage = default_storage) -> None:
    """Deletes the named files of a step, the manifest first, so that an interruption leaves no half checkpoint."""
    names = set(names)
    for name in (*(names & {MANIFEST}), *sorted(names - {MANIFEST})):
        storage.delete(join(folder, step_folder(step), name))


def _checksum(body: Mapping[str, Any]) -> str:
    """Returns the CRC-32C of a manifest's JSON values, as 8 hex digits."""
    return f"{google_crc32c.value(json.dumps(body, sort_keys=True).encode()):08x}"
