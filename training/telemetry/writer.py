"""Writes a run's numbers from a thread of host 0, so that slow or failing storage can't stop training.

    loop thread      `log` queues values in memory, at most `MOST_WAITING` lines; it never blocks
    writer thread    every `FLUSH_SECONDS`, and for `flush`, passes queued values to the trackers and flushes those;
                     retries what fails, with one warning. Each value is passed on once, after all before it are written
    saving thread    `flush` waits for that before each commit: an attempt that resumes at the commit finds its metrics

The thread also opens the log, which lists the run's folder. `finish` waits for the thread, for a limited time.
"""

from collections import deque
from collections.abc import Callable

from training.machine import SYSTEM, Machine, Thread
from training.telemetry.metrics import MetricsLog, Values

FLUSH_SECONDS = 20.0
FLUSH_LIMIT = 5.0  # seconds that a commit waits for its metrics
RETRY_SECONDS = 1.0  # between tries while `finish` waits
HURRIED_SECONDS = 5.0  # limit of `join_thread` once the machine is being taken away
MOST_WAITING = 10_000  # lines in memory: hours of training, in 3 MB


def join_thread(thread: Thread, seconds: float, is_hurried: Callable[[], bool], clock: Callable[[], float]) -> bool:
    """Waits at most `seconds` for a thread, and at most HURRIED_SECONDS once `is_hurried` returns True: the machine is
    being taken away. Returns whether the thread has ended."""
    deadline = clock() + seconds
    was_hurried = False
    while thread.is_alive() and clock() < deadline:
        if is_hurried() and not was_hurried:
            was_hurried, deadline = True, min(deadline, clock() + HURRIED_SECONDS)
        thread.join(min(0.5, max(0.0, deadline - clock())))
    return not thread.is_alive()


class MetricsWriter:
    """Writes the numbers of one attempt in the background."""

    def __init__(
        self, open_log: Callable[[], MetricsLog], warn: Callable[[str], None], machine: Machine = SYSTEM
    ) -> None:
        """Starts the thread, which calls `open_log` for its log, again after a failure, and `warn` for warnings."""
        self._open_log, self._warn, self._clock = open_log, warn, machine.clock.monotonic
        self._log: MetricsLog | None = None  # the thread's
        self._failure: str | None = None  # of the last try
        self._waiting: deque[tuple[int, Values]] = deque(maxlen=MOST_WAITING)
        self._lost = 0  # lines for which there was no room
        self._is_ending = self._failed = self._was_awaited = False
        self._requested = self._tried = 0  # flushes
        self._changed = machine.threads.condition()
        self._thread = machine.threads.start(self._run_thread, name="metrics")

    def log(self, step: int, values: Values) -> None:
        """Queues values of the state after `step` steps. A full queue drops its oldest line."""
        with self._changed:
            self._lost += len(self._waiting) == MOST_WAITING
            self._waiting.append((step, dict(values)))

    def flush(self) -> None:
        """Lets the thread write what is queued, and waits until it has tried, at most `FLUSH_LIMIT` seconds."""
        with self._changed:
            self._requested += 1
            request = self._requested
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tried >= request or self._is_ending, FLUSH_LIMIT)

    def finish(self, seconds: float, *, failed: bool = False, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Lets the thread write the rest, finish the log of an attempt that `failed` or not, and end; waits for
        that, at most `seconds`, and at most `HURRIED_SECONDS` once `is_hurried` says that the machine is being taken
        away. Warns of lines that are lost. A second call does nothing."""
        if self._was_awaited:
            return
        self._was_awaited = True
        with self._changed:
            self._is_ending, self._failed = True, failed
            self._changed.notify_all()
        if not join_thread(self._thread, seconds, is_hurried, self._clock):
            self._warn(f"the last metrics are not written: {self._failure or 'storage is slow'}")
        if self._lost:
            self._warn(f"{self._lost} lines of metrics were lost: storage did not take them for too long")

    def _run_thread(self) -> None:
        """Writes at once, so that lines of earlier attempts for later steps no longer count even if this one is killed;
        then every `FLUSH_SECONDS` and for `flush`; after `finish`, until everything is written. Then it ends."""
        seconds = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ending or self._requested > self._tried, seconds)
                is_ending, request, seconds = self._is_ending, self._requested, FLUSH_SECONDS
            is_written = self._write(is_ending)
            with self._changed:
                self._tried = request
                self._changed.notify_all()
            if is_ending and is_written:
                return
            if is_ending:
                with self._changed:
                    self._changed.wait(RETRY_SECONDS)

    def _write(self, is_ending: bool) -> bool:
        """Opens the log if it is not open, flushes what an earlier flush left, then logs and flushes the queue; at the
        end also finishes the log. Returns whether that succeeded; warns of the first of successive failures."""
        try:
            if self._log is None:
                self._log = self._open_log()
            self._log.flush()  # what an earlier flush left, before it takes more
            with self._changed:
                lines = list(self._waiting)
                self._waiting.clear()
            for step, values in lines:
                self._log.log(step, values)
            self._log.flush()
            if is_ending:
                self._log.finish(self._failed)
        except Exception as error:  # a tracker may raise anything, and must not end the run
            if self._failure is None:
                self._warn(f"metrics can't be written: {error}; training continues, and tpu-train will try again")
            self._failure = str(error)
            return False
        self._failure = None
        return True
