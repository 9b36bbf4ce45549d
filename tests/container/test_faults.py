"""A fault on one of two hosts, or on both, that no training survives: host 0 names the fault, and every host ends.

Each host works in a folder of its own with its own copy of the data, as hosts with local disks do; the runs' folder is
common to both.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.container import small_runs
from tests.training.mutations import flip
from training.errors import Exit

SECONDS = 240  # for all hosts to end; a loaded machine takes a while to import frameworks


def hosts_of(folder: Path, name: str) -> list[Path]:
    """A folder for each of two hosts, with a copy of the data."""
    homes = [folder / name / f"host-{worker}" for worker in (0, 1)]
    for home in homes:
        for each in ("tokenizer", "train", "evaluation"):
            shutil.copytree(folder / each, home / each)
    return homes


def end(
    folder: Path, name: str, homes: list[Path], config: dict[str, Any], prefix: Sequence[str] = ()
) -> tuple[list[int], list[str]]:
    """Exit codes and output of both hosts; each must end by itself."""
    config["data"] = {**config["data"], "train": "train", "evaluation": "evaluation", "tokenizer": "tokenizer"}
    running = small_runs.start(folder, name, config, hosts=2, homes=homes, prefix=prefix)
    try:
        return [host.finish(SECONDS) for host in running], [host.text() for host in running]
    finally:
        for host in running:
            host.process.kill()


def lost(text: str, reason: str) -> None:
    """Host 0 lost host 1 and says why that one ended."""
    assert re.search(rf"lost peer: host 1 stopped in phase '.*' with exit code \d+: .*{reason}", text), text


def test_a_loader_that_raises_on_one_host(folder: Path) -> None:
    homes = hosts_of(folder, "loader")
    for shard in (homes[1] / "train").glob("*.tfrecord"):
        flip(shard, -5)  # in the last record: not the first that is read
    codes, told = end(folder, "loader", homes, small_runs.document(folder, train__steps=50))
    assert codes == [Exit.LOST_PEER, Exit.BAD_INPUT], "\n".join(told)
    assert re.search(r"error: train/train-0000\d.tfrecord: record 31 at byte \d+: its checksum", told[1]), told[1]
    lost(told[0], r"record 31 at byte \d+: its checksum")


def test_out_of_memory(folder: Path) -> None:
    """The step asks for some 200 GB in one piece."""
    sizes = {"train__global_batch_size": 8192, "data__masking": {"predictions": 16}, "model__vocabulary_size": 800_000}
    config = small_runs.document(folder, **sizes, train__steps=2, evaluation__batch_size=8)
    codes, told = end(folder, "memory", hosts_of(folder, "memory"), config, prefix=["prlimit", f"--as={64 << 30}"])
    assert Exit.FAILED in codes, "\n".join(told)
    assert set(codes) <= {Exit.FAILED, Exit.LOST_PEER}, "\n".join(told)
    assert "out of memory: lower train.global_batch_size" in told[0], told[0]
    assert "Traceback" not in "".join(told)
