"""Processes of tests: what Python of this checkout prints and ends with, and waiting for what a process does."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PIPES: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)  # arguments of `subprocess.Popen`


def run_module(module: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE` in a folder, for a minute at most, with no engine and no bucket of this process."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("DOCKER_HOST", "STORAGE_EMULATOR_HOST")}
    variables = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def run_python(*arguments: str, folder: Path | None = None, seconds: float = 600, **environment: str) -> str:
    """Runs `python ARGUMENTS`, which must succeed, and returns what it prints."""
    variables = {**os.environ, **environment}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def is_alive(pid: int) -> bool:
    """Returns whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_until(fact: Callable[[], object], seconds: float = 20, tell: Callable[[], object] = lambda: "") -> None:
    """Returns as soon as a fact holds. Fails where it does not in time, with what `tell` says then."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"not within {seconds} s: {tell()}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
