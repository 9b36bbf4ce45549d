"""`notebook`: Jupyter in the live container of one host. It makes its own token, and ends with its connection."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.provider import CommandReport
from launcher.run.attempts.session import Session
from training.machine.threads import Future

_DAYS = 7 * 24 * 3600.0
_START_SECONDS = 120.0  # the first import of Jupyter on a busy host takes half a minute
_POLL_SECONDS = 0.1
_LAST_LINES = 5
_ABSENT = "tpu-launch: no jupyter here"
_ADDRESS = re.compile(r"https?://(?:localhost|127\.0\.0\.1):(\d+)/\S*[?&]token=(\w+)")
_SCRIPT = f"""\
for program in jupyter-lab jupyter-notebook; do
  if command -v $program >/dev/null; then exec $program --no-browser --allow-root --ip=127.0.0.1 --port="$1"; fi
done
echo '{_ABSENT}'
"""


@dataclass(frozen=True)
class Jupyter:
    """A server that runs in the container of a host, and ends when the session's provider is closed."""

    port: int
    """On the host's loopback address; another one than was asked for when that was taken."""

    token: str
    ended: Future[list[CommandReport]]


def check(config: Config) -> None:
    """Raises BadInput where lines of a command come only when it has ended."""
    if config.run.transport == "gcloud" or config.slice.iap:
        raise BadInput(
            "notebook: the address of Jupyter comes over our own ssh connections, and this slice is reached through "
            "gcloud alone: start it on a host with `tpu-launch ssh`, and reach it with `tpu-launch tunnel --port 8888`"
        )


def start(session: Session, host: int, port: int) -> Jupyter:
    """Starts Jupyter on a host, and returns when it says its address.

    Raises:
        BadInput: The image has no Jupyter.
        LaunchError: It has ended, or did not say its address in time.
    """
    check(session.config)
    clock, container = session.machine.clock, session.attempt(session.ledger.attempts - 1).container
    lines: list[str] = []
    ended = session.machine.threads.submit(
        lambda: session.provider.execute(
            container,
            ["sh", "-c", _SCRIPT, "sh", str(port)],
            [host],
            seconds=_DAYS,
            on_line=lambda _worker, line: lines.append(line),
        )
    )
    deadline = clock.monotonic() + _START_SECONDS
    while True:
        over = ended.done()
        for line in lines:
            if match := _ADDRESS.search(line):
                return Jupyter(int(match[1]), match[2], ended)
        if over:
            raise _explain_end(ended.result(), host, lines)
        if clock.monotonic() > deadline:
            raise LaunchError(f"Jupyter on host {host} has not said its address within {_START_SECONDS:.0f} s")
        clock.sleep(_POLL_SECONDS)


def _explain_end(reports: list[CommandReport], host: int, lines: list[str]) -> LaunchError:
    if _ABSENT in lines:
        return BadInput(
            "the image has no Jupyter. For this container alone: `tpu-launch exec --host "
            f"{host} -- python -m pip install notebook`, where its hosts reach a package index; for all: an image of "
            "your own (image.dockerfile) with `pip install notebook`"
        )
    (report,) = reports
    how = report.problem or f"exit code {report.exit_code}"
    shown = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
    return LaunchError(f"Jupyter on host {host} has ended: {how}; its last lines:{shown or ' none'}")
