"""SIGTERM and Ctrl-C: the first asks for an orderly stop; somebody who asks again may end the process at once.

The request is only a flag. Every step carries it to all hosts together with the gradients, so all of them see it after
the same step, commit that step and exit with code 75; no host has to guess how far the others are.

There is a limit: what takes the machine away waits 25 or 30 seconds, and a compilation or a save may take longer. A
process that is still there `seconds` after the request exits as it is, with exit code 75 too: the run continues from
its last commit.

Several may ask for the same stop, a moment apart or half a minute: the engine of a host that shuts down, the launcher
that saw it, a kubelet. So while the time to save runs, a further SIGTERM is the same request and cuts nothing short;
after it, one ends the process at once. Ctrl-C comes from a person, and the second one ends the process whenever it
comes.

Python runs signal handlers between bytecodes of the main thread, which may be inside a compilation or a collective for
minutes. So the signals are read from the interpreter's wake-up pipe by a thread: a second signal ends even a process
that hangs.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

from training.machine import SYSTEM, Machine

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_SECONDS = 30.0  # in which SIGTERMs are one request, at least: what takes a machine away waits that long


class ShutdownRequest:
    """Whether this host was asked to stop."""

    def __init__(self, machine: Machine = SYSTEM) -> None:
        self._requested = machine.threads.event()
        self._requested_elsewhere = machine.threads.event()
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._machine = machine
        self._began: float | None = None  # when the first signal of this host came
        self._interrupts = 0
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

    def request(self, number: int = signal.SIGTERM) -> None:
        """Notes a request. One that insists ends the process: a second Ctrl-C, or a SIGTERM after the time to save.

        Args:
            number: of the signal.
        """
        now = self._machine.clock.monotonic()
        self._interrupts += number == signal.SIGINT
        if self._began is None:
            self._began = now
            self._requested.set()
            self._count_down()
            _say("asked to stop: all hosts will finish this step, save and leave; Ctrl-C twice leaves at once")
            return
        limit = self._deadline[0] if self._deadline else 0.0
        is_over = number == signal.SIGTERM and now - self._began >= max(limit, ONE_REQUEST_SECONDS)
        if is_over or self._interrupts > 1:
            _say("asked to stop again: leaving at once, without saving")
            self._machine.exit(128 + number)
        _say("asked to stop again: it is under way, and this host saves first")


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the thread that reads signals must live on
        print(f"tpu-train: {message}", file=sys.stderr, flush=True)


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
                    shutdown.request(number)

    SYSTEM.threads.start(watch, name="signals")
    return shutdown
