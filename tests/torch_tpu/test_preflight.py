"""`tpu-train preflight` with TorchTPU: the trainer's own programs, compiled by libtpu for slices that are not there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container import small_runs
from training.accelerators import accelerator
from training.backends.torch_tpu import tracing
from training.config import Model
from training.errors import TrainError
from training.models.hugging_face import ModelRequirements
from training.models.torch.network import build

SECONDS = 1000.0  # a busy machine compiles for minutes
pytestmark = pytest.mark.timeout(SECONDS + 60)


def preflight(folder: Path, slice_: str, **changes: Any) -> tuple[int, dict[str, Any], str]:
    """Returns (exit code, the slice's result or nothing, standard error)."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_runs.document(folder, backend="torch-tpu", **changes)))
    command = [sys.executable, "-m", "training.cli", "preflight", str(path), "--json", "--accelerator", slice_]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "PJRT_"))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    [result] = json.loads(ended.stdout)["accelerators"] if ended.stdout else [{}]
    return ended.returncode, result, ended.stderr


@pytest.mark.parametrize(("slice_", "chips"), [("v5litepod-8", 8), ("v4-8", 4)])
def test_both_programs_of_a_run_are_compiled_for_a_slice(slice_: str, chips: int, tmp_path: Path) -> None:
    code, result, _ = preflight(small_runs.prepare(tmp_path), slice_)
    assert (code, result["devices"], result["distinct_graphs"]) == (0, chips, 2)
    training, evaluation = result["graphs"]
    assert [graph["graph"] for graph in (training, evaluation)] == ["training, 8 x 32", "evaluation, 8 x 32"]
    requirements = ModelRequirements(small_runs.VOCABULARY, 3, small_runs.SEQUENCE)
    network = build(Model(**small_runs.document(Path())["model"]), requirements, dropout=0.1, seed=1)
    parameters = sum(value.numel() for value in network.parameters())
    assert training["memory"]["donated"] >= 3 * 4 * parameters, "weights and moments stay where they are"
    assert training["memory"]["resident"] == evaluation["memory"]["code"]
    [sums] = training["collectives"]
    assert sums["kind"] == "all-reduce"
    assert parameters <= sums["elements"] < parameters + 1000, "every gradient is added up once"
    assert sum(item["elements"] for item in evaluation["collectives"]) < 1000
    assert training["costs"]["cycles"] > 0
    assert training["costs"]["flops"] > 0


def test_a_model_whose_process_dies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_end_with_parent", os.abort)
    with pytest.raises(TrainError, match="the process that builds the model ended early"):
        tracing.TorchTpuTracer(print, accelerator("v5litepod-8")).open()


def test_the_step_of_a_split_state_is_refused_with_its_reason(tmp_path: Path) -> None:
    code, result, text = preflight(small_runs.prepare(tmp_path), "v4-8", train__mesh={"fsdp": 2})
    assert (code, result) == (2, {})
    assert "preflight can't compile TorchTPU's step with train.mesh.fsdp" in text


def test_a_tracer_ends_with_its_killed_parent() -> None:
    program = """if __name__ == "__main__":
    import multiprocessing, os, time
    from concurrent.futures import ProcessPoolExecutor
    from training.backends.torch_tpu.tracing import _end_with_parent
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        tracer = Path("/proc", parent.stdout.readline().strip())
        parent.kill()
    while (tracer / "stat").exists() and (tracer / "stat").read_text().split()[2] != "Z":
        time.sleep(0.1)
