"""Calls of gcloud, each with a time-out; failures are LaunchErrors that say what to do.

gcloud retries what passes within seconds, and a creation costs money: a call is retried only while another operation on
the same node is under way (`Busy`). What waits for minutes or hours is repeated through `retry.Retry`.
"""

from collections.abc import Callable, Sequence

from launcher import shell
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.errors import Busy, Conflict, explain_error
from launcher.gcloud.retry import Backoff
from launcher.workstation import RunCommand, Workstation

DELETE_SECONDS = 900.0
_BUSY_SECONDS = 60.0
_DELETION_PAUSE = 2.0  # seconds


def run_gcloud(
    argv: Sequence[str], *, timeout: float, run: RunCommand = shell.run, pass_fds: Sequence[int] = ()
) -> str:
    """Runs gcloud once; it inherits `pass_fds`. Returns its output; raises the LaunchError that its message means."""
    try:
        result = run(argv, timeout=timeout, pass_fds=pass_fds)
    except CommandTimeout as error:
        raise CommandTimeout(f"{error}\n  Google's API, or the network to it, does not answer: try again") from None
    if result.ok:
        return result.stdout
    raise explain_error(result.stderr or result.stdout, argv)


def call_gcloud(machine: Workstation, argv: Sequence[str], *, timeout: float, pass_fds: Sequence[int] = ()) -> str:
    """Runs gcloud as `run_gcloud`; retries for a minute while another operation on the node is under way (Busy)."""
    deadline = machine.clock.monotonic() + _BUSY_SECONDS
    backoff = Backoff(machine, longest=2.0)
    while True:
        try:
            return run_gcloud(argv, timeout=timeout, run=machine.run, pass_fds=pass_fds)
        except Busy:
            if machine.clock.monotonic() > deadline:
                raise
        machine.clock.sleep(backoff.next())


Look = tuple[str, Sequence[str] | None]
"""A description of something that is still there, and the command that deletes it; None while no deletion is needed."""


def delete_until_gone(
    machine: Workstation, say: Callable[[str], None], look: Callable[[], Look | None], deadline: float
) -> None:
    """Deletes something and returns when it is gone. Each deletion follows a look: what was seen before may have been
    minutes ago.

    Args:
        say: Is given a line for each new error after which the deletion is repeated.
        look: Asks the API; returns what is still there and the command that deletes it, None when nothing is left.
        deadline: Seconds of the monotonic clock; DELETE_SECONDS after the begin.

    Raises:
        CommandTimeout: It is still there after the deadline.
        LaunchError: Repeating the deletion changes nothing.
    """
    reported = ""
    while (seen := look()) is not None:
        description, command = seen
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(
                f"{description} and not gone after {DELETE_SECONDS / 60:.0f} minutes; run the command again"
            )
        if command is not None:
            try:
                run_gcloud(command, timeout=DELETE_SECONDS, run=machine.run)
                continue
            except LaunchError as error:
                # Gone already, another operation, or a lost answer: the next look tells.
                if not (error.transient or isinstance(error, Conflict)):
                    raise
                text = f"{description}, and is not deleted yet: {str(error).splitlines()[0]}; trying again"
                if text != reported:
                    say(text)
                reported = text
        machine.clock.sleep(_DELETION_PAUSE)
