"""Cloud Storage as the launcher uses it: whole objects with generations. Requests may be slow, or fail either way."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

from training.storage import AlreadyExists, Changed, NotFound, Stat, StorageError

if TYPE_CHECKING:
    from tests.simulation.launcher.world import Laptop, World

T = TypeVar("T")
OUTPUT = "gs://bucket/runs"
TRAINER = {
    "task": "mlm",
    "model": {"name": "bert-tiny"},
    "data": {"train": "gs://bucket/data", "tokenizer": "gs://bucket/tokenizer"},
    "train": {"steps": 100, "global_batch_size": 64, "learning_rate": 0.001},
    "output": OUTPUT,
}
_NO_ANSWER_SECONDS = 30.0


class CloudStorage:
    """The objects of all buckets. `find_laptop` returns the workstation of the current task."""

    def __init__(self, world: World, seed: int, find_laptop: Callable[[], Laptop | None]) -> None:
        self._world, self._find_laptop = world, find_laptop
        self._random = random.Random(f"bucket {seed}")
        self._generation = 0
        self.objects: dict[str, tuple[bytes, int, float]] = {}
        """Content, generation and time of each, by URL."""

    def install(self) -> ExitStack:
        """Replaces the client of Cloud Storage until the stack is closed."""
        stack = ExitStack()
        for function in (self.stat, self.listing, self.folders, self.read, self.write):
            stack.enter_context(mock.patch(f"training.storage.gcs.{function.__name__}", function))
        for check in ("buckets", "data"):
            stack.enter_context(mock.patch(f"launcher.checks.inputs.{check}"))
        return stack

    def runs(self) -> list[str]:
        """Returns the URLs of the runs that another machine can go on with, oldest first."""
        return [url.removesuffix("/launcher/run.json") for url in self.objects if url.endswith("/launcher/run.json")]

    def _request(self, effect: Callable[[], T]) -> T:
        scheduler = self._world.scheduler
        if scheduler.current is None:  # a promise looks
            return effect()
        scheduler.sleep(self._random.uniform(0.01, 0.1))
        laptop = self._find_laptop()
        if (laptop is not None and laptop.offline) or self._world.api_fault("bucket") is not None:
            with suppress(StorageError):
                if self._random.random() < 0.3:
                    effect()  # and its answer is lost
            scheduler.sleep(_NO_ANSWER_SECONDS)
            raise StorageError("gs://bucket: no answer within 30 s: try again")
        try:
            return effect()
        finally:
            scheduler.sleep(self._random.uniform(0.01, 0.1))

    def _stat(self, url: str) -> Stat | None:
        if url not in self.objects:
            return None
        content, generation, written = self.objects[url]
        return Stat(url, len(content), generation, age=self._world.scheduler.now - written)

    def stat(self, url: str) -> Stat | None:
        return self._request(lambda: self._stat(url))

    def listing(self, folder: str) -> list[Stat]:
        return self._request(lambda: [self._stat(url) for url in sorted(self.objects) if url.startswith(f"{folder}/")])

    def folders(self, folder: str) -> list[str]:
        below = f"{folder}/"
        return self._request(
            lambda: sorted({url.removeprefix(below).split("/")[0] for url in self.objects if url.startswith(below)})
        )

    def read(self, url: str, start: int, end: int | None, generation: int | None) -> bytes:
        def effect() -> bytes:
            if url not in self.objects:
                raise NotFound(f"{url} does not exist")
            content, found, _ = self.objects[url]
            if generation not in (None, found):
                raise Changed(f"{url} was replaced")
            return content[start:end]

        return self._request(effect)

    def write(self, url: str, data: bytes | memoryview, generation: int | None) -> Stat:
        def effect() -> Stat:
            found = self._stat(url)
            if generation is not None and generation != (found.generation if found is not None else 0):
                raise AlreadyExists(f"{url} already exists")
            self._generation += 1
            self.objects[url] = (bytes(data), self._generation, self._world.scheduler.now)
            return Stat(url, len(data), self._generation)

        return self._request(effect)
