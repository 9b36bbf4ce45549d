"""SIGTERM and Ctrl-C: the first one requests an orderly stop; a repeated one may end the process at once.

The request is only a flag. Every step carries it to all hosts together with the gradients, so all of them see it after
the same step, commit that step and exit with code 75; no host has to guess how far the others are.

The stop has a limit: a preempted or evicted host has 25 or 30 seconds, and a compilation or a save may take longer. If
the process still runs `seconds` after the request, it exits as it is, also with exit code 75: the run resumes from its
last commit.

The container engine of a host that shuts down, the launcher and a kubelet may all request the same stop, seconds apart.
So while the time to save runs, another SIGTERM is the same request and changes nothing; after that, it ends the process
at once. Ctrl-C comes from the user, and the second one always ends the process at once.

Python runs signal handlers between bytecodes of the main thread, which may be inside a compilation or a collective for
minutes. So a thread reads the signals from the interpreter's wake-up pipe: a second signal ends even a process that
hangs.
"""

import signal
import socket
from collections.abc import Callable
from types import FrameType

from training.machine import SYSTEM, Machine, tell

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_SECONDS = 30.0  # in which all SIGTERMs are one request, at least: a preempted host has that long


class ShutdownRequest:
    """The request to stop this host."""

    def __init__(self, machine: Machine = SYSTEM) -> None:
        self._requested = machine.threads.event()
        self._requested_elsewhere = machine.threads.event()
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._machine = machine
        self._began: float | None = None  # when this host got its first signal
        self._interrupts = 0
        self.nothing_to_save = True  # until all hosts are ready for the first step

    @property
    def requested(self) -> bool:
        """Returns whether this host, or another host of the attempt, was asked to stop."""
        return self._requested.is_set() or self._requested_elsewhere.is_set()

    @property
    def may_exit_now(self) -> bool:
        """Returns whether a stop was requested before any training: then no host needs to wait for others."""
        return self.requested and self.nothing_to_save

    def limit(self, seconds: float, overdue: Callable[[], None]) -> None:
        """Has a thread call `overdue` `seconds` after a stop is requested, here or on another host (after this call, if
        it was before). Does not wait."""
        self._deadline = (seconds, overdue)
        if self.requested:
            self._count_down()

    def _count_down(self) -> None:
        """Starts a thread, one more at each call, that calls the `overdue` given to `limit` after its `seconds`; does
        nothing before `limit` was called."""
        if self._deadline:
            seconds, overdue = self._deadline

            def wait() -> None:
                """Sleeps `seconds`, then calls `overdue`: no later event cancels it."""
                self._machine.clock.sleep(seconds)
                overdue()

            self._machine.threads.start(wait, name="stop-deadline")

    def note_other_host(self) -> None:
        """Requests a stop because another host was asked to, and starts the countdown of `limit`; nothing the second
        time. The next signal of this host still counts as its first."""
        if not self._requested_elsewhere.is_set():
            self._requested_elsewhere.set()
            self._count_down()

    def request(self, number: int = signal.SIGTERM) -> None:
        """Records the first signal and starts the countdown of `limit`. Prints what happens next. Ends the process,
        with code 128 + `number`, at a second Ctrl-C, or a SIGTERM after the time of `limit`, 30 s at least."""
        now = self._machine.clock.monotonic()
        self._interrupts += number == signal.SIGINT
        if self._began is None:
            self._began = now
            self._requested.set()
            self._count_down()
            tell("asked to stop: all hosts will finish this step, save and leave; Ctrl-C twice leaves at once")
            return
        limit = self._deadline[0] if self._deadline else 0.0
        is_over = number == signal.SIGTERM and now - self._began >= max(limit, ONE_REQUEST_SECONDS)
        if is_over or self._interrupts > 1:
            tell("asked to stop again: leaving at once, without saving")
            self._machine.exit(128 + number)
        tell("asked to stop again: this host saves first")


def install_signal_handlers() -> ShutdownRequest:
    """Replaces the actions of SIGTERM and SIGINT: a thread passes them to the returned request, which may end the
    process at a repeated one. Call it once, early, in the main thread."""
    shutdown = ShutdownRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Does nothing: replaces the default action, which ends the process."""

    # Before the handlers, or a signal in between would be lost.
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, ignore)

    def watch() -> None:
        """Passes signals to the request, for ever. Runs in a thread."""
        _ = writer  # kept open as long as this thread lives
        while True:
            for number in reader.recv(16):
                if number in SIGNALS:
                    shutdown.request(number)

    SYSTEM.threads.start(watch, name="signals")
    return shutdown
