"""Tasks that run at once, and what they share: the concurrency that the launcher's code is given.

Code that runs things at once takes `Tasks` as an argument and uses neither `threading` nor `queue` itself, so that a
simulation decides who runs when. `Threads` is the implementation of this machine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Event(Protocol):
    """Something that happens once."""

    def is_set(self) -> bool:
        """Whether it has happened."""

    def set(self) -> None:
        """It happens."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for it, `timeout` seconds at most; whether it has happened."""


class Queue(Protocol[T]):
    """Items that tasks hand to each other, in order."""

    def put(self, item: T) -> None:
        """Adds an item; waits for a place while the queue is full."""

    def get(self, timeout: float) -> T | None:
        """Takes the oldest item; None when none came within `timeout` seconds."""


class Future(Protocol[R_co]):
    """The result of a task, once it has ended."""

    def done(self) -> bool:
        """Whether the task has ended."""

    def exception(self) -> BaseException | None:
        """Waits for the end; what the task raised."""

    def result(self) -> R_co:
        """Waits for the end; what the task returned. Raises what it raised."""


class Tasks(Protocol):
    """Makes tasks, and what they share. A task that still runs does not keep the process from ending."""

    def lock(self) -> AbstractContextManager[Any]:
        """A lock for one task at a time, not reentrant."""

    def semaphore(self, count: int) -> AbstractContextManager[Any]:
        """A lock for `count` tasks at a time."""

    def event(self) -> Event:
        """An event that has not happened."""

    def queue(self, size: int) -> Queue[Any]:
        """A queue of at most `size` items."""

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a function in a task of its own, and forgets it."""

    def submit(self, function: Callable[[], R]) -> Future[R]:
        """Runs a function in a task of its own."""

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        """The results for all items, in their order, of tasks of which `at_once` run at a time. Raises what the first
        of them raised, when all have ended."""


class Threads:
    """Tasks that are daemon threads of this process."""

    def lock(self) -> AbstractContextManager[Any]:
        return threading.Lock()

    def semaphore(self, count: int) -> AbstractContextManager[Any]:
        return threading.BoundedSemaphore(count)

    def event(self) -> Event:
        return threading.Event()

    def queue(self, size: int) -> Queue[Any]:
        return _ThreadQueue(size)

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def submit(self, function: Callable[[], R]) -> Future[R]:
        future = _ThreadFuture(function)
        self.start(future.run)
        return future

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        waiting = list(items)
        results: list[Any] = [None] * len(waiting)
        failures: dict[int, BaseException] = {}
        numbers = iter(range(len(waiting)))
        taking = threading.Lock()

        def work() -> None:
            while True:
                with taking:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    results[number] = function(waiting[number])
                except BaseException as error:
                    failures[number] = error

        # Ctrl-C in the task that waits leaves at once: no thread is joined on the way out.
        for worker in [self.submit(work) for _ in range(min(at_once, len(waiting)))]:
            worker.result()
        if failures:
            raise failures[min(failures)]
        return results


class _ThreadQueue:
    def __init__(self, size: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def get(self, timeout: float) -> Any | None:
        try:
            return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


class _ThreadFuture(Generic[R]):
    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function
        self._ended = threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        self._ended.wait()
        return self._error

    def result(self) -> R:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
