"""Computes values ahead on a background thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(function: Callable[[int], T], start: int, depth: int) -> Iterator[T]:
    """Yields function(start), function(start + 1), ... without end, computed at most `depth` values ahead. Only
    the background thread calls the function; its exception is raised when its value is due. Closing the iterator ends
    the thread after the current call."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=max(1, depth))
    closed = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        k = start
        try:
            while not closed.is_set():
                put((function(k), None))
                k += 1
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, error = ready.get()
            if error is not None:
                raise error
            yield value  # type: ignore[misc]  # a value, when there is no error
    finally:
        closed.set()
