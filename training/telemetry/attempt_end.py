"""Host 0's last words in the run's folder, whichever way an attempt ends: its last metrics, how it ended, and
report.html."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.errors import StopRequested
from training.models.hub import BackgroundUploader
from training.telemetry import attempts
from training.telemetry import html as page
from training.telemetry.console import Console
from training.telemetry.metrics import MetricsLog
from training.telemetry.phase_timer import PhaseTimer


@dataclass
class AttemptContext:
    """What is known of the attempt so far."""

    screen: Console
    log: MetricsLog | None = None
    step: Callable[[], int] = lambda: 0
    pushes: BackgroundUploader | None = None


@contextlib.contextmanager
def record_attempt_end(
    folder: str, start_url: str, clock: PhaseTimer, ending: AttemptContext, warn: Callable[[str], None]
) -> Iterator[None]:
    """Around a whole attempt, on host 0. What can't be written is warned of: it changes neither the result nor why the
    attempt ended.

    An attempt that was asked to stop leaves at once: its report is made by the next one, or by `tpu-train report`."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        ending.screen.close()
        try:
            if ending.pushes:
                ending.pushes.close()
            if ending.log:
                ending.log.flush()
            attempts.write_end(start_url, error, ending.step(), clock.report())
            if not isinstance(error, StopRequested):
                ending.screen.print(f"report: {page.write_report(folder)}")
        except Exception as problem:
            warn(f"the end of the attempt is not told in {folder}: {type(problem).__name__}: {problem}")
