"""Files of runs: written into a test's folder as run.yaml, read, and given to commands; and runs that have begun."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.config import Config, load
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.session import begin_run
from launcher.run.specification import Specification
from launcher.workstation import Workstation
from tests.processes import run_module

SLICE = "project: p\nzone: us-central2-b\nslice: {name: demo, accelerator_type: v4-16}\n"


def load_text(folder: Path, text: str, overrides: Sequence[str] = (), command: Sequence[str] = ()) -> Config:
    """Returns the configuration of a run's file with this text."""
    (folder / "run.yaml").write_text(text)
    return load(folder / "run.yaml", overrides, command=command)


def new_run(
    home: Path, run_id: str, machine: Workstation, *, bucket: str = "", provider: str = "tpu-vm", **specification: Any
) -> Ledger:
    """Returns the ledger of a new run of a machine."""
    slice_ = {"name": "s", "accelerator_type": "v4-16"}
    configuration = {"project": "p", "zone": "us-central2-b", "slice": slice_, **specification.pop("configuration", {})}
    record = RunRecord(run_id, "p", "us-central2-b", "s", "hash", 0.0, provider, bucket=bucket, user="ann")
    spec = Specification(run="", provider="tpu-vm", file="f.yaml", configuration=configuration, **specification)
    return begin_run(home, machine, record, "a: 1", spec, None)


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `tpu-launch ARGUMENTS` in a folder."""
    return run_module("launcher.cli", folder, *arguments)
