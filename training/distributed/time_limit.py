"""Ends a process that a framework blocks: opening a TPU, or the first collective, may wait forever for a device or a
host that does not answer, and neither an exception nor a signal handler of Python gets through.
"""

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator

from training.errors import Exit
from training.machine import SYSTEM, Machine

# A framework that blocks with the interpreter's lock held stops the thread below too: then faulthandler, which needs no
# lock, prints the stack traces and ends the process with code 1, this many seconds later.
WITHOUT_LOCK_SECONDS = 30.0


@contextlib.contextmanager
def time_limit(
    what: str, seconds: float, phases: Callable[[], str], close: Callable[[int, str], None], machine: Machine = SYSTEM
) -> Iterator[None]:
    """Ends the process with exit code FAILED if the block takes longer than `seconds`: prints the stack traces of all
    threads and a message that names `what`, for example "opening the devices", and the phases of all hosts, which
    `phases` returns, and calls `close` with the exit code and the message, to tell the other hosts."""
    left = machine.threads.event()

    def watch() -> None:
        """Waits for the end of the block, at most `seconds`, or else ends the process. Runs in a thread."""
        if left.wait(seconds):
            return
        message = describe_overrun(what, seconds, phases())
        if machine is SYSTEM:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        with contextlib.suppress(OSError):
            print(f"tpu-train: error: {message}", file=sys.stderr, flush=True)
        close(int(Exit.FAILED), message)
        machine.exit(int(Exit.FAILED))

    if machine is SYSTEM:
        faulthandler.dump_traceback_later(seconds + WITHOUT_LOCK_SECONDS, exit=True, file=sys.__stderr__ or 2)
    watcher = machine.threads.start(watch, name="time-limit")
    try:
        yield
    finally:
        left.set()
        if machine is SYSTEM:
            faulthandler.cancel_dump_traceback_later()
        watcher.join()


def describe_overrun(what: str, seconds: float, phases: str) -> str:
    """Returns the message for a block that did not end. `phases`: of all hosts; "" with a single host."""
    hosts = f" (hosts: {phases})" if phases else ""
    return (
        f"{what} took longer than {seconds:g} s{hosts}, so this attempt ends: a host or a link of the slice does not "
        "answer, or another process holds the TPU; `tpu-launch doctor --devices` tries every host in seconds. If it "
        "finds nothing, recreate the slice (`tpu-launch down`, `up`), or raise rendezvous.start_seconds"
    )
