"""The one place that starts local processes.

Commands are argument lists, never shell strings. Every call that waits has a time-out, whose message names the command.
Every command is logged at level DEBUG (`tpu-launch --verbose`), without its input and environment, which may hold
secrets.
"""

import contextlib
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import CommandMissing, CommandTimeout

_INSTALL_HINTS = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install)",
    "docker": "install a Docker engine and client (Debian: apt-get install docker.io)",
    "ssh": "install an OpenSSH client (Debian: apt-get install openssh-client)",
    "kubectl": "install kubectl (https://kubernetes.io/docs/tasks/tools/)",
}
_log = logging.getLogger(__name__)
_LOGGED_CHARACTERS = 500  # of a command: some are whole scripts
_TERMINATE_SECONDS = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    argv: tuple[str, ...]
    returncode: int  # negative when a signal ended it
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0


def find(program: str) -> str:
    """Returns the path of a program on PATH. Raises CommandMissing, which says how to install it."""
    path = shutil.which(program)
    if path is None:
        hint = _INSTALL_HINTS.get(Path(program).name, "install it, or put its folder on PATH")
        raise CommandMissing(f"{program} was not found on PATH: {hint}")
    return path


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Result:
    """Runs a command to its end, in a session of its own and without a terminal, with `input` (surrogates: bytes that
    are not UTF-8) or nothing on stdin; it inherits `pass_fds`, and gets the variables `env` beside those of this
    process. A non-zero exit code raises nothing. Raises CommandMissing without the program, CommandTimeout after
    `timeout` seconds; that and any other exception end the command's whole process group."""
    data = input.encode(errors="surrogateescape") if isinstance(input, str) else input
    stdin = subprocess.DEVNULL if data is None else subprocess.PIPE
    options = _prepare(argv, env, stdin=stdin, stderr=subprocess.PIPE, pass_fds=pass_fds)
    with _awaited(subprocess.Popen(list(argv), stdout=subprocess.PIPE, **options), argv[0]) as process:
        try:
            out, err = process.communicate(data, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CommandTimeout(f"no answer within {timeout:.0f} s from: {shlex.join(argv)}\n  try again") from None
    return Result(tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def stream(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    on_start: Callable[[Callable[[], None]], object] | None = None,
) -> Result:
    """Runs a command and passes each line of its stdout and stderr to `on_line`, without line end, as it comes.
    `on_start` is given a function that ends the command early and waits for its end; `stream` raises nothing then. The
    result's stdout has all lines. Raises as `run`, and what `on_line` raises, which ends the command."""
    lines, inbox, deadline = list[str](), queue.SimpleQueue[str | None](), time.monotonic() + timeout
    options = _prepare(argv, env, stderr=subprocess.STDOUT, errors="replace")
    with _awaited(subprocess.Popen(list(argv), stdout=subprocess.PIPE, **options), argv[0]) as process:

        def read() -> None:
            for line in process.stdout or ():
                inbox.put(line)
            inbox.put(None)

        def end() -> None:
            _kill_group(process)
            reader.join(1.0)  # a child in a session of its own may hold the output
            inbox.put(None)

        (reader := threading.Thread(target=read, daemon=True)).start()
        if on_start is not None:
            on_start(end)
        try:
            while (line := inbox.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                lines.append(line)
                on_line(line.rstrip("\n"))
                if time.monotonic() > deadline:
                    raise queue.Empty
            process.wait(max(0.0, deadline - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            raise CommandTimeout(f"not done within {timeout:.0f} s: {shlex.join(argv)}") from None
    return Result(tuple(argv), process.returncode, "".join(lines), "")


def attached(argv: Sequence[str]) -> int:
    """Runs a command on this terminal until it ends; returns its exit code, negative after a signal. Ctrl-C goes to the
    command alone. Call it in the main thread. Raises CommandMissing."""
    process = subprocess.Popen(list(argv), **_prepare(argv, None, stdin=None, start_new_session=False))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    except BaseException:  # SIGTERM
        process.terminate()
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[Any]:
    """Starts and returns a process that outlives this one, with the variables `env` beside those of this process.
    Appends its output, stderr too, to `log` (mode 0600). Raises CommandMissing."""
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as sink:
        return subprocess.Popen(list(argv), stdout=sink, **_prepare(argv, env, stderr=subprocess.STDOUT))


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Adds variables to the environment of this process and its commands inside the block; then restores it all."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _prepare(argv: Sequence[str], env: Mapping[str, str] | None, **options: Any) -> dict[str, Any]:
    """Logs a command, cut to 500 characters, and returns the options of Popen that start it with more variables. Unless
    `options` say otherwise, its input is empty, and it has a session of its own: this process handles Ctrl-C, and a
    time-out ends the children too. Raises CommandMissing."""
    find(argv[0])
    text = shlex.join(argv)
    _log.debug("$ %s", text if len(text) <= _LOGGED_CHARACTERS else f"{text[:_LOGGED_CHARACTERS]} ...")
    variables = {**os.environ, **env} if env else None
    return {"env": variables, "stdin": subprocess.DEVNULL, "start_new_session": True, **options}


@contextlib.contextmanager
def _awaited(process: subprocess.Popen[Any], program: str) -> Iterator[subprocess.Popen[Any]]:
    """Runs the block, which waits for the end of a command that was just started. An exception of the block ends the
    command and its children. Logs `program`, exit code and seconds."""
    begun = time.monotonic()
    try:
        yield process
    except BaseException:
        _kill_group(process)
        raise
    _log.debug("%s ended with %d after %.1f s", Path(program).name, process.returncode, time.monotonic() - begun)


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Ends a command and its children, and waits for the command: SIGTERM, so that it can clean up; 10 s later, or as
    soon as it has ended, SIGKILL to all that is left."""
    for number, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
