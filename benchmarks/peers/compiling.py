"""Shared by the benchmarks of the TPU compiler: the run whose step is compiled, and a process for each compilation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from training.config import TrainerConfig
from training.preflight.programs import DataFacts

T = TypeVar("T")


def make_run(
    model: str | dict[str, Any],
    length: int,
    vocabulary: int,
    batch: int,
    lora: dict[str, Any] | None = None,
    **train: Any,
) -> tuple[TrainerConfig, DataFacts]:
    """Returns a run in bf16, and the properties of its data. Reads no files.

    Args:
        model: a name for MLM, as of model.name; or model.config, of a decoder or for MLM as its architecture says.
        length: tokens a row.
        vocabulary: token ids.
        batch: rows of the global batch.
        lora: the section lora; None: all weights are trained.
        train: further keys of the section train.
    """
    settings = {"steps": 1, "global_batch_size": batch, "precision": "bf16", **train}
    folders = {"train": "none", "tokenizer": "none"}
    own: dict[str, Any] = {"model": {"name": model}}
    if not isinstance(model, str):
        task = "mlm" if model["architectures"][0].endswith("ForMaskedLM") else "causal-lm"
        own = {"model": {"config": model}, "task": task}
    config = TrainerConfig.model_validate({**own, "data": folders, "lora": lora, "train": settings, "output": "none"})
    return config, DataFacts(vocabulary, 0, (length,), (), None)


def run_in_process(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Calls a function in a process of its own, whose memory (7 GB and more for bert-large) is free afterwards. Raises
    BrokenProcessPool if that process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **keywords).result()
