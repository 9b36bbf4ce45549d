"""Files of runs: written into a test's folder as run.yaml, read, and given to commands."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from launcher.config import Config, load
from tests.processes import run_module

SLICE = "project: p\nzone: us-central2-b\nslice: {name: demo, accelerator_type: v4-16}\n"


def load_text(folder: Path, text: str, overrides: Sequence[str] = (), command: Sequence[str] = ()) -> Config:
    """Returns the configuration of a run's file with this text."""
    (folder / "run.yaml").write_text(text)
    return load(folder / "run.yaml", overrides, command=command)


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `tpu-launch ARGUMENTS` in a folder."""
    return run_module("launcher.cli", folder, *arguments)
