"""Trainers that meet their fate: the real `tpu-train train`, in a process of its own that is killed, or asked to stop,
at a named point or a moment.

A fork server imports the framework once, so that an attempt costs little more than its compilations. Fates are put
around the trainer's own functions in the forked process; what runs between them is the code that users run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from tests.container import small_runs
from training import storage
from training.checkpoint.reader import verify
from training.checkpoint.store import committed_steps

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "google.cloud.storage",
        "training.backends.torch_xla.backend",
        "training.backends.torch_xla.gloo",
        "training.trainer",
        "transformers.models.bert.modeling_bert",
    ]
)

# The named points of a save that every host passes, in this order; and those that only host 0 passes.
POINTS = (
    "copying",
    "copied",
    "before the part",
    "within the part",
    "after the part",
    "waiting for the others",
    "everyone has met",
)
POINTS_OF_FIRST = ("before the manifest", "within the manifest", "after the manifest", "between deletions")


@dataclass(frozen=True)
class Fate:
    """What happens to one trainer: a signal when it passes a point for the `count`-th time, `delay` seconds later."""

    point: str
    count: int = 1
    delay: float = 0.0
    signals: tuple[int, ...] = (signal.SIGKILL,)
    error: int | None = None  # instead of signals: what the system says to the write that is "within the part"


@dataclass
class Attempt:
    """The trainers of one attempt of a run."""

    processes: list[ForkServerProcess]
    logs: list[Path]

    def text(self, worker: int = 0) -> str:
        return self.logs[worker].read_text()

    def everything(self) -> str:
        return "\n".join(f"--- host {worker}\n{self.text(worker)[-3000:]}" for worker in range(len(self.logs)))

    def finish(self, seconds: float = 120) -> list[int]:
        """Exit codes; a signal's is negative. Fails when a trainer outlives `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.join(max(0.1, deadline - time.monotonic()))
            late = [worker for worker, process in enumerate(self.processes) if process.exitcode is None]
            assert not late, f"host {late} did not end within {seconds} s:\n{self.everything()}"
        finally:
            for process in self.processes:
                if process.exitcode is None:
                    process.kill()
                    process.join(10)
        return [process.exitcode for process in self.processes if process.exitcode is not None]


@dataclass
class Run:
    """A run on `hosts` hosts that is started again and again."""

    folder: Path
    run_id: str
    hosts: int
    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    ahead: dict[int, float] = field(default_factory=dict)  # seconds that a host's wall clock is ahead

    @property
    def output(self) -> str:
        return storage.join(self.config["output"], self.run_id)

    @property
    def checkpoints(self) -> str:
        return storage.join(self.output, "checkpoints")

    def start(self, fates: Mapping[int, Fate] | None = None) -> Attempt:
        """Starts the next attempt; `fates` are by host."""
        number, self.attempts = self.attempts, self.attempts + 1
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        path = logs / f"{self.run_id}.yaml"
        path.write_text(yaml.safe_dump(self.config))
        ports = small_runs.free_ports()
        attempt = Attempt([], [])
        for worker in range(self.hosts):
            log = logs / f"{self.run_id}.{number}.{worker}.log"
            log.write_text("")
            environment = (
                small_runs.cluster_environment(self.run_id, number, worker, self.hosts, ports) | self.environment
            )
            arguments = (
                environment,
                str(path),
                str(log),
                str(self._trained),
                (fates or {}).get(worker),
                self.ahead.get(worker, 0.0),
            )
            process = _CONTEXT.Process(target=_live, args=arguments, daemon=True)
            process.start()
            attempt.processes.append(process)
            attempt.logs.append(log)
        return attempt

    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(storage.read(storage.join(self.output, "summary.json")))
        return value

    def newest(self) -> int:
        """The newest committed step; 0 when there is none. Fails when any committed checkpoint does not verify."""
        steps = committed_steps(self.checkpoints)
        for step in steps:
            verify(self.checkpoints, step)  # raises Damaged
        return steps[0] if steps else 0

    @property
    def _trained(self) -> Path:
        return self.folder / "logs" / f"{self.run_id}.trained.jsonl"

    def history(self) -> dict[int, list[int]]:
        """The records of all hosts' batches by step, as the final state has seen them: an attempt supersedes the steps
        after the one it went on from."""
        lines = [json.loads(line) for line in self._trained.read_text().splitlines()]
        final: dict[int, dict[int, list[int]]] = {}
        for number in range(self.attempts):
            mine = [line for line in lines if line["attempt"] == number]
            if not mine:
                continue
            resumed = min(line["step"] for line in mine)
            final = {step: told for step, told in final.items() if step < resumed}
            for line in mine:
                told = final.setdefault(line["step"], {})
                assert line["worker"] not in told, (
                    f"host {line['worker']} trained step {line['step']} twice in attempt {number}"
                )
                told[line["worker"]] = line["records"]
        for step, told in final.items():
            assert len(told) == self.hosts, f"step {step} was trained by hosts {sorted(told)} only"
        return {step: sorted(record for records in told.values() for record in records) for step, told in final.items()}


