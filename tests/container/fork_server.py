"""Trainers as forks of a process that has imported the framework: an attempt costs little more than its compilations.

What such a process does is what `tpu-train` does from its entry point on; runs on emulated slices start the command
itself.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "google.cloud.storage",
        "training.backends.torch_xla.backend",
        "training.trainer",
        "transformers.models.bert.modeling_bert",
    ]
)


def fork(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Starts `function` in a fork."""
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def become_trainer(environment: Mapping[str, str], config: Path | str, log: Path | str) -> None:
    """Gives the fork that this is called in a trainer's environment, output and arguments."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = ["tpu-train", "train", str(config)]


def run_trainer() -> None:
    """`tpu-train`, which began now."""
    from training.cli import main as cli

    cli._BEGAN = time.monotonic()
    cli.main()


class ForkedTrainer:
    """`tpu-train train CONFIG` in a fork, with what tests use of `subprocess.Popen`."""

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str], home: Path | None) -> None:
        self._process = fork(_train, dict(environment), config, log, home)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended; a signal's is negative."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("tpu-train train", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def _train(environment: Mapping[str, str], config: Path, log: Path, home: Path | None) -> None:
    become_trainer(environment, config, log)
    if home is not None:
        os.chdir(home)
    run_trainer()
