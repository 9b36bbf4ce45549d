"""placeholder"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Buckets:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ensure(self, name: str) -> None: ...
    def summary(self) -> dict[str, Any]:
        return {}
