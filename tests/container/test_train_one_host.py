"""Training on one host, inside this process: the results of a run, and that stopping and resuming changes no bit."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.container import small_runs
from tests.processes import run_python
from training.backends.torch_xla import backend
from training.backends.torch_xla.processor import describe_slow_products
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, Exit, StopRequested
from training.evaluate import Evaluated
from training.models.export import export_checkpoint
from training.models.predict import fill_mask
from training.telemetry import metrics


def run(
    folder: Path, run_id: str, stopping: ShutdownRequest | None = None, attempt: int = 0, **changes: Any
) -> dict[str, Any]:
    return small_runs.train_here(small_runs.document(folder, **changes), run_id, stopping, attempt)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return run(folder, "undisturbed", evaluation__every=5)


def test_a_run_learns_evaluates_and_runs_nothing_of_a_step_on_the_host(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["last_loss"] < undisturbed["first_loss"] - 0.5
    assert undisturbed["eval_perplexity"] < 120
    assert undisturbed["steps"] == undisturbed["committed_step"] == 12
    assert undisturbed["host_fallbacks"] == []
    assert undisturbed["device_to_host_syncs"] == 0 < undisturbed["device_to_host_transfers"]
    assert undisturbed["skipped_records"] == 0


def test_a_step_and_an_evaluation_are_one_program_each(folder: Path) -> None:
    own = {"train__global_batch_size": 11}  # no other test in this process has compiled for such a batch
    assert run(folder, "programs", evaluation__every=5, **own)["compilations"] == 2
    # The process has them already.
    assert run(folder, "programs-again", evaluation__every=3, **own)["compilations"] == 0


def test_another_seed_gives_other_weights(undisturbed: dict[str, Any], folder: Path) -> None:
    assert run(folder, "other-seed", seed=2)["final_weights_crc32c"] != undisturbed["final_weights_crc32c"]


def test_a_run_on_a_slow_processor_says_so(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, "own-products", train__steps=2)
    is_fast = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert ("tpu-train: this processor has " in capsys.readouterr().err) is not is_fast
    (folder / "cpuinfo").write_text("flags : avx avx2 fma")
    monkeypatch.setattr(backend, "describe_slow_products", partial(describe_slow_products, folder / "cpuinfo"))
    run(folder, "slow-products", train__steps=2)
    assert "tpu-train: this processor has AVX2 and no AVX-512: " in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_resumed_run_gives_the_same_bits(undisturbed: dict[str, Any], folder: Path, steps: int) -> None:
    name = f"stopped-{steps}"
    with pytest.raises(StopRequested, match="committed"):
        run(folder, name, small_runs.StopAfter(steps), evaluation__every=5)
    small_runs.require_same_bits(run(folder, name, attempt=1, evaluation__every=5), undisturbed)
    assert small_runs.losses(folder, name) != []


def test_another_models_checkpoint_is_refused_with_the_difference(undisturbed: dict[str, Any], folder: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.layers: the checkpoint has 2, this run 3"):
        run(folder, "undisturbed", attempt=1, model__layers=3)


def test_a_run_that_is_finished_only_evaluates_again(undisturbed: dict[str, Any], folder: Path) -> None:
    again = run(folder, "undisturbed", attempt=2)
    for key in ("final_weights_crc32c", "eval_loss"):
        assert again[key] == undisturbed[key]


@pytest.mark.nightly
@pytest.mark.parametrize("change", [{"gradient_accumulation": 4}, {"remat": "attention"}, {"remat": "layers"}])
def test_pieces_and_recomputation_only_round(undisturbed: dict[str, Any], folder: Path, change: dict[str, Any]) -> None:
    """Dropout included: what is dropped depends on the row of the global batch, and is dropped again backwards."""
    changes = {f"train__{key}": value for key, value in change.items()}
    changed = run(folder, "-".join(map(str, change.values())), **changes)
    assert changed["last_loss"] == pytest.approx(undisturbed["last_loss"], rel=1e-5)
    assert changed["eval_loss"] == pytest.approx(undisturbed["eval_loss"], rel=1e-5)


def test_the_result_is_a_model_that_fill_mask_loads(undisturbed: dict[str, Any], folder: Path) -> None:
    model = Path(undisturbed["model"])
    exported = folder / "exported"
    assert export_checkpoint(str(folder / "runs" / "undisturbed"), str(exported)) == 12
    assert (exported / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    answers = fill_mask(str(model), "w1 w8 [MASK] w2 w9", 3)
    assert len(answers) == 3
    assert answers[0].score >= answers[1].score > 0
    assert len(fill_mask(str(model), "w1 [MASK]", 1000)) == small_runs.VOCABULARY, "there are no more"
    for text, message in (("no mask", "exactly once"), ("[MASK]" + 600 * " w1", "60[1-3] tokens, and the model has")):
        with pytest.raises(BadInput, match=message):
            fill_mask(str(model), text, 3)


def evaluated(folder: Path, place: str, step: int | None = None, **changes: Any) -> Evaluated:
    return small_runs.evaluate_here(small_runs.document(folder, **changes), place, step)


def test_checkpoint_and_model_folder_have_the_figures_of_the_run(undisturbed: dict[str, Any], folder: Path) -> None:
    history = metrics.read_history(str(folder / "runs" / "undisturbed"))
    told = {line["step"]: line for line in history if "eval_loss" in line}
    for place in (str(folder / "runs" / "undisturbed"), undisturbed["model"]):
        found = evaluated(folder, place)
        assert found.examples == 19
        assert {f"eval_{name}": value for name, value in found.figures.items()} | {"step": 12} == told[12]
    # Other batches: other sums of the same addends.
    by_nine = evaluated(folder, undisturbed["model"], evaluation__batch_size=9)
    assert by_nine.figures["loss"] == pytest.approx(told[12]["eval_loss"], rel=1e-6)
    assert by_nine.figures["accuracy"] == pytest.approx(told[12]["eval_accuracy"], rel=1e-6)
    earlier = evaluated(folder, str(folder / "runs" / "undisturbed"), 8)
    assert (earlier.step, earlier.figures["loss"] > told[12]["eval_loss"]) == (8, True)


def test_what_can_not_be_evaluated_is_refused(undisturbed: dict[str, Any], folder: Path) -> None:
    run_folder = str(folder / "runs" / "undisturbed")
    with pytest.raises(BadInput, match="no committed step 7; it has 12, 8, 4"):
        evaluated(folder, run_folder, 7)
    with pytest.raises(BadInput, match="neither a model folder"):
        evaluated(folder, str(folder / "train"))
    with pytest.raises(BadInput, match=r"set data\.evaluation"):
        evaluated(folder, run_folder, data__evaluation=None)
    other = folder / "other-tokenizer"
    shutil.copytree(undisturbed["model"], other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w194", "v194"))
    with pytest.raises(BadInput, match="the tokenizer of the model"):
        evaluated(folder, str(other))


def test_evaluate_is_a_command(undisturbed: dict[str, Any], folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(small_runs.document(folder)))
    options = [undisturbed["model"], "--config", str(folder / "run.yaml"), "--json"]
    told = json.loads(run_python("-m", "training.cli", "evaluate", *options))
    assert (told["loss"], told["examples"]) == (undisturbed["eval_loss"], 19)


def test_a_batch_in_pieces_has_the_losses_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a CPU host with few rows trains with wrong gradients, as XLA does with XNNPACK."""
    monkeypatch.setattr(small_runs, "VOCABULARY", 2000)
    monkeypatch.setattr(small_runs, "SEQUENCE", 64)
    folder = small_runs.prepare(tmp_path)
    shape = {"train__steps": 4, "train__global_batch_size": 16, "checkpoint__every_steps": None}
    config = {**small_runs.document(folder, **shape), "model": {"name": "bert-tiny"}}
    norms = []
    for pieces in (1, 4):
        config["train"]["gradient_accumulation"] = pieces
        small_runs.trained(folder, f"in-{pieces}", config, seconds=300)
        lines = metrics.read_history(str(folder / "runs" / f"in-{pieces}"))
        norms.append([line["gradient_norm"] for line in lines if "gradient_norm" in line])
    assert len(norms[0]) == 4
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_out_of_memory_is_told_with_what_to_do(folder: Path) -> None:
    """The step asks for some 200 GB in one piece."""
    sizes = {"train__global_batch_size": 8192, "data__masking": {"predictions": 16}, "model__vocabulary_size": 800_000}
    config = small_runs.document(folder, **sizes, train__steps=2, evaluation__batch_size=8)
    (host,) = small_runs.start(folder, "memory", config, prefix=["prlimit", f"--as={64 << 30}"])
    small_runs.end([host], Exit.FAILED, seconds=240)
    assert "out of memory: lower train.global_batch_size" in host.text()
    assert "Traceback" not in host.text()
