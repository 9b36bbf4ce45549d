"""The errors that users of `tpu-launch` meet, and their exit codes.

Every such error is a `LaunchError`, whose message says what happened, where, and what to do next. `cli.main` prints it
and exits with its code; a traceback that reaches a user is a bug.
"""

import enum
import errno


class Exit(enum.IntEnum):
    """Exit codes of `tpu-launch`; docs/reference/exit-codes.md is made from the texts below the members.

    The trainer's own codes are in `training.errors`.
    """

    OK = 0
    """Done. Of `run`: the command finished on every host."""
    BAD_INPUT = 2
    """The file, an argument or this machine is not as it must be, and nothing was started; or the trainer refused its
    configuration or data; or another attempt would follow and secrets are missing: the run can be resumed."""
    APPLICATION_FAILED = 10
    """The command of a run failed on a host."""
    HOST_LOST = 11
    """A host of the slice died or could not be reached, or hosts lost the connection to each other too often."""
    PREEMPTED = 12
    """The slice was taken away."""
    STALLED = 13
    """The run hung; the message names the host and the line where it hangs, and stacks are in the run's folder."""
    STOPPED = 14
    """The run was stopped on request, and it did not save."""
    DOES_NOT_FIT = 15
    """Preflight: the step does not fit on the accelerator, or does not compile for it; nothing was started."""
    DEVICES = 16
    """Device check: a host or its devices are not as a run needs them; no run was started."""
    STOCKOUT = 20
    """No capacity in any of the zones within the time given. The only one of 20, 21 and 22 that is tried again."""
    QUOTA = 21
    """The project's quota does not suffice."""
    PERMISSION = 22
    """The account may not do this; the message names the permission."""
    CONFLICT = 23
    """The name, the slice, its hosts or the run are in use; or the slice of that name is not yours; or it was deleted
    while the launcher waited for it."""
    CLOUD_ERROR = 24
    """Google's API, gcloud, ssh or a host failed, or did not answer in time; or this machine's disk is full."""
    SAVED = 75
    """Stopped and saved: `run` resumes. (EX_TEMPFAIL of sysexits.h)"""
    DETACHED = 130
    """Ctrl-C: detached, and the run goes on; or interrupted before anything ran. The last line says which."""


_PERMANENT = frozenset(
    (Exit.BAD_INPUT, Exit.DOES_NOT_FIT, Exit.DEVICES, Exit.QUOTA, Exit.PERMISSION, Exit.CONFLICT, Exit.STOPPED)
)


class LaunchError(Exception):
    """An error whose message tells the user what happened, where, and what to do."""

    exit_code: Exit = Exit.CLOUD_ERROR

    def __init__(self, message: str, *, exit_code: Exit | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def transient(self) -> bool:
        """Returns whether a retry may succeed although nothing was changed: after every error but bad input, a step
        that does not fit, devices that fail, a quota, a permission, a conflict and a requested stop."""
        return self.exit_code not in _PERMANENT


class BadInput(LaunchError):
    """The configuration, an argument or this machine is not as it must be; nothing was started."""

    exit_code = Exit.BAD_INPUT


class CommandMissing(BadInput):
    """A required program is not installed."""


class HostsUnreachable(LaunchError):
    """The slice is READY, but some of its hosts could not be reached for too long."""


class CommandTimeout(LaunchError):
    """A local command did not end within its time-out."""


_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def from_disk(error: Exception) -> LaunchError | None:
    """Returns the error to show when this machine's disk is full, read-only or broken; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _DISK_TROUBLE:
        return None
    return LaunchError(
        f"this machine's disk: {error.strerror} ({error.filename or 'while writing'}); what runs on hosts goes on, and "
        "is billed: make room, then `tpu-launch run --attach` watches it again"
    )
