"""Several training steps in one call of the program (`train.steps_per_call`): the same losses, and nothing late."""

import json
from pathlib import Path

import pytest

from tests.container import small_runs
from tests.container.golden_losses import RELATIVE
from tests.processes import run_python

# A run on two logical devices of one CPU: its id and train.steps_per_call. Prints the steps of each call. (A second
# strategy in a process would get the collectives of the first.)
RUN = """
import json, sys
from pathlib import Path
from tests.container import small_runs
from training.backends.tensorflow.backend import TensorFlow

calls, run_steps = [], TensorFlow._run_steps

def recorded(self, batches, seeds, scalars, due):
    calls.append(due)
    return run_steps(self, batches, seeds, scalars, due)

TensorFlow._run_steps = recorded
small_runs.train_here(small_runs.document(
    Path(sys.argv[1]), backend="tensorflow", model__layers=1, train__steps=11, train__steps_per_call=int(sys.argv[3]),
    train__strict=True, train__dropout=0.0, checkpoint__every_steps=5, evaluation__every=6,
), sys.argv[2])
print(json.dumps(calls))
"""


def train(folder: Path, run_id: str, steps_per_call: int) -> list[int]:
    """The steps of each call of a run."""
    printed = run_python("-c", RUN, str(folder), run_id, str(steps_per_call), CPU_NUM_DEVICES="2")
    return json.loads(printed.splitlines()[-1])


def figures(folder: Path, run_id: str) -> tuple[list[float], dict[int, float]]:
    """The loss of every step, and of each evaluation by its step."""
    return small_runs.losses(folder, run_id), small_runs.figures(folder, run_id, "eval_loss")


@pytest.mark.nightly
def test_losses_do_not_depend_on_steps_per_call(tmp_path: Path) -> None:
    """Saves, an evaluation and the end each cut a call. Losses agree but for their last bits, like golden ones."""
    small_runs.prepare(tmp_path)
    assert train(tmp_path, "one", 1) == []
    assert train(tmp_path, "several", 4) == [1, 4, 1, 4, 1]
    losses, evaluations = figures(tmp_path, "one")
    assert len(losses) == 11
    assert set(evaluations) == {6, 11}
    several_losses, several_evaluations = figures(tmp_path, "several")
    assert several_losses == pytest.approx(losses, rel=RELATIVE)
    assert several_evaluations == pytest.approx(evaluations, rel=RELATIVE)
