"""`run --sync FOLDER`: the files of a folder that changed since the image was made, as an overlay over that image.

`.tpu-launch/images/<digest of the image's name>.code.json` says which files of `image.code` an image has: path ->
SHA-256. It is written when `run` made the image, or found it made. Without it (an image of another machine, another
folder) every file counts as changed. What can fail half-way: it is written under a temporary name and renamed; a
damaged one counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput
from launcher.home import write_private
from launcher.images import build_context
from launcher.images.overlays import overlay
from launcher.provider import Overlay

CODE_FOLDER = "/home/trainer"
"""Where the Dockerfiles of `images/` copy the folder of `image.code`."""


@dataclass(frozen=True)
class Changes:
    """What of a folder is laid over an image."""

    overlay: Overlay
    changed: tuple[str, ...]
    """Paths in the folder, sorted."""

    removed: tuple[str, ...]
    """What the image has of the folder, and the folder has no more."""


def find_changes(option: str, config: Config, home: Path, image: str | None) -> Changes:
    """The changes that `--sync FOLDER[=TARGET]` means.

    Args:
        option: The option's value. Without TARGET it is where an image has the folder of `image.code`.
        config: Of the run.
        home: The launcher's folder.
        image: What ran last; None when nothing has.

    Raises:
        BadInput: The folder is not there, holds nothing or too much, or TARGET is missing or not absolute.
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
    files = _files(root)
    if not files:
        raise BadInput(f"--sync {option}: {root} holds no files")
    known = _of_image(home, image, root, config) if target == CODE_FOLDER else {}
    changed = [path for path, digest in _hashes(files).items() if known.get(path) != digest]
    # Without a change all of them go: an overlay of an earlier sync is not to count any more.
    chosen = changed or list(files)
    return Changes(
        overlay.pack_files(f"--sync {option}", target, root, [files[path] for path in chosen]),
        tuple(changed),
        tuple(sorted(set(known) - set(files))),
    )


def remember(home: Path, image: str, config: Config) -> None:
    """Keeps what the folder of `image.code` holds now, with which this image was made."""
    if config.image.code is not None:
        hashes = _hashes(_files(config.folder / config.image.code))
        write_private(_record(home, image), json.dumps(hashes, indent=1))


def _of_image(home: Path, image: str | None, root: Path, config: Config) -> Mapping[str, str]:
    """What an image has of a folder, as far as it is known here."""
    if image is None or config.image.code is None or (config.folder / config.image.code).resolve() != root.resolve():
        return {}
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(_record(home, image).read_text())
        if isinstance(document, dict):
            return document
    return {}


def _files(root: Path) -> dict[str, Path]:
    return {path: file for path, file in build_context.folder(root) if file.is_file()}


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file with whether it is a program, by path."""
    hashes = {}
    for path, file in files.items():
        mode = b"program" if file.stat().st_mode & 0o100 else b"file"
        hashes[path] = hashlib.sha256(mode + file.read_bytes()).hexdigest()
    return hashes


def _record(home: Path, image: str) -> Path:
    return home / "images" / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.code.json"
