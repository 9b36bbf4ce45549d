"""`run --overlay FOLDER=TARGET`: the files of a folder go over the image's own, without a build or a push.

They travel as one archive that is made the same way every time (sorted names, no times, no owners), so that its hash
says what ran. Every host reports the hash of what it received, and all must equal ours before anything starts. The
archive is kept in the run's folder (`launcher.run.specification`), so that later attempts get the same files. What
`build_context.LEFT_OUT` names stays here.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from launcher.errors import BadInput
from launcher.images import build_context
from launcher.provider import Overlay

_LARGEST_BYTES = 32 * 2**20  # more than code: build an image


def pack(option: str) -> Overlay:
    """Packs the overlay that `--overlay FOLDER=TARGET` names.

    Raises:
        BadInput: The folder is not there, holds nothing or too much, or the target is not an absolute path.
    """
    folder, separator, target = option.rpartition("=")
    if not separator or not target.startswith("/"):
        raise BadInput(
            f"--overlay {option}: must be FOLDER=TARGET, where TARGET is a folder of the image: "
            "--overlay training=/opt/tpu-launch/training"
        )
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"--overlay {option}: {root} is not a folder")
    paths = [path for _, path in build_context.tree(root, ignore=build_context.left_out_of(root)) if path.is_file()]
    if not paths:
        raise BadInput(f"--overlay {option}: {root} holds no files")
    return pack_files(f"--overlay {option}", target, root, paths)


def pack_files(subject: str, target: str, root: Path, paths: list[Path]) -> Overlay:
    """Packs files below `root` for a folder of the image. Raises BadInput, naming the `subject`, when they are too
    large."""
    if (size := sum(path.stat().st_size for path in paths)) > _LARGEST_BYTES:
        raise BadInput(
            f"{subject}: {size / 2**20:.0f} MiB are more than the {_LARGEST_BYTES // 2**20} of an overlay; "
            "build an image with them"
        )
    return Overlay(target, _archive(root, paths))


def _archive(root: Path, paths: list[Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), compresslevel=6, mtime=0)
