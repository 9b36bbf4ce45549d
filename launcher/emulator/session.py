"""`--emulated`: puts the emulator's endpoints into this process's environment while one command runs.

A command starts an emulator when none runs. An emulator that was started so is stopped by the command after which no
slice is left; its buckets are kept, so that a run can be resumed. One that `tpu-launch emulator start` started is left
running.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from launcher.emulator import control

_STARTED_BY_COMMAND = "started-by-a-command"


@contextlib.contextmanager
def emulated(say: Callable[[str], None]) -> Iterator[None]:
    """Makes commands inside the block reach the emulator instead of Google. Reports starts and stops to `say`."""
    folder = control.default_home()
    mark = folder / _STARTED_BY_COMMAND
    if not control.status(folder)["running"]:
        say("starting the emulator (a first start builds the image of its hosts)")
        control.start(folder)
        mark.touch()
    before = dict(os.environ)
    os.environ.update(control.environment(folder))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        status = control.status(folder) if mark.exists() else {}
        if status and not status.get("nodes") and not status.get("queued_resources"):
            control.stop(folder, keep_data=True)
            say("stopped the emulator: it has no slices left")
