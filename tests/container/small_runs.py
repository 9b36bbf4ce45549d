"""Small real runs for tests: a dataset written by hand, a configuration, and trainers started as hosts start them."""

import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner

from tests.container.fork_server import ForkedTrainer
from tests.packed_datasets import pack_rows
from tests.processes import wait_until
from tests.xla_flags import COMPILE_FAST, UNOPTIMIZED
from training.cli.main import tpu_train
from training.config import from_document
from training.data import tokenizer as tokenizers
from training.data.prepare import tokenizer_training
from training.data.prepare.dataset_writer import DatasetPlan
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.distributed.shutdown import ShutdownRequest
from training.evaluate import Evaluated, evaluate
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import read_history
from training.trainer import train
from training.yaml_file import Document

# Read when torch_xla is first imported.
os.environ.setdefault("XLA_FLAGS", COMPILE_FAST if os.environ.get("PJRT_DEVICE") == "CPU" else UNOPTIMIZED)

VOCABULARY = 200
SEQUENCE = 32
LONGEST = 16  # of labelled rows
SPECIAL = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]


def write_tokenizer(folder: Path) -> str:
    """A tokenizer.json of a few words. Returns its hash."""
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    vocabulary = {word: index for index, word in enumerate(words)}
    flags = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    content = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    tokenizer_training.write_tokenizer(str(folder), json.dumps(content).encode())
    return tokenizers.read(str(folder)).hash


def write_dataset(folder: Path, tokenizer_hash: str, records: int, seed: int) -> None:
    """Rows with a pattern that is quickly learnt: each token mostly follows from the one before."""
    starts = np.random.default_rng(seed).integers(0, VOCABULARY - 5, (records, 1))
    plan = DatasetPlan("train", SEQUENCE, tokenizer_hash, VOCABULARY, records_per_shard=-(-records // 2))
    pack_rows(folder, plan, ((starts + 7 * np.arange(SEQUENCE)) % 20 + 5).astype(np.int32))


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a plain value; `changes` are dotted keys with `__` for the dot."""
    speed = {"learning_rate": 0.003, "warmup_steps": 2, "dropout": 0.1}
    value: dict[str, Any] = {
        "seed": 1,
        "task": "mlm",
        "model": {"name": "bert-tiny", "hidden_size": 32, "layers": 2, "heads": 2, "max_positions": SEQUENCE},
        "data": {name: str(folder / name) for name in ("train", "evaluation", "tokenizer")},
        "train": {"steps": 12, "global_batch_size": 8, "log_every": 1, **speed},
        # A loaded machine compiles for longer than Spot waits, and imports for as long, too.
        "checkpoint": {"every_steps": 4, "keep_last": 3, "stop_seconds": 200},
        "rendezvous": {"start_seconds": 600, "seconds": 60},
        "output": str(folder / "runs"),
    }
    for dotted, change in changes.items():
        *path, last = dotted.split("__")
        below = value
        for key in path:
            below = below.setdefault(key, {})
        below[last] = change
    return value


def labelled_document(folder: Path, task: str, /, **changes: Any) -> dict[str, Any]:
    """`document` of a task over labelled rows of at most LONGEST tokens."""
    model = {"name": "bert-tiny", "hidden_size": 32, "layers": 1, "heads": 2, "max_positions": LONGEST}
    speed = {"train__global_batch_size": 16, "train__learning_rate": 0.01, "train__strict": True}
    steps = {"train__steps": 60, "checkpoint__every_steps": 20, "evaluation__every": 30}
    return document(folder, **{"task": task, "model": model, **speed, **steps, **changes})


def command(*words: str | Path) -> str:
    """Runs `tpu-train WORDS` in this process, which must succeed, and returns what it prints. Raises its error."""
    ended = CliRunner().invoke(tpu_train, [*map(str, words)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        table.writeheader()
        table.writerows(rows)
    return path


def labelled_shards(folder: Path, task: str, suffix: str, *options: str | Path) -> str:
    """`tpu-train shards` of the folder's files train and evaluation, with its tokenizer, in rows of 8 and LONGEST."""
    corpora = ["--corpus", folder / f"train{suffix}", "--evaluation-corpus", folder / f"evaluation{suffix}"]
    places = ["--tokenizer", folder / "tokenizer", "--out", folder]
    lengths = ["--sequence-length", str(LONGEST), "--lengths", f"8,{LONGEST}"]
    return command("shards", "--task", task, *corpora, *places, *lengths, *options)


def prepare(folder: Path) -> Path:
    """Tokenizer, training and evaluation data in `folder`."""
    tokenizer_hash = write_tokenizer(folder / "tokenizer")
    write_dataset(folder / "train", tokenizer_hash, 64, 1)
    write_dataset(folder / "evaluation", tokenizer_hash, 19, 2)
    return folder


@dataclass
class Host:
    """One trainer process."""

    process: subprocess.Popen[str] | ForkedTrainer
    out: Path

    def finish(self, seconds: float = 600) -> int:
        return self.process.wait(timeout=seconds)

    def text(self) -> str:
        return self.out.read_text()

    def wait_for(self, text: str, seconds: float = 600) -> None:
        """Waits until the trainer has printed a text, which must be so before it has ended."""
        wait_until(lambda: self.process.poll() is not None or text in self.text(), seconds, self.text)
        assert text in self.text(), f"ended with {self.process.poll()} before {text!r}:\n{self.text()}"


def end(hosts: Sequence[Host], *codes: int, seconds: float = 600) -> None:
    """Requires that the hosts end with these codes."""
    assert [host.finish(seconds) for host in hosts] == [*codes], "\n".join(host.text() for host in hosts)


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def cluster_environment(run_id: str, attempt: int, worker: int, hosts: int, ports: tuple[int, int]) -> dict[str, str]:
    """What the launcher tells a host, for hosts that are processes here. `ports`: of the rendezvous and of gloo."""
    return {
        "TPU_LAUNCH_RUN_ID": run_id,
        "TPU_LAUNCH_ATTEMPT": str(attempt),
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * hosts),
        "TPU_LAUNCH_RENDEZVOUS_PORT": str(ports[0]),
        "TPU_LAUNCH_GLOO_PORT": str(ports[1]),
        "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU"),  # TPU: a virtual one
    }


