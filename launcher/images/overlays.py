"""Files laid over those of an image, without a build or a push: a whole folder (`run --overlay FOLDER=TARGET`), or the
files of a folder that changed since the image was made (`run --sync FOLDER`).

The files travel as one archive that is made the same way every time, so that its hash tells what ran. Every host
reports the hash of what it received, and all must equal ours before anything starts. The archive is kept in the run's
folder (`launcher.run.specification`), so that later attempts get the same files. What `build_context.folder` leaves out
of an image is left out here too.

`.tpu-launch/images/<digest of the image's name>.code.json` records the files of `image.code` in an image, and their
folder there. It is written when `run` made the image or found it made, from the bytes of which the image was made.
Without it (an image of another machine, another folder), or when it is damaged, every file counts as changed.
"""

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput
from launcher.home import write_private
from launcher.images import build_context
from launcher.images.build import CODE_FOLDER, Image
from launcher.images.build_context import Entry
from launcher.provider import Overlay

_LARGEST_BYTES = 32 * 2**20  # a larger overlay is more than code: build an image


@dataclass(frozen=True)
class Changes:
    """The files of a folder that are laid over an image."""

    overlay: Overlay
    changed: tuple[str, ...]  # paths in the folder, sorted
    removed: tuple[str, ...]  # paths that the image still has


def pack(option: str) -> Overlay:
    """Packs the files of FOLDER (`build_context.folder`) for `--overlay FOLDER=TARGET` (`option`). Raises BadInput when
    the folder is missing, empty or above 32 MiB, or the target is not an absolute path."""
    folder, _, target = option.rpartition("=")
    if not folder or not target.startswith("/"):
        raise BadInput(
            f"--overlay {option}: must be FOLDER=TARGET, where TARGET is a folder of the image: "
            "--overlay training=/opt/tpu-launch/training"
        )
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"--overlay {option}: {root} is not a folder")
    files = _files_of(root, build_context.folder(root))
    return _pack_files(f"--overlay {option}", target, root, [*files.values()])


def report_credentials(option: str, say: Callable[[str], None]) -> None:
    """Says which files of the folder of `--overlay` or `--sync` (`option`: FOLDER or FOLDER=TARGET) are left out
    because they hold credentials; nothing if it is missing."""
    root = Path(option.rpartition("=")[0] or option)
    if root.is_dir():
        build_context.report_credentials(root, None, say)


def find_changes(option: str, config: Config, home: Path, image: str | None) -> Changes:
    """Packs the files of `--sync FOLDER[=TARGET]` (`option`) that differ from those that `home` records of `image`, the
    name of the image that ran last (None: none did); all files if none differs, or without a record of this folder.
    Without TARGET, they go where the image has the folder of `image.code`. Raises BadInput when the folder is missing,
    empty or too large, or TARGET is not absolute, or missing where the image is not made from image.code."""
    name, separator, target = option.rpartition("=")
    root = Path(name if separator else option)
    known = _read_record(home, image, root, config)
    if not separator:
        target = known.folder if known else _default_target(option, config)
    if not target.startswith("/"):
        raise BadInput(f"--sync {option}: TARGET must be a folder of the image, as an absolute path: {root}=/app")
    if (separator and not name) or not root.is_dir():
        raise BadInput(f"--sync {option}: {name or option} is not a folder")
    entries = build_context.folder(root)
    files, hashes = _files_of(root, entries), build_context.hash_files(entries)
    recorded = known.code if known and known.folder == target else {}
    changed = [path for path in files if recorded.get(path) != hashes[path]]
    # Without a change all files go: an overlay of an earlier sync must not stay in effect.
    overlay = _pack_files(f"--sync {option}", target, root, [files[path] for path in changed or files])
    return Changes(overlay, tuple(changed), tuple(sorted(set(recorded) - set(hashes))))


def _default_target(option: str, config: Config) -> str:
    """Returns where images that are made from `image.code` have it. Raises BadInput if this image is not."""
    if config.image.dockerfile or config.image.reference or config.image.base:
        raise BadInput(f"--sync {option}: where is that folder in your image? --sync {option}=TARGET, an absolute path")
    return CODE_FOLDER


def _files_of(root: Path, entries: Sequence[Entry]) -> dict[str, Path]:
    """Returns the files of a folder's `entries` by path, and links to files, but those to files that were left out: an
    overlay has a link's file in its place."""
    here, links = root.resolve(), {path for path, file in entries if file.is_symlink()}
    kept = {here / path for path, _ in entries if path not in links}

    def is_sent(path: str, file: Path) -> bool:
        return file.is_file() and (path not in links or (end := file.resolve()) in kept or here not in end.parents)

    return {path: file for path, file in entries if is_sent(path, file)}


def record_code(home: Path, image: Image) -> None:
    """Writes the hashes of an image's `image.code` files, if any, to a file below `home`, for `find_changes`."""
    if image.code:
        write_private(_record_path(home, image.reference), json.dumps(asdict(image), indent=1))


def _read_record(home: Path, image: str | None, root: Path, config: Config) -> Image | None:
    """Reads the record of an image's code; None without one, if damaged, or if `root` is not image.code's folder."""
    if image is None or config.image.code is None or (config.folder / config.image.code).resolve() != root.resolve():
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Image(**json.loads(_record_path(home, image).read_text()))
        return record if record.code and isinstance(record.code, dict) else None
    return None


def _record_path(home: Path, image: str) -> Path:
    """Returns the file below `home` that records the code in an image."""
    return home / "images" / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.code.json"


def _pack_files(option: str, target: str, root: Path, paths: list[Path]) -> Overlay:
    """Packs files below `root`, in the order of `paths`, without times and owners. Raises BadInput, which begins with
    `option`, for no files, one that can't be read, or more than 32 MiB."""
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
            try:
                data = path.read_bytes()
            except OSError as error:
                raise BadInput(f"{option}: {path} can't be read: {error.strerror}") from None
            entry.size, entry.mode = len(data), 0o755 if build_context.is_executable(path) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return Overlay(target, gzip.compress(packed.getvalue(), compresslevel=6, mtime=0))
