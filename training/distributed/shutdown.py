"""SIGTERM and Ctrl-C: the first asks for an orderly stop, the second ends the process at once.

The request is only a flag. Every step carries it to all hosts together with the gradients, so all of them see it after
the same step, commit that step and leave with exit code 75; nobody has to guess how far the others are.

There is a limit: what takes the machine away waits 25 or 30 seconds, and a compilation or a save may take longer. A
process that is still there `seconds` after the request leaves as it is, with exit code 75 too: the run goes on from its
last commit.

Python runs signal handlers between bytecodes of the main thread, which may be inside a compilation or a collective for
minutes. So the signals are read from the interpreter's wake-up pipe by a thread: a second signal ends even a process
that hangs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Spot and preemptible TPUs and GKE's nodes give 30 at most (https://cloud.google.com/compute/docs/instances/spot)
SECONDS = 25.0


class ShutdownRequest:
    """Whether this host was asked to stop."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._heard = threading.Event()
        self._limit: tuple[float, Callable[[], None]] | None = None
        self.nothing_to_save = True  # until all hosts are ready for the first step: leaving before loses nothing

    @property
    def requested(self) -> bool:
        return self._requested.is_set() or self._heard.is_set()

    @property
    def may_exit_now(self) -> bool:
        """Asked to stop while nothing was trained yet: there is no need to wait for anyone."""
        return self.requested and self.nothing_to_save

    def limit(self, seconds: float, overdue: Callable[[], None]) -> None:
        """From now on a request is followed after `seconds` by a call of `overdue`, in a thread of its own."""
        self._limit = (seconds, overdue)
        if self.requested:
            self._count_down()

    def _count_down(self) -> None:
        if self._limit:
            timer = threading.Timer(*self._limit)
            timer.daemon = True
            timer.start()

    def note_other_host(self) -> None:
        """Another host was asked, and this one stops for it. A signal of its own that follows is still a first one."""
        if not self._heard.is_set():
            self._heard.set()
            self._count_down()

    def request(self) -> None:
        """A first request is noted; a second one ends the process."""
        if self._requested.is_set():
            print(
                "tpu-train: asked to stop a second time: leaving at once, without saving", file=sys.stderr, flush=True
            )
            os._exit(128 + signal.SIGTERM)
        self._requested.set()
        self._count_down()
        print(
            "tpu-train: asked to stop: all hosts will finish this step, save and leave; ask again to leave at once",
            file=sys.stderr,
            flush=True,
        )


def install_signal_handlers() -> ShutdownRequest:
    """Watches SIGTERM and SIGINT from now on. Call once, from the main thread, before anything slow."""
    stopping = ShutdownRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def ignore(number: int, frame: FrameType | None) -> None:
        """A handler has to exist, or the default action would end the process."""

    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # first: what a handler alone hears is lost
    for number in SIGNALS:
        signal.signal(number, ignore)

    def watch() -> None:
        _ = writer  # kept open as long as this thread lives
        while True:
            for number in reader.recv(16):
                if number in SIGNALS:
                    stopping.request()

    threading.Thread(target=watch, name="signals", daemon=True).start()
    return stopping
