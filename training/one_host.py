"""Trains and predicts in this process, for notebooks: the code that `tpu-train` runs, as Python functions.

    from training import one_host
    one_host.shards("--corpus", "builtin:pydoc", "--tokenizer", "tokenizer", "--out", "data")
    config = one_host.configuration("mlm.yaml", "train.steps=100")
    summary = one_host.train(config, run_id="notebook")
    one_host.predict(summary["model"], "The [MASK] statement ends a loop.")

Errors are training.errors.TrainError, whose messages are complete. A run that was interrupted goes on from its newest
checkpoint when it is trained again with the same run id. The process is afterwards as before, but for what imports of
libraries change, and that torch_xla multiplies fp32 matrices in fp32.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import storage
from training.config import TrainerConfig, load
from training.distributed.cluster import Cluster, device_kind, discover
from training.distributed.rendezvous import SingleHost
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput
from training.registry import BACKENDS
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import read_history

_VARIABLES = ("TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY")  # that our code sets for libraries
_FLAGS = {entry.cpu_flags for entry in BACKENDS.values()}  # that our code adds to XLA_FLAGS


@contextlib.contextmanager
def _settings_as_before() -> Iterator[None]:
    """Restores _VARIABLES, XLA_FLAGS without _FLAGS, and transformers' verbosity after the block; if transformers is
    loaded, it shows only errors meanwhile, unless TRANSFORMERS_VERBOSITY is set. Keeps what importing a framework sets,
    in XLA_FLAGS too: it is imported only once."""
    given = os.environ.get("XLA_FLAGS", "").split()
    before, loaded = {name: os.environ.get(name) for name in _VARIABLES}, sys.modules.get("transformers")
    shown = loaded.logging.get_verbosity() if loaded else logging.WARNING
    if loaded and before["TRANSFORMERS_VERBOSITY"] is None:
        loaded.logging.set_verbosity_error()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        if set(flags := os.environ.get("XLA_FLAGS", "").split()) & _FLAGS - set(given):
            os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if flag in given or flag not in _FLAGS)
        if (loaded := sys.modules.get("transformers")) and before["TRANSFORMERS_VERBOSITY"] is None:
            loaded.logging.set_verbosity(shown)


@_settings_as_before()
def shards(*arguments: str) -> None:
    """Makes a dataset, as `tpu-train shards ARGUMENTS`, and prints a line for each split; keeps one that is there
    already. Raises TrainError, and click.UsageError for wrong arguments."""
    from training.cli.data import shards as command

    command.main(list(arguments), prog_name="shards", standalone_mode=False)


def configuration(file: str | Path, *settings: str) -> TrainerConfig:
    """Reads and checks a YAML file with `settings` as of --set ("train.steps=100"). Raises ConfigError."""
    return load(file, settings)


@_settings_as_before()
def train(config: TrainerConfig, run_id: str = "notebook") -> dict[str, Any]:
    """Trains to the last step or an early stop, from the newest checkpoint if there is one, in the folder `run_id`
    below config.output. Returns its summary.json. Raises TrainError. Evaluates and exports a finished run again."""
    from training.trainer import train as run

    return run(config, _this_host(run_id), SingleHost(), ShutdownRequest(), PhaseTimer())


def _this_host(run_id: str) -> Cluster:
    """Returns a cluster of this host and its accelerator alone. Raises BadInput on a slice of several hosts."""
    if device_kind() != "TPU":
        return Cluster(0, ("localhost",), run_id=run_id)
    cluster = discover()
    if cluster.hosts > 1:
        raise BadInput(
            f"this is host {cluster.worker} of a slice of {cluster.hosts} hosts, and a notebook trains on a TPU of one "
            "host: use `tpu-launch run`, or set PJRT_DEVICE=CPU"
        )
    return Cluster(0, ("localhost",), cluster.accelerator_type, run_id)


def metrics(config: TrainerConfig, run_id: str = "notebook") -> list[dict[str, Any]]:
    """Returns the run's history, [] without any: an object for each progress line (step, loss, ...) and evaluation."""
    return read_history(storage.join(config.output, run_id))


@_settings_as_before()
def predict(model: str, text: str, top: int = 5) -> list[tuple[float, str]]:
    """Returns the answers of the model folder `model`: the `top` most probable (probability, class or text with its
    mask filled), best first; for labelled words all (probability, "label: words") in their order; for a decoder one
    (1.0, continued text). Raises BadInput without weights, or for a masked model without exactly one mask;
    StorageError."""
    from training.models.predict import classify, fill_mask, go_on, label_words, pipeline_of

    pipeline = pipeline_of(model)
    if pipeline == "text-generation":
        return [(1.0, go_on(model, text))]
    if pipeline == "token-classification":
        return [(part.score, f"{part.name}: {part.words}") for part in label_words(model, text)]
    if pipeline == "text-classification":
        return [(label.score, label.name) for label in classify(model, text, top)]
    return [(answer.score, answer.text) for answer in fill_mask(model, text, top)]
