"""`--emulated`: puts the emulator's endpoints into this process's environment for the time of one command.

A command starts an emulator when none runs. The command after which no slice is left stops an emulator that was started
so, and keeps what its buckets hold, so that a run can be resumed. An emulator that was started with
`tpu-launch emulator start` is left running.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from launcher.emulator import control

_STARTED_BY_COMMAND = "started-by-a-command"


@contextlib.contextmanager
def emulated(say: Callable[[str], None]) -> Iterator[None]:
    """Commands inside the block reach the emulator instead of Google. `say` gets a line for each start and stop."""
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
