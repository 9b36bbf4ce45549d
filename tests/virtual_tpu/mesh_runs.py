"""Runs of one small model on meshes, in one process on the virtual TPU: for a test.

python -m tests.virtual_tpu.mesh_runs FOLDER RUN...      RUN: "run id:fsdp[:run to go on with[:key=value...]]"

The run "stopped" is asked to stop after five steps. A run to go on with is copied first. A folder of documents trains a
decoder.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.container import causal_data, small_runs
from training.errors import StopRequested


def document(folder: Path, fsdp: int, **changes: Any) -> dict[str, Any]:
    exact = {"train__precision": "fp32", "train__steps": 20, "train__strict": True, **changes}
    make = causal_data.document if (folder / "documents.txt").exists() else small_runs.document
    return make(folder, train__mesh={"fsdp": fsdp}, **exact)


def run(folder: Path, run_id: str, fsdp: str, before: str = "", *changes: str) -> None:
    if before:
        shutil.copytree(folder / "runs" / before, folder / "runs" / run_id)
    values = {name: yaml.safe_load(value) for name, _, value in (change.partition("=") for change in changes)}
    stopping = small_runs.StopAfter(5) if run_id == "stopped" else None
    try:
        small_runs.train_here(document(folder, int(fsdp), **values), run_id, stopping, attempt=int(bool(before)))
    except StopRequested as stop:
        print(stop)


if __name__ == "__main__":
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
    for text in sys.argv[2:]:
        run(Path(sys.argv[1]), *text.split(":"))
