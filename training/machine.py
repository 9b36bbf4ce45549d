"""Clock, threads, network and randomness of the machine that a process runs on, as one value.

The hosts' protocol, checkpoints, shutdown and telemetry, and with more members (`launcher.workstation`) the launcher,
take a `Machine` and use nothing of `time`, `threading`, `queue`, `socket` and `random` beside it. So a simulation
decides when everything happens, and in which order. Files are not part of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import os
import queue
import random
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, NoReturn, TypeVar

from training.errors import TrainError


class Clock:
    """Tells the operating system's time, and waits. Others are derived from it."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary moment; never goes backwards."""
        return time.monotonic()

    def time(self) -> float:
        """Returns Unix seconds, as far as this host knows."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def format_time(seconds: float) -> str:
    """Returns Unix seconds as an RFC 3339 timestamp in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_time(timestamp: str) -> float | None:
    """Returns the Unix seconds of an RFC 3339 timestamp, as Google and container engines print it; without an offset
    it is in UTC. None for an empty one. Raises ValueError for another text."""
    if not timestamp:
        return None
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@functools.lru_cache(maxsize=1024)  # one observation asks three times about the same line
def shift(timestamp: str, by: timedelta) -> str:
    """Returns an RFC 3339 timestamp in UTC moved by `by`, whole seconds, with nine digits of a second (Python has six),
    so that timestamps compare as text. Raises ValueError for another text."""
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    return f"{(datetime.fromisoformat(head) + by).isoformat()}.{(fraction or '0')[:9].ljust(9, '0')}Z"


NAME_SECONDS = 60.0  # in which the cluster's name service learns the name of this host

T = TypeVar("T")
R = TypeVar("R")

Thread = threading.Thread
Event = threading.Event
Condition = threading.Condition
Future = concurrent.futures.Future
Connection = socket.socket
"""A simulation has its own class of each of these, with the methods that the code uses."""


class Queue(Generic[T]):
    """A bounded first-in, first-out queue."""

    def __init__(self, size: int) -> None:
        self._queue: queue.Queue[T] = queue.Queue(size)

    def put(self, item: T) -> None:
        """Adds an item; waits for room while the queue is full."""
        self._queue.put(item)

    def get(self, timeout: float) -> T | None:
        """Takes the oldest item; returns None if none comes within `timeout` seconds (0 or less: if none waits)."""
        try:
            return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


def _settle(future: Future[R], function: Callable[..., R], *args: Any) -> None:
    """Calls a function, and gives the future its result or its error."""
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)


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
        return Queue(size)

    def start(self, function: Callable[..., None], *args: Any, name: str | None = None) -> Thread:
        thread = threading.Thread(target=function, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """Calls a function in a thread of its own, and returns at once a future with its result or its error."""
        future = concurrent.futures.Future[R]()
        self.start(_settle, future, function, *args)
        return future

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        """Returns the results for all items, in their order; `at_once` threads call the function. When all calls have
        ended, raises what the first failed item raised."""
        calls = [(concurrent.futures.Future[R](), function, item) for item in items]
        waiting = deque(calls)

        def work() -> None:
            """Makes one waiting call after the other."""
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    _settle(*waiting.popleft())

        # Ctrl-C in the waiting thread leaves at once: no thread is joined on the way out.
        for worker in [self.submit(work) for _ in range(min(at_once, len(calls)))]:
            worker.result()
        return [future.result() for future, _, _ in calls]


class Network:
    """Makes TCP connections between hosts."""

    def listen(self, address: str, port: int) -> socket.socket:
        """Waits until the name service knows this host's `address`, NAME_SECONDS at most, and returns a listening
        socket. Raises TrainError if it stays unknown or is not this host's, or the port is in use."""
        deadline = time.monotonic() + NAME_SECONDS
        while True:
            try:
                socket.getaddrinfo(address, port)
                break
            except socket.gaierror as error:
                if time.monotonic() > deadline:
                    raise TrainError(
                        f"this host is worker 0, but its own name {address} was not known within {NAME_SECONDS:g} s: "
                        f"{error}"
                    ) from None
                time.sleep(0.5)
        try:
            listener = socket.create_server((address, port), backlog=1024, reuse_port=False)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
            return listener
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TrainError(
                    f"port {port} on {address} is in use, so the hosts can't meet there: does another trainer run on "
                    "this host?"
                ) from None
            raise TrainError(
                f"this host is worker 0, but can't listen on {address}:{port}: {error.strerror or error}; is "
                "TPU_WORKER_HOSTNAMES in worker order?"
            ) from None

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        """Connects to a host without Nagle's delay; `timeout`, in seconds, limits later calls too. Raises OSError."""
        connection = socket.create_connection((address, port), timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def selector(self) -> selectors.BaseSelector:
        return selectors.DefaultSelector()

    def detect_silence(self, connection: Connection, lost_seconds: float) -> None:
        """Sets TCP's keep-alive and time-out so that the kernel breaks a connection to a vanished machine after about
        `lost_seconds`, however busy this process is."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", max(1, int(lost_seconds) - 1)),
            ("TCP_USER_TIMEOUT", int(lost_seconds * 1000)),
        ):
            if hasattr(socket, option):  # Linux has all four
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


@dataclass(frozen=True)
class Machine:
    """The machine that a process runs on; the real one by default."""

    clock: Clock = field(default_factory=Clock)
    threads: Threads = field(default_factory=Threads)
    network: Network = field(default_factory=Network)
    random: random.Random = field(default_factory=random.SystemRandom)
    exit: Callable[[int], NoReturn] = os._exit  # ends the process at once, with this exit code


SYSTEM = Machine()


def tell(message: str) -> None:
    """Prints "tpu-train: MESSAGE" on standard error (standard output is for results). Ignores a failed write: a full
    disk or a closed pipe must neither end a thread nor change the exit code."""
    with contextlib.suppress(OSError):
        print(f"tpu-train: {message}", file=sys.stderr, flush=True)


def exit_at_once(code: int, machine: Machine = SYSTEM) -> NoReturn:
    """Flushes standard output and error, and ends the process at once, without Python's clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    machine.exit(code)
