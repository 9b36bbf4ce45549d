"""What the benchmarks of the TPU compiler have in common: the run whose step is compiled, and a process for each
compilation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from training.config import TrainerConfig
from training.preflight.shapes import DataFacts

T = TypeVar("T")


def mlm(model: str, length: int, vocabulary: int, batch: int, **train: Any) -> tuple[TrainerConfig, DataFacts]:
    """MLM in bf16 of batches of `batch` sequences of `length` tokens, `train` as in the file. Nothing is read."""
    settings = {"steps": 1, "global_batch_size": batch, "precision": "bf16", **train}
    folders = {"train": "none", "tokenizer": "none"}
    config = TrainerConfig.model_validate(
        {"model": {"name": model}, "data": folders, "train": settings, "output": "none"}
    )
    return config, DataFacts(vocabulary, 0, (length,), (), None)


def alone(measured: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """In a process of its own, whose memory (7 GB and more for bert-large) is free afterwards. Raises BrokenProcessPool
    when that process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *arguments, **named).result()
