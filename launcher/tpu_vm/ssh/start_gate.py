"""Starting on all hosts with one `gcloud ... ssh --worker=all` whose own start-up (seconds, for many hosts) goes on
while the hosts are prepared.

The command that gcloud carries to a host waits there, for seconds at most, for the word *go*, which comes over an open
connection once every host has been checked and prepared and all have the same image. Without it nothing is started: a
command that is late, or that gcloud runs again, finds no word, or a container that has started. A host that did not get
the word in time says so (`waiting`), and the start is made again without waiting.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from launcher import shell
from launcher.errors import LaunchError

GATE_SECONDS = 30  # a first pull of an image takes longer; then gcloud is called once more


class Starting:
    """A gcloud call under way in the background."""

    def __init__(self, argv: Sequence[str], *, timeout: float) -> None:
        self._end: Callable[[], None] | None = None
        self._over = False
        pool = ThreadPoolExecutor(1)
        self._result: Future[shell.Result] = pool.submit(shell.run, argv, timeout=timeout, on_start=self._started)
        pool.shutdown(wait=False)

    def output(self) -> str:
        """What the hosts said; empty when gcloud failed before."""
        try:
            return self._result.result().stdout
        except LaunchError:
            return ""

    def refusal(self) -> str | None:
        """gcloud's words, when it has given up already: the slice is gone, or nobody lets it in."""
        if self._over or not self._result.done() or self._result.exception() is not None:
            return None
        result = self._result.result()
        return None if result.ok or "tpu-launch " in result.stdout else result.stderr

    def abandon(self) -> None:
        """Ends the call; the hosts' commands end by themselves, as the word never comes."""
        self._over = True
        if self._end is not None and not self._result.done():
            self._end()

    def _started(self, end: Callable[[], None]) -> None:
        self._end = end
        if self._over:
            end()


def gate_lines(container: str, status: str) -> list[str]:
    """Shell: a container that `status` shows as not started yet waits for the word.

    A pipe wakes it at once. It is open before the word is looked for, and both ends open it for reading and writing:
    nobody waits for the other to come.
    """
    go, gate = _marks(container)
    return [
        f"case $({status}) in ''|created)",
        f"  mkfifo {gate} 2>/dev/null",
        f"  exec 3<>{gate}",
        f"  [ -e {go} ] || timeout {GATE_SECONDS} head -c 1 <&3 >/dev/null 2>&1",
        "  exec 3>&-",
        f"  if [ ! -e {go} ]; then rm -f {gate}; say waiting; exit 0; fi ;;",
        "esac",
        f"left() {{ rm -f {go} {gate}; }}; trap left EXIT",
    ]


def go_script(prelude: str, container: str) -> str:
    """Gives the word on a host. Reports `go`."""
    go, gate = _marks(container)
    return f"{prelude}: > {go} && {{ [ ! -p {gate} ] || echo go 1<>{gate}; say go; }}\n"


def _marks(container: str) -> tuple[str, str]:
    """Files of a host (`$worker` is the shell's): the word was given, and the pipe at which the start waits for it."""
    name = shlex.quote(f"/tmp/{container}.")
    return f'{name}"$worker.go"', f'{name}"$worker.gate"'
