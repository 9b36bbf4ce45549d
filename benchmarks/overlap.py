"""Measures how long the devices wait for the host between steps, in training and in evaluation.

    make benchmark NAME=overlap [ARGS="--json --ms 10 --devices 8"]

A run of `tpu-train train` on a virtual TPU whose executions occupy the device for 10, 30 or 100 ms, as on chips: the
call that starts one returns at once. Its log says when each execution was called, began and ended. A figure is the time
of the loop, from the beginning of the first execution to the end of the last, over the time in which the device was
busy. Counted are batches 65 to 264: of the first ones some are traced, for which the device waits (1 to 4, 8 and 64).

  ours          the next step is started while the device computes the one before
  peer          the same, but that the host waits for the device before it starts a step, as the trainer did before

The virtual device computes on the cores that the host's threads need, and other processes take these too: the best of
`--repeat` runs is kept for both.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from benchmarks.start import SLICES, prepare, tpu_train, use_virtual_tpu

RUNS_IN = "torch-xla"
VIRTUAL_TPU = True
MILLISECONDS = (10, 30, 100)  # of a step on the device
FIRST, LAST = 64, 264  # batches that count: [FIRST, LAST)
GOAL = 1.02
# Before a step is started, waits for the device instead of the starts of the programs before it.
WITHOUT_OVERLAP = """
import sys
import torch_xla.core.xla_model as xm
from training.backends.torch_xla import internals
from training.cli.main import main
internals.wait_for_starts = lambda tensors: xm.wait_device_ops()
main()
"""


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--ms", type=int, action="append", help="time of a step on the device; 10, 30, 100 unless given"
    )
    parser.add_argument("--devices", type=int, default=1, choices=SLICES, help="of the virtual TPU (1)")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = small_run(folder)
        for milliseconds in options.ms or MILLISECONDS:
            best = {True: (9e9, 9e9), False: (9e9, 9e9)}
            for number in range(options.repeat):
                for overlaps in best:
                    run_id = f"{'ours' if overlaps else 'peer'}-{milliseconds}-{number}"
                    ratios = measure(folder, config, run_id, options.devices, milliseconds, overlaps=overlaps)
                    best[overlaps] = tuple(map(min, best[overlaps], ratios))
            for what, ours, peer in zip(("training", "evaluation"), best[True], best[False], strict=True):
                goal = f"ours at most {GOAL:g}"
                rows.append(row(f"{what}, {milliseconds} ms", "loop / device", ours, "without overlap", peer, goal))
    finish("overlap", rows, options.json)


def small_run(folder: Path) -> dict[str, Any]:
    """Writes data, and returns the configuration of a run that the virtual device computes in a few milliseconds."""
    config = prepare(folder, layers=2)
    config["model"] |= {"hidden_size": 32, "intermediate_size": 32}
    train = Path(config["data"]["train"])
    config["data"]["evaluation"] = str(shutil.copytree(train, train.with_name("evaluation")))
    config["train"] |= {"steps": LAST, "global_batch_size": 2}
    config["checkpoint"] = {"every_steps": LAST}
    return config


def measure(
    folder: Path, config: dict[str, Any], run_id: str, devices: int, milliseconds: int, *, overlaps: bool
) -> tuple[float, float]:
    """Returns the loop's time over the device's, in training and in evaluation, of one run."""
    path, log = folder / "run.yaml", folder / f"{run_id}.log"
    path.write_text(yaml.safe_dump(config))
    tpu_train(
        "train", str(path), "--run-id", run_id, program=("-m", "training.cli") if overlaps else ("-c", WITHOUT_OVERLAP),
        **use_virtual_tpu(devices), VIRTUAL_TPU_STEP_MS=str(milliseconds), VIRTUAL_TPU_LOG=str(log),
        TPU_LAUNCH_COMPILE_CACHE=str(folder / "programs"),
    )  # fmt: skip
    executions = [tuple(map(int, line.split()[1:])) for line in log.read_text().splitlines()]  # begin and end, ns
    ratios = loop_share(executions[FIRST:LAST]), loop_share(executions[LAST + FIRST : 2 * LAST])
    print(f"  {run_id}: {ratios[0]:.3f} and {ratios[1]:.3f}", file=sys.stderr, flush=True)
    return ratios


def loop_share(executions: Sequence[tuple[int, ...]]) -> float:
    """Returns the time from the first beginning to the last end, over the time in which the device was busy."""
    return (executions[-1][1] - executions[0][0]) / sum(end - begin for begin, end in executions)


if __name__ == "__main__":
    main()
