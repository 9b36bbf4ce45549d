"""Commands in a run's live containers: `exec`, `explain`, and Jupyter for `notebook`. They do not change the run."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.masking import SecretMasker
from launcher.provider import CommandReport, LogLine, Observation
from launcher.run import hang
from launcher.run.session import Context, Session, find_on_slice, open_session
from launcher.run.state import Phase
from training.machine import Future, format_time
from training.telemetry.progress_line import slowest

_JUPYTER_SECONDS = 7 * 24 * 3600.0
_JUPYTER_START_SECONDS = 120.0  # the first import of Jupyter on a busy host takes half a minute
_JUPYTER_POLL_SECONDS = 0.1
_LAST_LINES = 5
_NO_JUPYTER = "tpu-launch: no jupyter here"
_PIP = "apt-get update && apt-get install -y --no-install-recommends python3-pip"  # our images have no pip
_INSTALL = f"{_PIP} && pip --python=$(command -v python) install notebook"
_JUPYTER_URL = re.compile(r"https?://(?:localhost|127\.0\.0\.1):(\d{1,5})/\S{0,200}?[?&]token=(\w{1,200})")
_JUPYTER_SCRIPT = f"""\
for program in jupyter-lab jupyter-notebook; do
  if command -v $program >/dev/null; then exec $program --no-browser --allow-root --ip=127.0.0.1 --port="$1"; fi
done
echo '{_NO_JUPYTER}'
"""


def execute(
    config: Config, context: Context, run_id: str | None, command: Sequence[str], *, host: int | None, seconds: float
) -> list[CommandReport]:
    """Runs a command in the live containers of the run (None: the slice's newest), on one host or all (None), and ends
    it after `seconds`. Emits its lines, secrets masked, as they come (through gcloud at its end). Returns each host's
    exit code, or None and why its end was not seen. Raises BadInput if the run is not running or has no such host, and
    always on GKE; LaunchError if gcloud does not give the hosts' addresses."""
    with live_session(config, context, run_id) as session:
        workers = session.choose_workers(host)
        container = session.container(session.ledger.state.attempt)
        return session.provider.execute(container, command, workers, seconds=seconds, on_line=_masked(session))


@contextlib.contextmanager
def live_session(config: Config, context: Context, run_id: str | None) -> Iterator[Session]:
    """Yields the session of a run (None: the slice's newest) whose last attempt has not ended by its events, which are
    pulled first, and closes its provider at the end. Raises BadInput if there is none, or no attempt of it is open."""
    ledger = find_on_slice(config, context, run_id)
    state = ledger.state
    if state.phase is Phase.NEW:
        raise BadInput(f"run {ledger.run_id} was never started: it has no containers")
    if not state.phase.is_open:
        raise BadInput(
            f"run {ledger.run_id} is not running: its last attempt ended with {state.outcome!r}; "
            "`tpu-launch run` resumes it"
        )
    session = open_session(context, ledger)
    with contextlib.closing(session.provider):
        yield session


def explain_run(session: Session) -> tuple[str | None, str]:
    """Takes the stacks of all hosts of a live run twice (10 to 60 s) and writes them into the run's folder; masks
    secrets whose values this process knows: on GKE, none. Returns what the run waits for, in words (None if no stacks
    could be taken), and the folder's path. Raises OSError."""
    number, machine = session.ledger.state.attempt, session.machine

    def read(worker: int) -> Observation:
        return session.observe(worker, number, format_time(machine.clock.time()), progress=True)

    observations = machine.threads.map(read, session.workers, at_once=64)
    lines = {each.worker: line for each in observations if (line := slowest(each.progress))}
    masker = SecretMasker(session.secret_values())
    found, stacks = hang.explain_live(session, number, lines, 0.0, masker, native=False)
    folder = hang.write_files(session.ledger, number, found, stacks)
    return (found.paragraph if found else None), folder


def exit_code(reports: Sequence[CommandReport]) -> int:
    """Returns 0 if a command succeeded on all hosts, else the code of the host where it failed first by time;
    CLOUD_ERROR if that host's end was not seen."""
    failed = [report for report in reports if report.exit_code != 0]
    if not failed:
        return Exit.OK
    first = min(failed, key=lambda report: report.ended)
    return Exit.CLOUD_ERROR if first.exit_code is None else first.exit_code


def _masked(session: Session) -> Callable[[int, str], None]:
    """Returns a function, for any thread, that emits a host's line masked. Says now which secrets can't be masked."""
    if unknown := session.unknown_secrets():
        session.say(f": not masked, as their values are not known here: {', '.join(unknown)}")
    masker, lock = SecretMasker(session.secret_values()), session.machine.threads.lock()

    def emit(worker: int, text: str) -> None:
        shown = masker.mask_text(text)
        with lock:  # hosts write at once
            session.context.output.emit(worker, LogLine("", shown))

    return emit


@dataclass(frozen=True)
class Jupyter:
    """A Jupyter server in the container of a host. It ends when the session's provider is closed."""

    port: int  # on the host's loopback address; not the requested one if that was taken
    token: str
    ended: Future[list[CommandReport]]


def start_jupyter(session: Session, host: int, port: int) -> Jupyter:
    """Starts Jupyter in a host's container, at `port` of its loopback address or the next free one; returns when it has
    printed its address. A thread lets it run for a week at most. Raises BadInput on GKE, if the image has no
    Jupyter or the slice is reached through gcloud alone; LaunchError if Jupyter ended, or printed no address within two
    minutes."""
    if session.config.run.transport == "gcloud" or session.config.slice.iap:  # lines come when a command has ended
        raise BadInput(
            "notebook: the address of Jupyter comes over our own ssh connections, and this slice is reached through "
            "gcloud alone: start it on a host with `tpu-launch ssh`, and reach it with `tpu-launch tunnel --port 8888`"
        )
    clock, container = session.machine.clock, session.container(session.ledger.state.attempt)
    lines: list[str] = []
    ended = session.machine.threads.submit(
        lambda: session.provider.execute(
            container,
            ["sh", "-c", _JUPYTER_SCRIPT, "sh", str(port)],
            [host],
            seconds=_JUPYTER_SECONDS,
            on_line=lambda _worker, line: lines.append(line),
        )
    )
    deadline = clock.monotonic() + _JUPYTER_START_SECONDS
    while True:
        over = ended.done()
        for line in lines:
            if match := _JUPYTER_URL.search(line):
                return Jupyter(int(match[1]), match[2], ended)
        if over:
            raise _explain_end(ended.result(), host, lines)
        if clock.monotonic() > deadline:
            raise LaunchError(f"Jupyter on host {host} has not said its address within {_JUPYTER_START_SECONDS:.0f} s")
        clock.sleep(_JUPYTER_POLL_SECONDS)


def _explain_end(reports: list[CommandReport], host: int, lines: list[str]) -> LaunchError:
    """Returns the error for a Jupyter that ended before it printed its address: BadInput if the image has none."""
    if _NO_JUPYTER in lines:
        return BadInput(
            f"the image has no Jupyter. For this container: `tpu-launch exec --host {host} -- sh -c '{_INSTALL}'`, "
            "where its hosts reach package indexes; for all: an image of your own (image.dockerfile) with notebook"
        )
    (report,) = reports
    how = report.problem or f"exit code {report.exit_code}"
    shown = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
    return LaunchError(f"Jupyter on host {host} has ended: {how}; its last lines:{shown or ' none'}")
