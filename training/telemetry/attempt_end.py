"""What host 0 writes when an attempt ends, in whichever way: its last metrics, its end record, and report.html."""

from __future__ import annotations

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
from training.telemetry.writer import MetricsWriter, join

END_SECONDS = 90.0  # that host 0 spends on recording an end: storage may not answer


@dataclass
class AttemptContext:
    """What `record_attempt_end` uses; filled in while the attempt starts up."""

    console: Console
    log: MetricsWriter | None = None
    is_hurried: Callable[[], bool] = lambda: False  # the machine is taken away
    step: Callable[[], int] = lambda: 0  # steps done so far
    close: list[Callable[[], None]] = field(default_factory=list)  # called first: ends what runs in the background


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
    """Runs a whole attempt on host 0, and records how it ended.

    A failure to record is a warning: it changes neither the attempt's result nor its error, and delays neither for more
    than `END_SECONDS`, an error for no more than half of `patience`: the other hosts would miss this one, and tell that
    instead of the error.
    An attempt that was asked to stop leaves at once, without report.html: the next attempt or `tpu-train report` writes
    it.

    Args:
        folder: of the run.
        start_url: of the attempt's start record.
        timer: of the attempt.
        context: what is known of the attempt by then.
        warn: shows a warning.
        storage: where the run's folder is.
        machine: for the thread that records.
        patience: seconds that the other hosts wait for this one where they meet.
    """
    limit = END_SECONDS
    error: BaseException | None = None

    def record() -> None:
        try:
            for close in context.close:
                close()
            if context.log:
                context.log.finish(limit / 3, is_hurried=context.is_hurried)
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
        if not join(recording, limit, context.is_hurried, machine.clock.monotonic):
            warn(f"the end of the attempt is not recorded in {folder}: storage is slow")
