"""SIGTERM and Ctrl-C: the first asks for an orderly stop, the second ends the process at once.

The request is only a flag. Every step carries it to all hosts together with the gradients, so all of them see it after
the same step, commit that step and exit with code 75; no host has to guess how far the others are.

There is a limit: what takes the machine away waits 25 or 30 seconds, and a compilation or a save may take longer. A
process that is still there `seconds` after the request exits as it is, with exit code 75 too: the run continues from
its last commit.

Python runs signal handlers between bytecodes of the main thread, which may be inside a compilation or a collective for
minutes. So the signals are read from the interpreter's wake-up pipe by a thread: a second signal ends even a process
that hangs.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

from training.machine import SYSTEM, Machine

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownRequest:
    """Whether this host was asked to stop."""

    def __init__(self, machine: Machine = SYSTEM) -> None:
        self._requested = machine.threads.event()
        self._requested_elsewhere = machine.threads.event()
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._machine = machine
        self.nothing_to_save = True  # until all hosts are ready for the first step: exiting before loses nothing

    @property
    def requested(self) -> bool:
        """Whether this host, or another one that it follows, was asked to stop."""
        return self._requested.is_set() or self._requested_elsewhere.is_set()

    @property
    def may_exit_now(self) -> bool:
        """Asked to stop while nothing was trained yet: there is no need to wait for other hosts."""
        return self.requested and self.nothing_to_save

    def limit(self, seconds: float, overdue: Callable[[], None]) -> None:
        """Sets how long this host may take to stop: `seconds` after a request, past or future, `overdue` is called in a
        thread of its own."""
        self._deadline = (seconds, overdue)
        if self.requested:
            self._count_down()

    def _count_down(self) -> None:
        if self._deadline:
            self._machine.threads.start_timer(*self._deadline)

    def note_other_host(self) -> None:
        """Another host was asked to stop, and this one stops with it. A signal of its own that follows is still a first
        one."""
        if not self._requested_elsewhere.is_set():
            self._requested_elsewhere.set()
            self._count_down()

    def request(self) -> None:
        """Notes a first request; a second one ends the process."""
        if self._requested.is_set():
            print(
                "tpu-train: asked to stop a second time: leaving at once, without saving", file=sys.stderr, flush=True
            )
            self._machine.exit(128 + signal.SIGTERM)
        self._requested.set()
        self._count_down()
        print(
            "tpu-train: asked to stop: all hosts will finish this step, save and leave; ask again to leave at once",
            file=sys.stderr,
            flush=True,
        )


def install_signal_handlers() -> ShutdownRequest:
    """Makes SIGTERM and SIGINT requests from now on. Call once, from the main thread, before anything slow."""
    shutdown = ShutdownRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def ignore(number: int, frame: FrameType | None) -> None:
        """A handler has to exist, or the default action would end the process."""

    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # first: a signal in between would be lost
    for number in SIGNALS:
        signal.signal(number, ignore)

    def watch() -> None:
        _ = writer  # kept open as long as this thread lives
        while True:
            for number in reader.recv(16):
                if number in SIGNALS:
                    shutdown.request()

    SYSTEM.threads.start(watch, name="signals")
    return shutdown
