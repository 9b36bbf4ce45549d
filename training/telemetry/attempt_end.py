"""Records the end of an attempt on host 0: its last metrics, its end record, and report.html."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from training import storage as default_storage
from training.errors import StopRequested
from training.machine import SYSTEM, Machine
from training.storage import Storage
from training.telemetry import attempts, html
from training.telemetry.console import Console
from training.telemetry.phase_timer import PhaseTimer
from training.telemetry.writer import MetricsWriter, join_thread

END_SECONDS = 90.0  # limit for recording an end, because storage may not answer


@dataclass
class AttemptContext:
    """State of the attempt that `record_attempt_end` reads; filled in while the attempt starts up."""

    console: Console
    log: MetricsWriter | None = None
    is_hurried: Callable[[], bool] = lambda: False  # returns whether the machine is being taken away
    step: Callable[[], int] = lambda: 0  # returns the steps done so far
    close: list[Callable[[], None]] = field(default_factory=list)  # called first; they end background work


@contextlib.contextmanager
def record_attempt_end(
    folder: str,
    start_url: str,
    timer: PhaseTimer,
    context: AttemptContext,
    warn: Callable[[str], None],
    storage: Storage = default_storage,
    machine: Machine = SYSTEM,
    patience: float = math.inf,
) -> Iterator[None]:
    """Runs the block, a whole attempt on host 0, and records how it ended. Errors of the block are raised again.

    In a thread, calls the functions in `context.close`, and writes the last metrics, the end record beside the start
    record at `start_url`, and report.html in the run's folder `folder`. A stopped attempt skips report.html: the next
    attempt or `tpu-train report` writes it. A failure to record is a warning: it changes neither the attempt's result
    nor its error.

    Recording takes at most `END_SECONDS`; after an error also at most half of `patience`, the seconds that the other
    hosts wait for this one at a barrier, or they would report this host as lost instead of the error."""
    limit = END_SECONDS
    error: BaseException | None = None

    def record() -> None:
        """Ends background work and writes all records, in a thread. A failure is a warning."""
        try:
            for close in context.close:
                close()
            if context.log:
                failed = error is not None and not isinstance(error, StopRequested)
                context.log.finish(limit / 3, failed=failed, is_hurried=context.is_hurried)
            attempts.write_end(start_url, error, context.step(), timer.report(), storage=storage)
            if not isinstance(error, StopRequested):
                context.console.print(f"report: {html.write_report(folder, storage=storage)}")
        except Exception as problem:
            warn(f"the end of the attempt is not recorded in {folder}: {type(problem).__name__}: {problem}")

    try:
        yield
    except BaseException as raised:
        error, limit = raised, min(limit, patience / 2)
        raise
    finally:
        context.console.close()
        recording = machine.threads.start(record, name="attempt-end")
        if not join_thread(recording, limit, context.is_hurried, machine.clock.monotonic):
            warn(f"the end of the attempt is not recorded in {folder}: storage is slow")
