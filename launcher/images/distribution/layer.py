"""Packs files as layers of an image: the same files give the same bytes, on every machine and at any time.

Names are sorted, owners are root, times are 0, and modes are those of a build's COPY (build_context.assemble), so that
`docker build` makes the same content of the same files. Small files share a layer; a large file has a layer of its own,
so that a changed line does not send it again.
"""

import functools
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from launcher.errors import BadInput
from launcher.images.build_context import Entry, hash_file, read_entry
from launcher.images.distribution.client import Blob, blob_of, sha256

LARGE_BYTES = 4 * 2**20
_MOST_LARGE = 16  # layers of one file; the other large files share one more layer
_LEVEL = 6
_LARGEST_LAYER = 2**30  # a layer is held in memory


@dataclass(frozen=True)
class Layer:
    """Files as an archive."""

    archive: bytes
    hashes: Mapping[str, str]  # `build_context.hash_file` of each file, by its path in the layer's folder
    title: str  # shown in the image's history

    @functools.cached_property
    def diff_id(self) -> str:
        """The digest of the archive before compression."""
        return sha256(self.archive)

    @functools.cached_property
    def blob(self) -> Blob:
        """The compressed archive, as a registry stores it."""
        return blob_of(gzip.compress(self.archive, compresslevel=_LEVEL, mtime=0))


def make_layers(entries: Sequence[Entry], folder: str, title: str) -> list[Layer]:
    """Returns the layers that add files to a folder (an absolute path) of an image, whose other files stay. Raises
    BadInput when a file can't be read or a layer would be too large."""
    return [
        Layer(*_make_archive(group, folder), f"{title}{f' ({number})' if number else ''}")
        for number, group in enumerate(_group_by_layer(entries))
    ]


def _group_by_layer(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Returns the files of each layer: small files, large files that share a layer, then one large file each."""
    sizes = {name: source.lstat().st_size for name, source in entries}
    large = sorted((entry for entry in entries if sizes[entry[0]] >= LARGE_BYTES), key=lambda e: (-sizes[e[0]], e[0]))
    alone, shared = large[:_MOST_LARGE], large[_MOST_LARGE:]
    small = [entry for entry in entries if sizes[entry[0]] < LARGE_BYTES]
    return [group for group in (small, shared, *([entry] for entry in sorted(alone))) if group]


def _make_archive(entries: Sequence[Entry], folder: str) -> tuple[bytes, dict[str, str]]:
    """Returns a tar archive of the files, below `folder`, without times and owners, links as links; and `hash_file` of
    each file by its path. Raises BadInput for an unreadable file or above 1 GiB."""
    packed, folders, hashes = io.BytesIO(), set[PurePosixPath](), {}
    root = PurePosixPath(folder.lstrip("/"))
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, source in sorted(entries):
            path = root / name
            for parent in reversed(path.parents):
                # The root and the folders above it have no entries, so they keep the image's owners and modes.
                if parent.is_relative_to(root) and parent != root and parent not in folders:
                    folders.add(parent)
                    archive.addfile(_tar_entry(parent, tarfile.DIRTYPE, 0o755))
            kind, content = read_entry(source)
            hashes[name] = hash_file(kind, content)
            if kind == b"link":
                entry = _tar_entry(path, tarfile.SYMTYPE, 0o777)
                entry.linkname = os.fsdecode(content)
            else:
                entry = _tar_entry(path, tarfile.REGTYPE, 0o755 if kind == b"program" else 0o644)
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            if packed.tell() > _LARGEST_LAYER:
                raise BadInput(f"{source}: the files of an image's layer are more than {_LARGEST_LAYER >> 20} MiB")
    return packed.getvalue(), hashes


def _tar_entry(path: PurePosixPath, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(path))
    entry.type, entry.mode, entry.mtime, entry.uid, entry.gid = kind, mode, 0, 0, 0
    return entry


def compute_tag(layers: Sequence[Layer], base: str) -> str:
    """Returns 16 hexadecimal digits, a hash of the base image's digest `base` and of the layers before compression."""
    return hashlib.sha256("\n".join([base, *(layer.diff_id for layer in layers)]).encode()).hexdigest()[:16]
