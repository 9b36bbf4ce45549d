"""`exec`: one command in the live containers of a run, on all hosts or on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import BadInput, Exit
from launcher.masking import Masker
from launcher.provider import CommandReport, LogLine
from launcher.run import ledger as ledgers
from launcher.run.attempts.session import Session
from launcher.run.launch import Context, open_session
from launcher.run.specification import SecretSource


@dataclass(frozen=True)
class Command:
    """A command of a person's."""

    words: tuple[str, ...]
    """Program and arguments."""

    host: int | None
    """Worker index; None for all hosts."""

    seconds: float
    """After which it is ended."""


def execute(
    config: Config,
    context: Context,
    run_id: str | None,
    command: Command,
    on_line: Callable[[str], None] = lambda line: None,
) -> list[CommandReport]:
    """Runs a command in the run's live containers, and emits its lines as they come, values of secrets masked.

    Args:
        config: Finds the run: the newest one of its slice.
        context: This process.
        run_id: Finds the run instead.
        command: What runs, and where.
        on_line: Is given each line that is emitted, without its host; one at a time.

    Returns:
        How it ended on each host.

    Raises:
        BadInput: The run is not running, or has no such host.
    """
    with live_session(config, context, run_id) as session:
        workers = choose_workers(session.config, command.host)
        return session.provider.execute(
            session.attempt(session.ledger.attempts - 1).container,
            command.words,
            workers,
            seconds=command.seconds,
            on_line=_masked(session, on_line),
        )


@contextlib.contextmanager
def live_session(config: Config, context: Context, run_id: str | None) -> Iterator[Session]:
    """The session of a run whose last attempt has not ended, as far as is known here. Raises BadInput for any other."""
    ledger = ledgers.find(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)
    if ledger.attempts == 0:
        raise BadInput(f"run {ledger.run_id} was never started: it has no containers")
    if ledger.outcome is not None:
        raise BadInput(
            f"run {ledger.run_id} is not running: its last attempt ended with {ledger.outcome!r}; "
            "`tpu-launch run` resumes it"
        )
    session = open_session(config, context, ledger, SecretSource(context.environment, {}))
    with contextlib.closing(session.provider):
        yield session


def choose_workers(config: Config, host: int | None) -> Sequence[int]:
    """The hosts that are meant. Raises BadInput for one that the slice does not have."""
    hosts = range(config.accelerator.hosts)
    if host is None:
        return hosts
    if host not in hosts:
        raise BadInput(f"--host {host}: a {config.slice.accelerator_type} has hosts 0 to {len(hosts) - 1}")
    return [host]


def exit_code(reports: Sequence[CommandReport]) -> int:
    """One exit code for all hosts: 0 when the command succeeded everywhere, else the code of the host that failed
    first; Exit.CLOUD_ERROR when that one gave none."""
    failed = [report for report in reports if report.exit_code != 0]
    if not failed:
        return Exit.OK
    first = min(failed, key=lambda report: report.ended)
    return Exit.CLOUD_ERROR if first.exit_code is None else first.exit_code


def _masked(session: Session, on_line: Callable[[str], None]) -> Callable[[int, str], None]:
    """Emits a line of a host, without values of secrets; says once which secrets can't be masked."""
    attempt = session.attempt(session.ledger.attempts - 1)
    if attempt.unknown_secrets:
        session.say(f": not masked, as their values are not known here: {', '.join(attempt.unknown_secrets)}")
    masker, lock = Masker(attempt.secrets), session.machine.threads.lock()

    def emit(worker: int, text: str) -> None:
        shown = masker.mask(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")
        with lock:  # hosts write at once
            session.output.emit(worker, LogLine("", shown))
            on_line(shown)

    return emit
