"""Threads, and what they share as Protocols with the methods of `threading` and `concurrent.futures`.

Code that runs things at once takes `Threads` as an argument and uses neither `threading` nor `queue` itself, so that a
simulation decides which thread runs when.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Thread(Protocol):
    """A started thread. It does not keep the process alive."""

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most `timeout` seconds."""

    def is_alive(self) -> bool: ...


class Event(Protocol):
    """`threading.Event`."""

    def is_set(self) -> bool: ...

    def set(self) -> None:
        """Sets the flag and wakes all waiters."""

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the flag is set, at most `timeout` seconds. Returns whether it is set."""


class Condition(AbstractContextManager[bool, None], Protocol):
    """`threading.Condition`, with a lock of its own."""

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock and waits for a notification, at most `timeout` seconds. Returns whether one came."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Waits until `predicate()` is true, at most `timeout` seconds. Returns its value."""

    def notify_all(self) -> None:
        """Wakes all waiters."""


class Queue(Protocol[T]):
    """A bounded first-in, first-out queue."""

    def put(self, item: T) -> None:
        """Adds an item; waits for room while the queue is full."""

    def get(self, timeout: float) -> T | None:
        """Takes the oldest item; returns None when none came within `timeout` seconds."""


class Future(Protocol[R_co]):
    """The outcome of a call in a thread of its own."""

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Waits for the call to end. Returns what it raised, or None."""

    def result(self) -> R_co:
        """Waits for the call to end. Returns what it returned, or raises what it raised."""


class Threads:
    """Makes threads and what they share. A thread that still runs does not keep the process from ending."""

    def lock(self) -> AbstractContextManager[Any]:
        """Returns a lock for one thread at a time, not reentrant."""
        return threading.Lock()

    def semaphore(self, count: int) -> AbstractContextManager[Any]:
        """Returns a lock for `count` threads at a time."""
        return threading.BoundedSemaphore(count)

    def condition(self) -> Condition:
        return threading.Condition()

    def event(self) -> Event:
        return threading.Event()

    def queue(self, size: int) -> Queue[Any]:
        """Returns a queue of at most `size` items."""
        return _ThreadQueue(size)

    def start(self, function: Callable[..., None], *args: Any, name: str | None = None) -> Thread:
        """Starts a thread that calls a function."""
        thread = threading.Thread(target=function, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """Calls a function in a thread of its own, and returns at once a future with its result or its error."""
        future = concurrent.futures.Future[R]()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self.start(run)
        return future

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        """Returns the results for all items, in their order; `at_once` threads call the function. When all calls have
        ended, raises what the first failed item raised."""
        waiting = list(items)
        results: list[Any] = [None] * len(waiting)
        failures: dict[int, BaseException] = {}
        numbers = iter(range(len(waiting)))
        taking = threading.Lock()

        def work() -> None:
            """Calls the function for one waiting item after the other, and keeps results and errors."""
            while True:
                with taking:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    results[number] = function(waiting[number])
                except BaseException as error:
                    failures[number] = error

        # Ctrl-C in the waiting thread leaves at once: no thread is joined on the way out.
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
