"""What `--emulated` does to a command: the emulator's endpoints go into this process's environment, and nothing else is
different.

A command starts an emulator when none runs, and the command after which no slice is left stops the one that was started
so: after `down` nothing of it runs. What buckets hold stays, so a run can be resumed. An emulator that was started with
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
    """For the time of one command."""
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
        found = control.status(folder) if mark.exists() else {}
        if found and not found.get("nodes") and not found.get("queued_resources"):
            control.stop(folder, keep_data=True)
            say("stopped the emulator: it has no slices left")
