"""Claims about the layout of the state over eight devices, in a process of its own: SPMD is chosen once."""

import pytest

from tests.container import small_runs
from tests.processes import run_python

SCRIPT = """
import os, sys
from training.distributed.cluster import discover, torch_xla_environment
os.environ.update(torch_xla_environment(discover(), os.environ))
import numpy as np
import torch_xla
from training.backends.torch.step import rows_of
from training.backends.torch_xla.sharding import DataParallel
from training.errors import TrainError

layout = DataParallel(discover())
kept, replaced = (layout.send_replicated(np.ones((8, 4), np.float32)) for _ in range(2))
[rows] = layout.send([rows_of(np.ones((8, 4), np.float32))])
layout.declare_state({"kept": kept, "replaced": replaced})
torch_xla.sync()
kept.mul_(2)  # as an optimizer should
replaced = replaced * 2  # a tensor without a declared sharding
tensors = {"kept": kept, "replaced": replaced, "rows": rows}
try:
    layout.require_declared({name: tensors[name] for name in sys.argv[1:]})
except TrainError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("names", "refused"),
    [(["kept"], None), (["kept", "replaced"], "replaced"), (["rows", "kept"], "rows")],
    ids=["changed in place", "another tensor", "split over the devices"],
)
def test_a_state_that_the_compiler_may_split_is_refused(names: list[str], refused: str | None) -> None:
    environment = small_runs.cluster_environment("layout", 0, 0, 1, small_runs.free_ports())
    printed = run_python("-c", SCRIPT, *names, **environment)
    if refused is None:
        assert printed == ""
    else:
        assert f"1 of {len(names)} tensors of the state are not placed as declared" in printed
        assert f"for example {refused}" in printed
