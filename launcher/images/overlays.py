"""Files laid over those of an image, without a build or a push: a whole folder (`run --overlay FOLDER=TARGET`), or the
files of a folder that changed since the image was made (`run --sync FOLDER`).

The files travel as one archive that is made the same way every time, so that its hash tells what ran. Every host
reports the hash of what it received, and all must equal ours before anything starts. The archive is kept in the run's
folder (`launcher.run.specification`), so that later attempts get the same files. Files of `build_context.LEFT_OUT` are
left out.

`.tpu-launch/images/<digest of the image's name>.code.json` records the files of `image.code` in an image: path ->
SHA-256. It is written when `run` made the image or found it made. Without it (an image of another machine, another
folder), or when it is damaged, every file counts as changed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput
from launcher.home import write_private
from launcher.images import build_context
from launcher.provider import Overlay

CODE_FOLDER = "/home/trainer"  # where the Dockerfiles of `images/` copy the folder of `image.code`
_LARGEST_BYTES = 32 * 2**20  # a larger overlay is more than code: build an image


@dataclass(frozen=True)
class Changes:
    """The files of a folder that are laid over an image."""

    overlay: Overlay
    changed: tuple[str, ...]  # paths in the folder, sorted
    removed: tuple[str, ...]  # paths that the image still has


def pack(option: str) -> Overlay:
    """Packs the overlay that `--overlay FOLDER=TARGET` names.

    Raises:
        BadInput: the folder is missing, empty or too large, or the target is not an absolute path.
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
    files = build_context.tree(root, ignore=build_context.left_out_of(root))
    return _pack_files(f"--overlay {option}", target, root, [path for _, path in files if path.is_file()])


def find_changes(option: str, config: Config, home: Path, image: str | None) -> Changes:
    """Packs the files of `--sync FOLDER[=TARGET]` that differ from those in `image`, which ran last; all if none does.

    Without TARGET, they go where an image has the folder of `image.code`. Raises BadInput when the folder is missing,
    empty or too large, or TARGET is missing or not absolute.
    """
    name, separator, target = option.rpartition("=")
    root = Path(name if separator else option)
    if not separator:
        if config.image.dockerfile or config.image.reference:
            raise BadInput(
                f"--sync {option}: where is that folder in your image? --sync {option}=TARGET, an absolute path"
            )
        target = CODE_FOLDER
    if not target.startswith("/"):
        raise BadInput(f"--sync {option}: TARGET must be a folder of the image, as an absolute path: {root}=/app")
    if not root.is_dir():
        raise BadInput(f"--sync {option}: {root} is not a folder")
    files = _list_files(root)
    recorded = _read_record(home, image, root, config) if target == CODE_FOLDER else {}
    changed = [path for path, digest in _hash_files(files).items() if recorded.get(path) != digest]
    # Without a change all files go: an overlay of an earlier sync must not stay in effect.
    overlay = _pack_files(f"--sync {option}", target, root, [files[path] for path in changed or files])
    return Changes(overlay, tuple(changed), tuple(sorted(set(recorded) - set(files))))


def record_code(home: Path, image: str, config: Config) -> None:
    """Records the present files of `image.code`, if set, with which the image was made."""
    if config.image.code is not None:
        hashes = _hash_files(_list_files(config.folder / config.image.code))
        write_private(_record_path(home, image), json.dumps(hashes, indent=1))


def _read_record(home: Path, image: str | None, root: Path, config: Config) -> Mapping[str, str]:
    """Returns the hashes of a folder's files in an image; {} when they are not known."""
    if image is None or config.image.code is None or (config.folder / config.image.code).resolve() != root.resolve():
        return {}
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(_record_path(home, image).read_text())
        if isinstance(document, dict):
            return document
    return {}


def _record_path(home: Path, image: str) -> Path:
    return home / "images" / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.code.json"


def _list_files(root: Path) -> dict[str, Path]:
    """Returns the files of a folder that an image would get (.dockerignore, LEFT_OUT), by path."""
    return {path: file for path, file in build_context.folder(root) if file.is_file()}


def _hash_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file's content and executable bit, by path."""
    hashes = {}
    for path, file in files.items():
        mode = b"program" if build_context.is_executable(file) else b"file"
        hashes[path] = hashlib.sha256(mode + file.read_bytes()).hexdigest()
    return hashes


def _pack_files(option: str, target: str, root: Path, paths: list[Path]) -> Overlay:
    """Packs files below `root`: sorted names, no times, no owners. Raises BadInput for no files, or too large ones."""
    if not paths:
        raise BadInput(f"{option}: {root} has no files")
    if (size := sum(path.stat().st_size for path in paths)) > _LARGEST_BYTES:
        raise BadInput(
            f"{option}: {size / 2**20:.0f} MiB are more than the {_LARGEST_BYTES // 2**20} of an overlay; "
            "build an image with them"
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if build_context.is_executable(path) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return Overlay(target, gzip.compress(packed.getvalue(), compresslevel=6, mtime=0))
