"""The Hugging Face Hub as far as downloads use it: one repository, a model or a dataset, on loopback.

https://huggingface.co/docs/hub/api, as huggingface_hub 0.36 and datasets 5 speak it. A dataset of any size needs no
disk: several names may have the same bytes.
"""

import contextlib
import hashlib
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.container.hub_handler import HubHandler, serve_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class DownloadHub:
    """The repository, and what was asked for."""

    repository: str  # "org/model", or "datasets/org/texts"
    files: Mapping[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT  # of the branch main; files of older commits are answered too
    url: str = ""
    sent: int = 0  # bytes of files
    refuses_after: int | None = None  # bytes of files, after which every answer is 403
    commits: set[str] = field(default_factory=set)  # of the files that were asked for


class _Handler(HubHandler):
    hub: DownloadHub

    def do_GET(self) -> None:
        hub, place = self.hub, self.path.partition("?")[0].replace("%2F", "/")
        api = f"/api/{hub.repository if hub.repository.startswith('datasets/') else f'models/{hub.repository}'}"
        if place in (api, f"{api}/revision/main", f"{api}/revision/{hub.commit}"):
            siblings = [{"rfilename": name} for name in sorted(hub.files)]
            self._json({"id": hub.repository.removeprefix("datasets/"), "sha": hub.commit, "siblings": siblings})
        elif tree := re.fullmatch(f"{api}/tree/[^/]+/?(.*)", place):
            below = [name for name in hub.files if name.startswith(f"{tree[1]}/" if tree[1] else "")]
            self._json(self._entries(sorted(below)))
        elif file := re.fullmatch(f"/{hub.repository}/resolve/([^/]+)/(.+)", place):
            hub.commits.update({file[1]} if file[2] in hub.files else ())
            self._send(hub.files.get(file[2]))
        else:
            self._json({}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """The states of some paths."""
        paths = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        folders = {name.rpartition("/")[0] for name in self.hub.files}
        found = [{"type": "directory", "path": path, "oid": COMMIT} for path in paths if path in folders]
        self._json(found + self._entries([path for path in paths if path in self.hub.files]))

    def _entries(self, names: list[str]) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": COMMIT} for name in names]

    def _send(self, data: bytes | None) -> None:
        """A whole file, or the range that is asked for."""
        if data is None:
            self._json({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.commit})
            return
        if self.hub.refuses_after is not None and self.hub.sent >= self.hub.refuses_after:
            self._json({"error": "access was revoked"}, 403)
            return
        etag = f'"{hashlib.sha1(data[:64]).hexdigest()}-{len(data)}"'
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(span[1]), min(int(span[2] or len(data)), len(data) - 1)) if span else (0, len(data) - 1)
        length = {"Content-Length": str(last + 1 - first), "Accept-Ranges": "bytes"}
        place = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if span else {}
        self.begin(206 if span else 200, {"ETag": etag, "X-Repo-Commit": self.hub.commit, **length, **place})
        if self.command == "GET":
            self.wfile.write(memoryview(data)[first : last + 1])
            self.hub.sent += last + 1 - first


@contextlib.contextmanager
def serve_downloads(repository: str, files: Mapping[str, bytes] | None = None) -> Iterator[DownloadHub]:
    hub = DownloadHub(repository, files or {})
    with serve_hub(hub, _Handler):
        yield hub
