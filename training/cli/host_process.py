"""The process of one host in a command that all hosts of a slice run: how it joins the others, and how it ends.

The exit code is what the launcher decides from, so the process leaves with `os._exit` once it is known: the threads of
a framework may not survive an orderly end of the interpreter.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from training.errors import Exit, LostPeer, OutOfMemory, StopRequested, TrainError, is_out_of_memory
from training.machine import SYSTEM, Machine

if TYPE_CHECKING:
    from training.config import TrainerConfig
    from training.distributed.cluster import Cluster
    from training.distributed.rendezvous import Rendezvous
    from training.distributed.shutdown import ShutdownRequest


def join_cluster(config: TrainerConfig, shutdown: ShutdownRequest) -> tuple[Cluster, Rendezvous]:
    """Finds out which host this is, and connects to the others. Raises BadInput, LostPeer."""
    from training.distributed.cluster import discover
    from training.distributed.rendezvous import join

    cluster, timeouts = discover(), config.rendezvous
    rendezvous = join(
        cluster,
        shutdown,
        start_seconds=timeouts.start_seconds,
        seconds=timeouts.seconds,
        lost_seconds=timeouts.lost_seconds,
    )
    return cluster, rendezvous


def run_and_exit(rendezvous: Rendezvous, work: Callable[[], None], machine: Machine = SYSTEM) -> NoReturn:
    """Does this host's work, reports to the other hosts how it ended, and leaves with its exit code."""
    code, message = Exit.FAILED, "unexpected error"
    try:
        work()
        code, message = Exit.FINISHED, ""
    except TrainError as error:
        code, message = error.exit_code, str(error)
        print_error(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            message = str(OutOfMemory(message))
            _print(f"tpu-train: error: {message}")
        else:
            traceback.print_exc()
    finally:
        rendezvous.close(code, message)
        _exit(code, machine)


def exit_overdue(rendezvous: Rendezvous, seconds: float, machine: Machine = SYSTEM) -> NoReturn:
    """Leaves while the main thread is in a call that does not end within `seconds` of a stop request. The other hosts
    leave too."""
    message = (
        f"could not stop in good order within {seconds:g} s (checkpoint.stop_seconds); the run goes on from its last "
        "commit"
    )
    _print(f"tpu-train: stopped: {message}")
    rendezvous.close(Exit.SAVED, message, overdue=True)
    _exit(Exit.SAVED, machine)


def print_error(error: TrainError) -> None:
    """Prints the error's one message."""
    kind = "stopped" if isinstance(error, StopRequested) else "lost peer" if isinstance(error, LostPeer) else "error"
    _print(f"tpu-train: {kind}: {error}")


def _print(message: str) -> None:
    """On standard error, if anybody reads it: the exit code is what counts."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _exit(code: int, machine: Machine) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    machine.exit(code)
