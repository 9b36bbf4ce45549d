"""`run --overlay FOLDER=TARGET`: the files of a folder go over the image's own, without a build or a push.

They travel as one archive that is made the same way every time (sorted names, no times, no owners), so that its hash
says what ran. Every host tells the hash of what it received, and all must be equal to ours before anything starts; the
run's events keep it.
"""

from __future__ import annotations

import functools
import gzip
import io
import tarfile
from pathlib import Path

from launcher.errors import BadInput
from launcher.provider import Overlay

_MOST_BYTES = 32 * 2**20  # more than code: build an image
_LEFT_OUT = frozenset(
    ("__pycache__", ".git", ".venv", ".tpu-launch", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
)


@functools.cache  # the next attempt must get what the first one had, whatever happened to the files
def read(wanted: str) -> Overlay:
    """The overlay that FOLDER=TARGET means. Raises BadInput for a folder that is not there, holds nothing or too much,
    or a target that is not absolute."""
    folder, separator, target = wanted.rpartition("=")
    if not separator or not target.startswith("/"):
        raise BadInput(
            f"--overlay {wanted}: must be FOLDER=TARGET, where TARGET is a folder of the image: --overlay training=/opt/tpu-launch/training"
        )
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"--overlay {wanted}: {root} is not a folder")
    files = sorted(
        path for path in root.rglob("*") if path.is_file() and not _LEFT_OUT & set(path.relative_to(root).parts)
    )
    if not files:
        raise BadInput(f"--overlay {wanted}: {root} holds no files")
    if (size := sum(path.stat().st_size for path in files)) > _MOST_BYTES:
        raise BadInput(
            f"--overlay {wanted}: {size / 2**20:.0f} MiB are more than the {_MOST_BYTES // 2**20} of an overlay; build an image with them"
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return Overlay(target, gzip.compress(packed.getvalue(), compresslevel=6, mtime=0))
