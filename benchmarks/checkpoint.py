"""Measures the cost of a checkpoint (blocked loop, commit, restore, memory) beside what PyTorch users have.

    make benchmark NAME=checkpoint [ARGS="--json --repeat 3"]

The state is BERT-base's with its AdamW moments, 1.3 GB of fp32, held by the PyTorch/XLA backend on the CPU. The others
get the same tensors as plain torch tensors in host memory, which spares them the copy from the device. All write fresh
files below one temporary folder on this machine's disk; rounds are interleaved and the best of `--repeat` is kept, for
ours and theirs alike. Memory is measured in processes of their own.

  ours          CheckpointWriter.save with checkpoint.background, on one host; restoring is `restore` into the backend.
                The loop is blocked in `save`, and in the next training step where it waits for the copy to end before
                it changes the state; both count. Committed is durable: the part and the manifest are fsynced.
                Throughput is counted from the end of the copy on.
  torch.save    torch.save(state, file), and torch.load; also with an fsync, which makes it as durable as ours
  async_save    torch.distributed.checkpoint.async_save, without a process group
  safetensors   safetensors.torch.save_file, and load_file
  plain write   os.write of as many bytes, with the fsync that ours does and the others leave out, and without
  plain read    a file of as many bytes, read whole; before each reading the files are dropped from the page cache, as
                on a new machine
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from training.batch import Signals
from training.checkpoint.config import CheckpointSection
from training.checkpoint.reader import restore
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.models.hugging_face import ModelRequirements

RUNS_IN = "torch-xla"
IDENTITY = {"benchmark": 1}
CONFIG = {
    "model": {"name": "bert-base"},
    "data": {"train": "none", "tokenizer": "none"},
    "train": {"steps": 1, "global_batch_size": 1},
    "output": "none",
}


def backend() -> Any:
    """Returns the trainer's backend with a fresh model; `upload` moves its state to the (CPU) device."""
    from training.backends.torch_xla.backend import TorchXla

    config = TrainerConfig.model_validate(CONFIG)
    return TorchXla(
        config,
        Cluster(0, ("localhost",)),
        SingleHost(),
        ModelRequirements(vocabulary=30_522, pad=0, sequence_length=128),
    )


def plain_state() -> dict[str, Any]:
    """Returns the same tensors on the host, with values that don't compress."""
    import torch

    made = backend()
    state = {name: torch.rand(info.shape, dtype=torch.float32) for name, info in made.tensor_specs().items()}
    del made
    gc.collect()
    return state


def train_on(made: Any, number: int) -> None:
    """Runs a step on two short rows, which changes the whole state."""
    ids = np.random.default_rng(number).integers(1_000, 30_000, (2, 32), dtype=np.int32)
    batch = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "positions": np.tile(np.arange(5, dtype=np.int32), (2, 1)),
    }
    made.step(
        number, {**batch, "labels": ids[:, :5].copy(), "weights": np.ones((2, 5), np.float32)}, Signals()
    ).result()


def saver(folder: str) -> CheckpointWriter:
    """Returns a writer that keeps every checkpoint: files are deleted outside the measured time, ours and theirs."""
    description, settings = RunDescription(IDENTITY, {}, "", "t"), CheckpointSection(keep_last=1_000)
    return CheckpointWriter(folder, Cluster(0, ("localhost",)), SingleHost(), description, settings)


