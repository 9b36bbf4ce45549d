"""The post-mortem of a failed attempt: one archive in the run's folder, written before its containers are removed.

`.tpu-launch/runs/<run id>/post-mortem-<attempt>.tar.gz` (0600) holds the run's records, the attempt's logs and stack
traces, the API's description of the slice, and for each host that answers the inspection of its container, disks,
memory, kernel messages and TPU logs. Values of the run's secrets are masked, as far as this process knows them
(`launcher.masking`). The archive is written under a temporary name and renamed.
"""

import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.masking import SecretMasker
from launcher.run.ledger import Ledger

_RECORDS = ("run.json", "config.yaml", "specification.yaml", "events.jsonl")
_LOG_BYTES = 20_000_000  # of the end of each log


def write(ledger: Ledger, attempt: int, evidence: Mapping[str, str], secrets: Mapping[str, str]) -> Path:
    """Writes the archive of an attempt and returns its path. `evidence` is file name -> text, from the provider;
    `secrets` are values to mask, by name. Raises OSError, and leaves no part, if the disk is full or fails."""
    masker = SecretMasker(secrets)
    target = ledger.folder / f"post-mortem-{attempt}.tar.gz"
    now = ledger.clock.time()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as sink,
            tarfile.open(fileobj=sink, mode="w:gz", compresslevel=3) as archive,
        ):
            root = f"{ledger.run_id}-{attempt}"
            for path in _files(ledger, attempt):
                _add(archive, f"{root}/{path.relative_to(ledger.folder)}", _masked_end(path, masker), now)
            for name, text in evidence.items():
                _add(archive, f"{root}/{name}", masker.mask(text.encode(errors="replace")), now)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _files(ledger: Ledger, attempt: int) -> Iterable[Path]:
    """Yields the paths of the run's records, and of the attempt's logs and stack traces."""
    yield from (path for name in _RECORDS if (path := ledger.folder / name).exists())
    for kind in ("logs", "stacks"):
        yield from sorted((ledger.folder / kind / f"attempt-{attempt}").glob("*"))


def _masked_end(path: Path, masker: SecretMasker) -> bytes:
    """Returns the end of a file (20 MB). Masks before it cuts, so that a secret that the cut divides is masked too."""
    with open(path, "rb") as file:
        start = max(0, path.stat().st_size - _LOG_BYTES - masker.longest)
        file.seek(start)
        data = masker.mask(file.read())
    return data[masker.longest :] if start else data


def _add(archive: tarfile.TarFile, name: str, data: bytes, now: float) -> None:
    """Adds a file with this content to the archive."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(now)
    archive.addfile(entry, io.BytesIO(data))
