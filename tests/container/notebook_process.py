"""A notebook's process, which calls training.one_host: for tests. Writes FOLDER/<case>.json.

    python -m tests.container.notebook_process FOLDER used|fresh      the process before and after
    python -m tests.container.notebook_process FOLDER interrupted     the weights' checksum after each interruption

used: the process has imported PyTorch and transformers before; fresh: our functions import them.
"""

import contextlib
import gc
import hashlib
import itertools
import json
import logging
import os
import pkgutil
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from training import one_host

# Where a cell is interrupted: owner, function, and after which call of it.
PLACES = (
    ("training.backends.torch.step:TrainingStep", "trace", 2),
    ("training.backends.torch_xla.internals", "compile_program", 1),
    ("training.backends.torch_xla.internals", "start_program", 7),
    ("training.backends.protocol:PendingReport", "result", 6),
    ("training.checkpoint.writer:CheckpointWriter", "save", 2),
    ("training.backends.torch_xla.backend:TorchXla", "evaluate", 2),
    ("training.trainer:Trainer", "build_summary", 1),
)


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def describe_process() -> dict[str, Any]:
    """Returns what other cells of the notebook use and no import changes."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "signals": [*map(str, map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))), wakeup],
        "hooks": [str(sys.excepthook), str(threading.excepthook), os.getcwd()],
        "random": [digest(random.getstate()), digest(np.random.get_state())],
        "threads": thread_names(),
    }


def describe_libraries() -> dict[str, Any]:
    """Returns what the import of the libraries changes."""
    import torch
    import torch_xla  # noqa: F401
    import transformers

    names = [f"is_{name}_available" for name in ("torch", "accelerate", "scipy", "sklearn")]
    loggers = map(logging.getLogger, ("", "torch_xla", "torch_xla.backends", "transformers"))
    return {
        "available": {name: getattr(transformers.utils, name)() for name in names},
        "random": digest(torch.get_rng_state()),
        "torch": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled()],
        "logging": [(each.level, each.disabled, str(each.handlers)) for each in loggers],
        "environment": dict(os.environ),
    }


def threads_left(names: list[str]) -> list[str]:
    """Waits, at most 20 s, until no threads run but those of these names. Returns the names of all if others do."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and thread_names() != names:
        gc.collect()  # the reader of an interrupted evaluation ends with its last reference
        time.sleep(0.05)
    return [] if thread_names() == names else thread_names()


def use(folder: Path, imported: bool) -> dict[str, Any]:
    """Makes shards, trains and predicts. Returns the process before and after, and what TrainingArguments gives."""
    libraries = describe_libraries() if imported else None
    before, text = describe_process(), folder / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 w6 w7 w8\n" * 100)
    corpus = ["--corpus", str(text), "--evaluation-corpus", str(text), "--tokenizer", str(folder / "tokenizer")]
    one_host.shards(*corpus, "--out", str(folder / "data"), "--sequence-length", "16")
    summary = one_host.train(one_host.configuration(folder / "run.yaml"))
    one_host.predict(summary["model"], "w1 w2 [MASK] w4")
    threads_left(before["threads"])
    after = [describe_process(), describe_libraries()]
    from transformers import TrainingArguments

    steps = TrainingArguments(output_dir=str(folder / "own"), max_steps=3, report_to=[]).max_steps
    return {"before": [before, libraries], "after": after, "steps": steps}


def interrupting(owner: Any, name: str, call: int) -> Callable[..., Any]:
    """Returns a function or method that interrupts the process after one of its calls."""
    function, calls = getattr(owner, name), itertools.count(1)

    def run(*arguments: Any, **more: Any) -> Any:
        result = function(*arguments, **more)
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return result

    return run


def interrupt(folder: Path) -> dict[str, str]:
    """Interrupts and reruns a cell at each place. Returns checksums of weights ("": uninterrupted) and threads left."""
    config, threads = one_host.configuration(folder / "run.yaml"), thread_names()
    checksums: dict[str, str] = {"": one_host.train(config, "uninterrupted")["final_weights_crc32c"]}
    for owner, name, call in PLACES:
        place = pkgutil.resolve_name(owner)
        with contextlib.suppress(KeyboardInterrupt), mock.patch.object(place, name, interrupting(place, name, call)):
            one_host.train(config, name)
            raise AssertionError(f"{name} was not interrupted")
        left = threads_left(threads)
        checksums[name] = one_host.train(config, name)["final_weights_crc32c"] + " ".join(left)
    return checksums


if __name__ == "__main__":
    _folder, _case = Path(sys.argv[1]), sys.argv[2]
    _result = interrupt(_folder) if _case == "interrupted" else use(_folder, _case == "used")
    Path(_folder, f"{_case}.json").write_text(json.dumps(_result))
