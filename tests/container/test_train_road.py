"""The road from the command to the optimizer is short: a reader opens few files."""

import json
from pathlib import Path

import yaml

from tests.container import small_runs
from tests.processes import run_python

MOST_FRAMES, MOST_FILES = 8, 7

PROGRAM = """
import json, sys, traceback
from training.cli.main import tpu_train
from training.optim.adamw_torch import AdamWTorch

update = AdamWTorch.update

def show_road(*arguments):
    frames = [(frame.filename, frame.name) for frame in traceback.extract_stack()[:-1]]
    print("road", json.dumps([*frames, (sys.modules[AdamWTorch.__module__].__file__, "update")]), flush=True)
    AdamWTorch.update = update
    return update(*arguments)

AdamWTorch.update = show_road
tpu_train(sys.argv[1:])
"""


def test_from_the_train_command_to_the_optimizer_are_eight_frames_in_seven_files(tmp_path: Path) -> None:
    """The frames of a real call, printed with `pytest -s`."""
    small_runs.prepare(tmp_path)
    short = {"train__steps": 1, "train__warmup_steps": 0, "evaluation__at_end": False, "export__at_end": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_runs.document(tmp_path, **short)))
    printed = run_python("-c", PROGRAM, "train", "run.yaml", "--run-id", "road", folder=tmp_path)
    [road] = [line for line in printed.splitlines() if line.startswith("road ")]
    frames = json.loads(road.removeprefix("road "))
    ours = [(file.partition("/training/")[2], name) for file, name in frames if "/training/" in file]
    ours = ours[ours.index(("cli/train.py", "train")) :]
    print("\n".join(f"{file}: {name}" for file, name in ours))
    assert ours[-1] == ("optim/adamw_torch.py", "update")
    assert len(ours) <= MOST_FRAMES, ours
    assert len({file for file, _ in ours}) <= MOST_FILES, ours