def resumed_at(text: str) -> int:
    """The step that a trainer's output says it went on from; 0 when it started over."""
    found = re.findall(r"going on from \S+/step-(\d+)", text)
    return int(found[-1]) if found else 0


# --- in the trainer's process


def _live(environment: dict[str, str], config: str, log: str, trained: str, fate: Fate | None, ahead: float) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    wall = time.time
    time.time = lambda: wall() + ahead
    from training.cli import main as cli
    from training.storage import gcs as bucket

    bucket.patience = bucket.Patience(connect=2, silence=3, deadline=3, first_delay=0.02, longest_delay=0.3)
    _put(fate or Fate("never"), trained)
    sys.argv = ["tpu-train", "train", config]
    cli._BEGAN = time.monotonic()
    cli.main()


class _Passing:
    """Lets a fate strike when its point is passed."""

    def __init__(self, fate: Fate) -> None:
        self.fate, self.passed = fate, 0

    def due(self, point: str) -> bool:
        if point != self.fate.point:
            return False
        self.passed += 1
        return self.passed == self.fate.count

    def at(self, point: str) -> None:
        if self.due(point):
            self.strike()

    def strike(self) -> None:
        if self.fate.error is not None:
            raise OSError(self.fate.error, os.strerror(self.fate.error))

        def now() -> None:
            for number in self.fate.signals:
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        if self.fate.delay:
            threading.Timer(self.fate.delay, now).start()
        else:
            now()


def _put(fate: Fate, trained: str) -> None:
    """Puts the points around the trainer's functions, and the records of each step into a file."""
    from training import trainer as loop
    from training.backends.torch_xla import backend as torch_xla
    from training.backends.torch_xla import gloo
    from training.checkpoint import snapshot as copying
    from training.checkpoint import writer as save
    from training.checkpoint.format import MANIFEST
    from training.distributed import rendezvous
    from training.models import export
    from training.storage import files
    from training.storage import types as objects

    passing = _Passing(fate)
    real_write, real_delete, real_save, real_copy_all = (
        storage.write,
        storage.delete,
        save.CheckpointWriter.save,
        copying.Snapshot._run,
    )
    real_meet, real_post, real_train_on = (
        rendezvous.RendezvousClient.meet,
        rendezvous.RendezvousClient._post,
        loop.Trainer.train_on,
    )

    def write(url: str, data: bytes, *, create_only: bool = False) -> storage.Stat:
        name = storage.name_of(url)
        what = "the part" if name.startswith("part-") else "the manifest" if name == MANIFEST else None
        if what is None:
            return real_write(url, data, create_only=create_only)
        passing.at(f"before {what}")
        if passing.due(f"within {what}"):
            if not storage.is_remote(url):
                with objects.local_errors(url), files._replacing(url, create_only) as descriptor:
                    os.write(descriptor, data[: len(data) // 2])
                    passing.strike()
            passing.strike()
        written = real_write(url, data, create_only=create_only)
        passing.at(f"after {what}")
        return written

    def delete(url: str) -> None:
        real_delete(url)
        if storage.name_of(url) == MANIFEST:
            passing.at("between deletions")

    def save_(saver: Any, step: int, layout: Any, copy: Callable[[Any], Any], state: Any) -> None:
        def copying(places: Any) -> Any:
            passing.at("copying")
            return copy(places)

        real_save(saver, step, layout, copying, state)

    def copy_all(a_copy: Any) -> None:
        real_copy_all(a_copy)
        passing.at("copied")

    def post(guest: Any, message: dict[str, Any]) -> None:
        real_post(guest, message)
        if str(message.get("arrive", "")).startswith("checkpoint "):
            passing.at("waiting for the others")

    def meet(guest: Any, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        if name == "start":
            passing.at("starting")
        told = real_meet(guest, name, payload, seconds)
        if name.startswith("checkpoint "):
            passing.at("everyone has met")
        return told

    def train_on(trainer: Any, batch: Any) -> None:
        line = {
            "attempt": trainer.run.cluster.attempt,
            "worker": trainer.run.cluster.worker,
            "step": trainer.progress.step,
            "records": [int(each) for each in batch.records],
        }
        descriptor = os.open(trained, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
        if not trainer.progress.trained:
            passing.at("compiling")
        passing.at("a step")
        real_train_on(trainer, batch)

    for place, name, new in (
        (storage, "write", write), (storage, "delete", delete), (save.CheckpointWriter, "save", save_), (copying.Snapshot, "_run", copy_all),
        (rendezvous.RendezvousClient, "_post", post), (rendezvous.RendezvousClient, "meet", meet), (loop.Trainer, "train_on", train_on),
    ):  # fmt: skip
        setattr(place, name, new)
    for place, name, point in (
        (gloo.Exchange, "sum", "exchanging gradients"), (torch_xla.TorchXla, "evaluate", "evaluating"), (export, "write_model_folder", "exporting")
    ):  # fmt: skip
        setattr(place, name, _before(getattr(place, name), passing, point))


def _before(real: Callable[..., Any], passing: _Passing, point: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        passing.at(point)
        return real(*arguments, **options)

    return call
