"""Files as layers of an image: the same files give the same bytes, on every machine and at any time.

Names are sorted; owner is root, times are 0, modes are those that a build's COPY gives (build_context.assemble): what
`docker build` makes of the same files has the same content. Small files share a layer. A large one has a layer of its
own, so that a changed line does not send it again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.errors import BadInput
from launcher.images.build_context import Entry, is_executable
from launcher.images.distribution.client import Blob, blob_of, sha256

LARGE_BYTES = 4 * 2**20
_MOST_LARGE = 16  # layers of their own; the other large files share one more
_LEVEL = 6
_LARGEST_LAYER = 2**30  # it is held in memory


@dataclass(frozen=True)
class Layer:
    """Some files, as an archive that is not compressed yet."""

    archive: bytes
    title: str

    @property
    def diff_id(self) -> str:
        """sha256:... of the archive."""
        return sha256(self.archive)

    def compress(self) -> Blob:
        """The archive as registries keep it."""
        return blob_of(gzip.compress(self.archive, compresslevel=_LEVEL, mtime=0))


def make_layers(entries: Sequence[Entry], folder: str, title: str) -> list[Layer]:
    """The layers that put files into a folder of an image.

    Args:
        entries: the files, named relative to the folder.
        folder: an absolute path in the image; what is there already stays, as it does with COPY.
        title: what the files are, for the image's history.

    Raises:
        BadInput: a file can't be read, or they are too large.
    """
    groups = _group(entries)
    return [
        Layer(_archive(group, folder), f"{title}{f' ({number})' if number else ''}")
        for number, group in enumerate(groups)
    ]


def _group(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The small files first; then large ones, the largest alone."""
    sizes = {name: source.lstat().st_size for name, source in entries}
    large = sorted((entry for entry in entries if sizes[entry[0]] >= LARGE_BYTES), key=lambda e: (-sizes[e[0]], e[0]))
    alone, rest = large[:_MOST_LARGE], large[_MOST_LARGE:]
    names = {name for name, _ in large}
    small = [entry for entry in entries if entry[0] not in names]
    return [group for group in (small, rest, *([entry] for entry in sorted(alone))) if group]


def _archive(entries: Sequence[Entry], folder: str) -> bytes:
    packed, folders = io.BytesIO(), set[PurePosixPath]()
    root = PurePosixPath(folder.lstrip("/"))
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, source in sorted(entries):
            path = root / name
            for parent in reversed(path.parents):
                # Folders of the image above the target keep their owners and modes: they are not named.
                if parent.is_relative_to(root) and parent != root and parent not in folders:
                    folders.add(parent)
                    archive.addfile(_entry(parent, tarfile.DIRTYPE, 0o755))
            _add(archive, path, source)
            if packed.tell() > _LARGEST_LAYER:
                raise BadInput(f"{source}: the files of an image's layer are more than {_LARGEST_LAYER >> 20} MiB")
    return packed.getvalue()


def _add(archive: tarfile.TarFile, path: PurePosixPath, source: Path) -> None:
    try:
        if source.is_symlink():
            link = _entry(path, tarfile.SYMTYPE, 0o777)
            link.linkname = os.readlink(source)
            archive.addfile(link)
            return
        data = source.read_bytes()
        mode = 0o755 if is_executable(source) else 0o644
    except OSError as error:
        raise BadInput(f"{source}: can't be read for the image: {error.strerror}") from None
    entry = _entry(path, tarfile.REGTYPE, mode)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _entry(path: PurePosixPath, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(path))
    entry.type, entry.mode, entry.mtime, entry.uid, entry.gid = kind, mode, 0, 0, 0
    return entry


def digest_of(layers: Sequence[Layer], base: str) -> str:
    """16 hexadecimal digits for a base image and what comes upon it; compression does not count."""
    return hashlib.sha256("\n".join([base, *(layer.diff_id for layer in layers)]).encode()).hexdigest()[:16]
