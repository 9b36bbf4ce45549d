"""The content of the emulated registry, in a folder.

    blobs/<hex>                           bytes by their sha256: layers, configurations, manifests
    repositories/<name>/blobs/<hex>       marks a blob of a repository (an empty file); <name> is percent-encoded
    repositories/<name>/manifests/<hex>   the media type of a manifest
    repositories/<name>/tags/<tag>        the digest of a manifest
    uploads/<id>                          bytes of unfinished uploads

Bytes get their name only when they are complete, and references are written after the bytes. An interrupted upload
stays as it is and can be continued.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from launcher.home import write_private, write_private_bytes

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_UPLOAD = re.compile(r"[0-9a-f]{32}")


class BlobStore:
    """Blobs, manifests and tags of all repositories."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # -- blobs

    def blob(self, repository: str, digest: str) -> Path | None:
        """Returns the file of a repository's blob, None when the repository has none of that digest."""
        match = _DIGEST.fullmatch(digest)
        if match is None or not (self._repository_folder(repository) / "blobs" / match[1]).exists():
            return None
        return self._folder / "blobs" / match[1]

    def link(self, repository: str, digest: str, source: str) -> bool:
        """Gives a repository a blob of another one, `source`; returns whether `source` has it."""
        path = self.blob(source, digest)
        if path is None:
            return False
        self._mark_blob(repository, path.name)
        return True

    def begin_upload(self) -> str:
        """Begins an upload and returns its id."""
        identifier = secrets.token_hex(16)
        folder = self._folder / "uploads"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / identifier).touch(0o600)
        return identifier

    def upload_size(self, identifier: str) -> int | None:
        """Returns the number of bytes of an upload; None when there is no such upload."""
        path = self._upload_file(identifier)
        return path.stat().st_size if path else None

    def extend_upload(self, identifier: str, blocks: Iterable[bytes]) -> None:
        """Appends to an upload. Bytes received before a client disconnects stay."""
        path = self._upload_file(identifier)
        assert path is not None, identifier
        with open(path, "ab") as file:
            for block in blocks:
                file.write(block)

    def end_upload(self, repository: str, identifier: str, digest: str) -> bool:
        """Makes an upload a blob of a repository. Deletes it and returns False when its digest is not `digest`."""
        path = self._upload_file(identifier)
        assert path is not None, identifier
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != f"sha256:{found}":
            path.unlink()
            return False
        (self._folder / "blobs").mkdir(exist_ok=True)
        os.replace(path, self._folder / "blobs" / found)
        self._mark_blob(repository, found)
        return True

    # -- manifests

    def manifest(self, repository: str, version: str) -> tuple[str, str, bytes] | None:
        """Returns digest, media type and bytes of the manifest with a digest or tag; None when there is none."""
        tag = self._repository_folder(repository) / "tags" / version
        digest = tag.read_text() if _TAG.fullmatch(version) and tag.is_file() else version
        match = _DIGEST.fullmatch(digest)
        path = self._repository_folder(repository) / "manifests" / (match[1] if match else "")
        if match is None or not path.is_file():
            return None
        return digest, path.read_text(), (self._folder / "blobs" / match[1]).read_bytes()

    def put_manifest(self, repository: str, version: str, media_type: str, data: bytes) -> str:
        """Stores a manifest under its digest, and under `version` if that is a tag; returns the digest."""
        found = hashlib.sha256(data).hexdigest()
        write_private_bytes(self._folder / "blobs" / found, data)
        write_private(self._repository_folder(repository) / "manifests" / found, media_type)
        if _TAG.fullmatch(version):
            write_private(self._repository_folder(repository) / "tags" / version, f"sha256:{found}")
        return f"sha256:{found}"

    def _mark_blob(self, repository: str, name: str) -> None:
        """Makes a stored blob, <hex> `name`, visible in a repository."""
        folder = self._repository_folder(repository) / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def _repository_folder(self, repository: str) -> Path:
        return self._folder / "repositories" / quote(repository, safe="")

    def _upload_file(self, identifier: str) -> Path | None:
        """Returns the file of an unfinished upload; None for an unknown or malformed id."""
        path = self._folder / "uploads" / identifier
        return path if _UPLOAD.fullmatch(identifier) and path.is_file() else None
