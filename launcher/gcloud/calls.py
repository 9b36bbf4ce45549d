"""Calls of gcloud, each with a time-out; its failures are LaunchErrors that say what to do.

A call is tried again in one case only: another operation on the same node has not ended (`Busy`), with a random pause
and one deadline. tenacity or google.api_core.retry would replace these six lines by as many lines of predicates; other
errors are not retried here, because gcloud itself retries what passes, and a creation costs money.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher import shell
from launcher.errors import CommandTimeout
from launcher.gcloud.errors import Busy, explain_error
from launcher.machine import Machine, RunCommand

_BUSY_SECONDS = 60.0  # how long another operation on the same node is waited for


def ask_gcloud(argv: Sequence[str], *, timeout: float, run: RunCommand = shell.run) -> str:
    """Runs a gcloud command that does not concern a node, once, and returns its standard output. Raises the LaunchError
    that its message means."""
    result = run(argv, timeout=timeout)
    if result.ok:
        return result.stdout
    raise explain_error(result.stderr or result.stdout, argv)


def call_gcloud(machine: Machine, argv: Sequence[str], *, timeout: float) -> str:
    """Runs a gcloud command and returns its standard output; waits for another operation to end. Raises the LaunchError
    that its message means."""
    deadline = machine.clock.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return ask_gcloud(argv, timeout=timeout, run=machine.run)
        except Busy:
            if machine.clock.monotonic() > deadline:
                raise
        machine.clock.sleep(1.0 + 2.0 * machine.random.random())


def call_gcloud_long(machine: Machine, argv: Sequence[str], *, timeout: float) -> str:
    """As `call_gcloud`, for the creation of a node: a time-out says that Google may still be creating it."""
    try:
        return call_gcloud(machine, argv, timeout=timeout)
    except CommandTimeout:
        raise CommandTimeout(
            f"no end after {timeout / 60:.0f} minutes of: {shell.quote(argv)}\n"
            "Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
        ) from None
