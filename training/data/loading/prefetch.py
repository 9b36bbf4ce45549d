"""Computes values ahead on background threads."""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def prefetch(function: Callable[[int], T], start: int, depth: int) -> Iterator[T]:
    """Yields function(start), function(start + 1), ... without end, computed at most `depth` values ahead. Only
    the background thread calls the function; its exception is raised when its value is due. Closing the iterator ends
    the thread after the current call."""
    pool, waiting = DaemonPool(1, "prefetch"), deque[Future[T]]()
    try:
        for number in itertools.count(start):
            waiting.append(pool.submit(function, number))
            if len(waiting) > depth:
                yield waiting.popleft().result()
    finally:
        pool.close()


class DaemonPool:
    """A pool of daemon threads. concurrent.futures' pool joins its threads at exit, so a bucket that does not answer
    would keep the process from ending."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queues the function for a thread, which skips it if the future is cancelled, and returns its future."""
        future = Future[T]()

        def task() -> None:
            if self._is_closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def close(self) -> None:
        """Ends the threads after the tasks that they have begun, without waiting; cancels the others."""
        self._is_closed = True
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        """Runs tasks until it takes one of the None that `close` queues."""
        while task := self._tasks.get():
            task()
            del task  # its error's traceback holds the caller
