"""`tpu-train train` with `backend: torch-tpu` on a virtual v4-8: four processes, each with its rows of the batch.

The losses are those of torch-xla's golden file, and what holds on other backends holds: the same bits after a stop and
after a kill.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.container import causal_data, small_runs
from tests.container.golden_losses import DOCUMENTS, GOLDEN, STEPS
from tests.nightly import others_at_night
from tests.processes import run_python
from training.accelerators import accelerator

SPLIT_STEPS: dict[str, dict[str, Any]] = {
    "remat": {"train__remat": "layers"},
    "pieces": {"train__gradient_accumulation": 2},
    "frozen": {"train__freeze": ["*layers.0*", "*embed_tokens*"]},
    "adapters": {"lora": {"rank": 4}},
}
SECONDS = 1000.0  # a busy machine compiles for minutes
PRECISION = 1e-5  # relative: four processes add gradients up in another order than one


train = partial(small_runs.trained, seconds=SECONDS)


def pid_of_rank(parent: int, rank: int) -> int:
    """The process of a rank, a child of `parent`."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (pid,) = (pid for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())
    return int(pid)


@pytest.mark.parametrize(
    ("task", "slice_", "fsdp"),
    [("mlm", "v4-8", 1), ("mlm", "v4-8", 2), *((task, "v6e-1", 1) for task in DOCUMENTS if task != "mlm")],
)
def test_losses_are_those_of_torch_xla(task: str, slice_: str, fsdp: int, tmp_path: Path) -> None:
    """Trains in four processes, with the whole state in each or halves of it, and in one."""
    config = {**DOCUMENTS[task](tmp_path, "torch-tpu")}
    config["train"] = {**config["train"], "precision": "fp32", "mesh": {"fsdp": fsdp}}
    summary = train(tmp_path, "golden", config, TPU_ACCELERATOR_TYPE=slice_)
    golden = json.loads(GOLDEN.read_text())["torch-xla"][task]
    losses = small_runs.losses(tmp_path, "golden")
    assert (summary["devices"], summary["hosts"], len(losses)) == (accelerator(slice_).chips, 1, STEPS)
    assert losses == pytest.approx(golden["losses"], rel=PRECISION)
    assert summary["eval_loss"] == pytest.approx(golden["evaluation"], rel=PRECISION)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of documents, and in `start` a tiny Llama to begin with."""
    folder = causal_data.prepare(tmp_path_factory.mktemp("decoder"))
    llama = {**causal_data.LLAMA, "vocab_size": small_runs.VOCABULARY}
    save = f"from transformers import LlamaConfig as C, LlamaForCausalLM as M; M(C(**{llama})).save_pretrained('start')"
    run_python("-c", save, folder=folder, seconds=SECONDS, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return folder


@pytest.mark.parametrize("step", others_at_night(SPLIT_STEPS, ("pieces",)))
def test_a_split_state_has_the_losses_of_a_replicated_one(decoder: Path, step: str) -> None:
    losses = []
    for fsdp in (1, 2):
        run_id = f"{step}-{fsdp}"
        own = {"backend": "torch-tpu", "train__precision": "fp32", "train__mesh": {"fsdp": fsdp}}
        config = causal_data.document(decoder, **own, **SPLIT_STEPS[step])
        if step == "adapters":
            config["model"] = {"path": str(decoder / "start")}
        train(decoder, run_id, config)
        losses.append(small_runs.losses(decoder, run_id))
    assert losses[1] == pytest.approx(losses[0], rel=PRECISION)


def test_stopped_killed_and_resumed_it_ends_with_the_same_bits_and_exports_a_model(tmp_path: Path) -> None:
    """In bf16, the precision that a TPU has without a setting."""
    config = small_runs.document(small_runs.prepare(tmp_path), backend="torch-tpu", checkpoint__every_steps=2)
    straight = train(tmp_path, "straight", config)
    assert straight["precision"] == "bf16"
    (host,) = small_runs.start(tmp_path, "disturbed", config)
    host.wait_for("step  3/12", SECONDS)
    host.process.send_signal(signal.SIGTERM)
    assert host.finish(SECONDS) == 75, host.text()
    (host,) = small_runs.start(tmp_path, "disturbed", config, attempt=1)
    host.wait_for("step  8/12", SECONDS)
    os.kill(pid_of_rank(host.process.pid, 2), signal.SIGKILL)
    assert host.finish(SECONDS) == 137, host.text()
    assert "rank 2 was killed by SIGKILL (exit code 137)" in host.text()
    resumed = train(tmp_path, "disturbed", config, attempt=2)
    assert "going on from" in (tmp_path / "logs" / "disturbed.2.0.log").read_text()
    small_runs.require_same_bits(resumed, straight)
    load = f"from transformers import BertForMaskedLM as M; M.from_pretrained({str(resumed['model'])!r})"
    run_python("-c", load, seconds=SECONDS)
