"""What can go wrong for a user of `tpu-launch`, and the exit code that says which it was.

Every error a user can meet is a `LaunchError`: one message that says what happened, where, and what to do next.
`cli.main` prints it and exits with its code; a traceback that reaches a user is a bug of ours.
"""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `tpu-launch`, the table of the README. The trainer's own codes are in `training.errors`."""

    OK = 0
    BAD_INPUT = 2  # configuration, arguments, or this machine: nothing was started
    APPLICATION_FAILED = 10  # the command of a run failed on a host
    HOST_LOST = 11  # a host of the slice died or can't be reached
    PREEMPTED = 12  # the slice was taken away
    STALLED = 13  # no sign of life within the configured time
    STOPPED = 14  # somebody stopped the run, and it did not save
    DOES_NOT_FIT = (
        15  # preflight: the step does not fit on the accelerator, or does not compile for it; nothing was started
    )
    STOCKOUT = 20  # no capacity in the zone
    QUOTA = 21
    PERMISSION = 22
    CONFLICT = 23  # the slice, or its hosts, are in use by somebody else
    CLOUD_ERROR = 24  # Google's API, gcloud or ssh failed, or did not answer in time
    SAVED = 75  # asked to stop, saved, can be resumed (EX_TEMPFAIL)
    DETACHED = 130  # Ctrl-C: the run goes on


class LaunchError(Exception):
    """An error a user can act on. Its message is complete: what, where, what to do."""

    exit_code: Exit = Exit.CLOUD_ERROR

    def __init__(self, message: str, *, exit_code: Exit | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class BadInput(LaunchError):
    """A configuration, an argument or this machine is not as it must be; nothing was started."""

    exit_code = Exit.BAD_INPUT


class CommandMissing(BadInput):
    """A program that must be installed isn't."""


class CommandTimeout(LaunchError):
    """A local command did not end in its time; the message names what was waited for."""
