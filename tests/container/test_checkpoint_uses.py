"""Uses of checkpoints: the best is kept and exported, and another run starts from one's model or from all of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.small_runs import StopAfter
from tests.container.test_train_one_host import run
from training.checkpoint import admin as inspect
from training.checkpoint.format import committed_steps
from training.errors import StopRequested

SMALL = {"model__hidden_size": 16}  # programs of its own: another module of this process counts compilations
# Too fast to converge: the loss of the evaluation goes up and down.
WILD = {
    **SMALL, "train__learning_rate": 0.3, "train__schedule": "constant", "train__steps": 16, "evaluation__every": 2,
    "checkpoint__every_steps": 4, "checkpoint__keep_last": 1,
}  # fmt: skip
BEST = {**WILD, "checkpoint__best": {"metric": "loss", "mode": "min"}}


def evaluations(folder: Path, run_id: str) -> dict[int, float]:
    return small_runs.figures(folder, run_id, "eval_loss")


def test_the_best_of_all_evaluations_is_kept_through_stops_and_is_exported(folder: Path) -> None:
    undisturbed = run(folder, "best", **BEST)
    figures = evaluations(folder, "best")
    assert sorted(figures) == list(range(2, 17, 2))
    best = min(figures, key=lambda step: figures[step])
    assert undisturbed["best"] == {"step": best, "metric": "loss", "mode": "min", "value": figures[best]}
    assert committed_steps(str(folder / "runs" / "best" / "checkpoints")) == sorted({best, 16}, reverse=True)

    with pytest.raises(StopRequested):
        run(folder, "best-stopped", StopAfter(5), **BEST)  # in an evaluation: each has three batches
    run(folder, "best-stopped", attempt=1, **BEST)
    assert evaluations(folder, "best-stopped") == figures
    assert inspect.best_saved_step(str(folder / "runs" / "best-stopped")) == best

    out = folder / "exported"
    assert f"the model after step {best}" in small_runs.command("export", "--best", folder / "runs" / "best", out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "bert"


def early_end(figures: dict[int, float]) -> tuple[int, int]:
    """The step of the first evaluation that is not better than the one before it, and the step of that one."""
    return next((step, step - 2) for step in range(4, 17, 2) if figures[step] >= figures[step - 2])


def test_early_stopping_ends_with_the_best_model_through_stops_and_on_all_hosts(folder: Path) -> None:
    figures = evaluations(folder, "best")
    end, best = early_end(figures)
    early = {**WILD, "train__early_stopping": {"metric": "loss", "patience": 1}}
    undisturbed = run(folder, "early", **early)
    assert (undisturbed["steps"], undisturbed["best"]["step"]) == (end, best)
    assert evaluations(folder, "early") == {step: figures[step] for step in range(2, end + 1, 2)}
    model = (Path(undisturbed["model"]) / "model.safetensors").read_bytes()
    document = small_runs.document(folder, **early)
    assert small_runs.evaluate_here(document, undisturbed["model"]).figures["loss"] == figures[best]

    for attempt in range(4):  # at other places of the loop each time
        with pytest.raises(StopRequested):
            run(folder, "early-stopped", StopAfter(2 + attempt), attempt=attempt, **early)
    continued, again = (run(folder, "early-stopped", attempt=attempt, **early) for attempt in (4, 5))
    for key in ("steps", "best", "final_weights_crc32c"):
        assert continued[key] == again[key] == undisturbed[key]
    assert (Path(again["model"]) / "model.safetensors").read_bytes() == model

    hosts = small_runs.start(folder, "early-hosts", document, hosts=2)
    small_runs.end(hosts, 0, 0)
    told = small_runs.summary(folder, "early-hosts")
    assert (told["steps"], told["best"]["step"]) == early_end(evaluations(folder, "early-hosts"))
    assert f"training ends early, after step {told['steps']}: 1 evaluations in a row" in hosts[0].text()


def started_from(folder: Path, run_id: str, path: str, steps: int = 2) -> dict[str, Any]:
    return run(folder, run_id, model={"path": path}, train__dropout=0.0, train__steps=steps)


def test_a_run_starts_with_the_model_of_another_run_or_of_one_checkpoint_of_it(folder: Path) -> None:
    source = run(folder, "source", train__dropout=0.0, **SMALL)
    newest = started_from(folder, "from-newest", str(folder / "runs" / "source"))
    exported = started_from(folder, "from-export", str(folder / "runs" / "source" / "model"))
    assert newest["final_weights_crc32c"] == exported["final_weights_crc32c"], "an export is of the newest checkpoint"
    assert newest["first_loss"] < source["first_loss"] - 0.2
    earlier = started_from(folder, "from-step", step := str(folder / "runs/source/checkpoints/step-00000004"))
    assert newest["first_loss"] < earlier["first_loss"] < source["first_loss"]
    (folder / "runs" / "source").rename(folder / "gone")
    assert started_from(folder, "from-step", step, 3)["steps"] == 3, "the run has kept its start"
