"""Threads and what they wait on, as a protocol with the methods of `threading`, `queue` and `concurrent.futures`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Thread(Protocol):
    """A thread that was started. It does not keep the process alive."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Whether it still runs."""


class Event(Protocol):
    """As `threading.Event`."""

    def is_set(self) -> bool:
        """Whether it has happened."""

    def set(self) -> None:
        """It has happened: wakes all that wait."""

    def clear(self) -> None:
        """It may happen again."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits, at most `timeout` seconds. Returns whether it has happened."""


class Condition(AbstractContextManager[bool, None], Protocol):
    """As `threading.Condition`, with a lock of its own."""

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock and waits for a notification, at most `timeout` seconds. Returns whether one came."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Waits until `predicate()` is true, at most `timeout` seconds. Returns its value."""

    def notify_all(self) -> None:
        """Wakes all that wait."""


class Future(Protocol[Result]):
    """The result of a call in a pool."""

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the call, and returns or raises what it did."""

    def cancel(self) -> bool:
        """Prevents the call, if it has not begun."""


class Pool(Protocol):
    """Some threads that make calls, in the order in which they were given."""

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        """Asks for a call."""


class Threads(Protocol):
    """Makes threads and what they wait on."""

    def start(self, function: Callable[..., None], *args: Any, name: str) -> Thread:
        """Starts a thread."""

    def start_timer(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls `function` after `seconds`, in a thread of its own."""

    def event(self) -> Event:
        """An event that has not happened."""

    def lock(self) -> AbstractContextManager[bool]:
        """A lock that nobody holds."""

    def condition(self) -> Condition:
        """A condition, with a lock of its own."""

    def pool(self, workers: int, name: str) -> AbstractContextManager[Pool]:
        """A pool of at most `workers` threads; leaving the context waits for the calls that have begun."""


class SystemThreads:
    """The threads of this process."""

    def start(self, function: Callable[..., None], *args: Any, name: str) -> Thread:
        thread = threading.Thread(target=function, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def start_timer(self, seconds: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()

    def event(self) -> Event:
        return threading.Event()

    def lock(self) -> AbstractContextManager[bool]:
        return threading.Lock()

    def condition(self) -> Condition:
        return threading.Condition()

    @contextmanager
    def pool(self, workers: int, name: str) -> Iterator[Pool]:
        with ThreadPoolExecutor(workers, thread_name_prefix=name) as executor:
            yield executor
