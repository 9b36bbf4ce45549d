"""Trainers as forks of a process that has imported the framework: an attempt costs little more than its compilations.

What such a process does is what `tpu-train` does from its entry point on; runs on emulated slices start the command
itself.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_OURS = ("training.backends.torch_xla.backend", "training.trainer")
_CONTEXT.set_forkserver_preload(["google.cloud.storage", *_OURS, "transformers.models.bert.modeling_bert"])


class ForkedTrainer:
    """`tpu-train train CONFIG` in a fork, with what tests use of `subprocess.Popen`."""

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._process = _CONTEXT.Process(target=_train, args=(dict(environment), config, log), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

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


def _train(environment: Mapping[str, str], config: Path, log: Path) -> None:
    """Runs `tpu-train train CONFIG`, which began now, with its output in `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = ["tpu-train", "train", str(config)]
    from training.cli import main as cli

    cli._BEGAN = time.monotonic()
    cli.main()