def write_plainly(path: Path, data: memoryview, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while data:
        data = data[os.write(descriptor, data[: 8 << 20]) :]
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def clear(target: Path, folder: Path) -> None:
    """Empties the folder and flushes the disk, so that each method writes under the same conditions."""
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    forget(folder)


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Flushes files to the disk, so that the next measurement does not pay for them, and drops them from the
    page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            synced(path)
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# --- run in a process of its own


def saving(folder: Path, repeat: int) -> dict[str, float]:
    """Returns the seconds of each method: blocked, and until durable."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import async_save

    ours, state = backend(), plain_state()
    train_on(ours, 0)
    layout = ours.tensor_specs()
    size = sum(info.size for info in layout.values())
    block = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))
    keeper = saver(str(folder / "ours"))
    keeper.prepare(layout)
    best: dict[str, float] = {"bytes": size}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    def copied(places: Any) -> Snapshot:
        copying = ours.snapshot_state(places)
        copying.wait()
        return copying

    plain, file, whole, distributed = (folder / name for name in ("plain", "torch.pt", "whole.safetensors", "dcp"))

    def save_beside() -> None:
        began = time.perf_counter()
        future = async_save(state, checkpoint_id=str(distributed))
        note("async_save blocked", time.perf_counter() - began)
        future.result()

    def save_and_sync() -> None:
        torch.save(state, file)
        synced(file)

    peers: list[tuple[str, Path, Callable[[], Any]]] = [
        ("plain write, fsync", plain, lambda: write_plainly(plain, block, sync=True)),
        ("plain write, no fsync", plain, lambda: write_plainly(plain, block, sync=False)),
        ("torch.save, fsync", file, save_and_sync),
        ("torch.save", file, lambda: torch.save(state, file)),
        ("safetensors", whole, lambda: save_file(state, whole)),
        ("async_save", distributed, save_beside),
    ]
    for round_ in range(1, repeat + 1):
        # During training: the time that the loop is blocked.
        clear(folder / "ours", folder)
        blocked = keeper.blocked_seconds
        keeper.save(2 * round_, layout, ours.snapshot_state, {})
        train_on(ours, round_)
        keeper.wait()
        note("ours blocked", keeper.blocked_seconds - blocked)
        # Without training: the disk's throughput.
        clear(folder / "ours", folder)
        began = time.perf_counter()
        keeper.save(2 * round_ + 1, layout, copied, {})
        begun = time.perf_counter()
        keeper.wait()
        note("ours written", time.perf_counter() - begun)
        note("ours", time.perf_counter() - began)
        for name, path, work in peers:
            clear(path, folder)
            note(name, timed(work))
    return best


def restoring(folder: Path, repeat: int) -> dict[str, float]:
    """Returns the seconds of each method, reading the files that `saving` wrote."""
    import torch
    from safetensors.torch import load_file

    best: dict[str, float] = {}
    for _ in range(repeat):
        ours = backend()
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("plain read", lambda: (folder / "whole.safetensors").read_bytes()),
            ("ours", lambda ours=ours: restore(str(folder / "ours"), SingleHost(), IDENTITY, ours.load_state, print)),
            ("torch.load", lambda: torch.load(folder / "torch.pt")),
            ("load_file", lambda: load_file(folder / "whole.safetensors")),
        ]
        for name, work in steps:
            forget(folder)
            gc.collect()
            seconds = timed(work)
            best[name] = min(seconds, best.get(name, seconds))
    return best


def memory(folder: Path, what: str) -> dict[str, float]:
    """Returns the peak bytes that a save needs beyond the state."""
    import torch
    from torch.distributed.checkpoint import async_save

    if what == "ours":
        made = backend()
        made.upload()
        layout, keeper = made.tensor_specs(), saver(str(folder / "memory"))

        def save() -> None:
            keeper.prepare(layout)
            for step in (1, 2):
                keeper.save(step, layout, made.snapshot_state, {})
            keeper.wait()
    else:
        state = plain_state()

        def save() -> None:
            if what == "torch.save":
                torch.save(state, folder / "memory.pt")
            else:
                async_save(state, checkpoint_id=str(folder / "memory-dcp")).result()

    gc.collect()
    before, highest, over = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.01):
            highest = max(highest, resident())

    watching = threading.Thread(target=watch)
    watching.start()
    save()
    over.set()
    watching.join()
    return {"bytes": float(highest - before)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- side by side


def measure(folder: str, *what: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, __file__, "--folder", folder, "--measure", *what],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def compare(folder: str, repeat: int) -> list[Row]:
    rows: list[Row] = []

    def add_row(name: str, unit: str, ours: float, peer_name: str, peer: float, goal: str) -> None:
        rows.append(row(name, unit, ours, peer_name, peer, goal))

    saved = measure(folder, "saving", str(repeat))
    read = measure(folder, "restoring", str(repeat))
    megabytes = saved["bytes"] / 1e6
    add_row("the loop is blocked", "s", saved["ours blocked"], "torch.save", saved["torch.save"], "at most 1/10")
    add_row("the loop is blocked", "s", saved["ours blocked"], "torch.save, fsync", saved["torch.save, fsync"], "")
    add_row("the loop is blocked", "s", saved["ours blocked"], "async_save", saved["async_save blocked"], "")
    add_row("the loop is blocked", "s", saved["ours blocked"], "goal", 0.5, "at most 0.5 s")
    for peer in ("plain write, fsync", "torch.save", "torch.save, fsync", "async_save", "safetensors"):
        add_row("until it is committed", "s", saved["ours"], peer, saved[peer], "")
    throughput = megabytes / saved["ours written"]
    add_row(
        "commit throughput",
        "MB/s",
        throughput,
        "plain write, fsync",
        megabytes / saved["plain write, fsync"],
        "at least 90 %",
    )
    add_row(
        "commit throughput", "MB/s", throughput, "plain write, no fsync", megabytes / saved["plain write, no fsync"], ""
    )
    for peer, goal in (("plain read", "at most 1.2 times"), ("torch.load", ""), ("load_file", "")):
        add_row("restore", "s", read["ours"], peer, read[peer], goal)
    ours = measure(folder, "memory", "ours")["bytes"] / 1e6
    add_row("peak extra memory", "MB", ours, "the state", megabytes, "at most one copy")
    for peer in ("torch.save", "async_save"):
        add_row("peak extra memory", "MB", ours, peer, max(1.0, measure(folder, "memory", peer)["bytes"] / 1e6), "")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, detail = options.measure
        folder = Path(options.folder)
        result = (
            memory(folder, detail)
            if what == "memory"
            else {"saving": saving, "restoring": restoring}[what](folder, int(detail))
        )
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(folder, options.repeat)
    finish("checkpoint", rows, options.json)


if __name__ == "__main__":
    main()
