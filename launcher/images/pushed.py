"""Which images this machine has pushed: a record of pushes that docker reported as done, kept beside the build logs.

The engine's own word is no proof: with the containerd image store, an image has a digest of a repository
(`RepoDigests`) from `docker tag` on, before a byte of it was sent. What is not recorded is pushed; a registry that has
it already takes only the manifest. A push through another engine counts for nothing: an emulated slice's engine pushes
to an emulated registry of the same name. A push of yesterday is repeated: registries delete images by their cleanup
policies.

What can fail half-way: a push that was interrupted, or whose record could not be written, is done again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.home import where, write_private

_TRUSTED_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Push:
    """A push that is done."""

    remote: str
    """repository:tag"""

    image_id: str
    """What was pushed: the store's sha256:... of it."""

    digest: str
    """sha256:... under which the registry has it."""

    engine: str
    """$DOCKER_HOST of the push; empty: the machine's own engine."""

    time: float
    """Unix seconds."""

    @property
    def is_recent(self) -> bool:
        """Whether the registry can be expected to have the image still."""
        return 0 <= time.time() - self.time < _TRUSTED_SECONDS


def find(tag: str, remote: str, image_id: str) -> Push | None:
    """The recorded push of this very image to `remote`, through the engine that is used now; None when there is
    none."""
    wanted = (remote, image_id, current_engine())
    return next((push for push in _read(tag) if (push.remote, push.image_id, push.engine) == wanted), None)


def current_engine() -> str:
    """What a push through the engine that is used now is recorded with."""
    return os.environ.get("DOCKER_HOST", "")


def record(tag: str, push: Push) -> None:
    """Records a push. The caller holds the lock of the image's log."""
    kept = [earlier for earlier in _read(tag) if (earlier.remote, earlier.engine) != (push.remote, push.engine)]
    document = [vars(entry) for entry in (*kept, push)]
    write_private(_path(tag), json.dumps(document, indent=1) + "\n")


def _path(tag: str) -> Path:
    return where() / "images" / f"{tag}.pushed.json"


def _read(tag: str) -> list[Push]:
    """The records of a tag; none when the file is damaged: pushing again does no harm."""
    try:
        return [Push(**entry) for entry in json.loads(_path(tag).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