def start(
    folder: Path,
    run_id: str,
    config: dict[str, Any],
    hosts: int = 1,
    attempt: int = 0,
    *,
    only: int | None = None,
    ports: tuple[int, int] | None = None,
    prefix: Sequence[str] = (),
    **environment: str,
) -> list[Host]:
    """Starts the trainers of a run of `hosts` hosts on loopback: all of them, or `only` one.

    `prefix`: a command that starts them. `environment`: variables. Trainers of PyTorch on CPUs are forks, but where a
    prefix or variables, which libraries read when they are imported, are given."""
    pytorch = config.get("backend") != "tensorflow" and os.environ.get("PJRT_DEVICE") == "CPU"
    logs, ports, started = folder / "logs", ports or free_ports(), []
    logs.mkdir(exist_ok=True)
    path = logs / f"{run_id}.{attempt}.{'all' if only is None else only}.yaml"
    path.write_text(yaml.safe_dump(config))
    for worker in range(hosts) if only is None else [only]:
        out = logs / f"{run_id}.{attempt}.{worker}.log"
        told = {**os.environ, **cluster_environment(run_id, attempt, worker, hosts, ports), **environment}
        out.write_text("")
        if pytorch and not prefix and not environment:
            started.append(Host(ForkedTrainer(path, out, told), out))
            continue
        command = [*prefix, sys.executable, "-m", "training.cli", "train", str(path)]
        with out.open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=told)
        started.append(Host(process, out))
    return started


def trained(
    folder: Path, run_id: str, config: dict[str, Any], hosts: int = 1, *, seconds: float = 600, **options: Any
) -> dict[str, Any]:
    """Returns the summary of a run whose hosts must all end with 0. `options`: those of `start`."""
    end(start(folder, run_id, config, hosts, **options), *[0] * hosts, seconds=seconds)
    return summary(folder, run_id)


def require_same_bits(ours: dict[str, Any], theirs: dict[str, Any], *more: str) -> None:
    """Checks that two summaries have the same bits. `more`: further keys that must be equal."""
    for key in ("first_loss", "last_loss", "eval_loss", "final_weights_crc32c", *more):
        assert ours[key] == theirs[key], f"{key}: {ours[key]}, expected {theirs[key]}"


def summary(folder: Path, run_id: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / run_id / "summary.json").read_text())


class StopAfter(ShutdownRequest):
    """Asked to stop once `steps` steps have looked."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def this_host(run_id: str = "local", attempt: int = 0) -> Cluster:
    """A slice of one host: this process."""
    return Cluster(0, ("localhost",), os.environ.get("TPU_ACCELERATOR_TYPE"), run_id=run_id, attempt=attempt)


def train_here(
    config: dict[str, Any], run_id: str, stopping: ShutdownRequest | None = None, attempt: int = 0
) -> dict[str, Any]:
    """Trains on one host, in this process, and returns the summary."""
    settings = from_document(Document("test", config, {}))
    return train(settings, this_host(run_id, attempt), SingleHost(), stopping or ShutdownRequest(), PhaseTimer())


def evaluate_here(config: dict[str, Any], place: str, step: int | None = None, stopping: Any = None) -> Evaluated:
    """Evaluates a run or a model folder on one host, in this process."""
    settings = from_document(Document("test", config, {}))
    return evaluate(place, settings, this_host(), SingleHost(), stopping or ShutdownRequest(), step)


def figures(folder: Path, run_id: str, name: str) -> dict[int, float]:
    """A figure of a run's history, by step."""
    return {line["step"]: line[name] for line in read_history(str(folder / "runs" / run_id)) if name in line}


def losses(folder: Path, run_id: str) -> list[float]:
    return list(figures(folder, run_id, "loss").values())
