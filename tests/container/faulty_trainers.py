"""Trainers with an injected fault: the real `tpu-train train`, in a process of its own that is killed, or asked to
stop, at a named point or some time after it.

Faults are injected by wrapping the trainer's own functions in a fork of `fork_server`; what runs between them is the
code that users run.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from tests.container import small_runs
from tests.container.fork_server import become_trainer, fork, run_trainer
from training import storage
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import verify

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
class Fault:
    """What happens to one trainer: a signal when it passes a point for the `count`-th time, `delay` seconds later."""

    point: str
    count: int = 1
    delay: float = 0.0
    signals: tuple[int, ...] = (signal.SIGKILL,)


@dataclass
class Attempt:
    """The trainers of one attempt of a run."""

    processes: list[ForkServerProcess]
    logs: list[Path]

    def text(self, worker: int = 0) -> str:
        return self.logs[worker].read_text()

    def everything(self) -> str:
        return "\n".join(f"--- host {worker}\n{self.text(worker)[-3000:]}" for worker in range(len(self.logs)))

    def finish(self, seconds: float = 600) -> list[int]:
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

    @property
    def output(self) -> str:
        return storage.join(self.config["output"], self.run_id)

    @property
    def checkpoints(self) -> str:
        return storage.join(self.output, "checkpoints")

    def start(self, faults: Mapping[int, Fault] | None = None) -> Attempt:
        """Starts the next attempt; `faults` are by host."""
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
                (faults or {}).get(worker),
            )
            attempt.processes.append(fork(_run_trainer, *arguments))
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
        after the one it continued from."""
        lines = [json.loads(line) for line in self._trained.read_text().splitlines()]
        final: dict[int, dict[int, list[int]]] = {}
        for number in range(self.attempts):
            mine = [line for line in lines if line["attempt"] == number]
            if not mine:
                continue
            resumed = min(line["step"] for line in mine)
            final = {step: by_host for step, by_host in final.items() if step < resumed}
            for line in mine:
                by_host = final.setdefault(line["step"], {})
                assert line["worker"] not in by_host, (
                    f"host {line['worker']} trained step {line['step']} twice in attempt {number}"
                )
                by_host[line["worker"]] = line["records"]
        for step, by_host in final.items():
            assert len(by_host) == self.hosts, f"step {step} was trained by hosts {sorted(by_host)} only"
        return {
            step: sorted(record for records in by_host.values() for record in records)
            for step, by_host in final.items()
        }


def resumed_at(text: str) -> int:
    """The step that a trainer's output says it continued from; 0 when it started from the beginning."""
    steps = re.findall(r"going on from \S+/step-(\d+)", text)
    return int(steps[-1]) if steps else 0


# --- in the trainer's process


def _run_trainer(environment: dict[str, str], config: str, log: str, trained: str, fault: Fault | None) -> None:
    become_trainer(environment, config, log)
    from training.storage import gcs as bucket

    bucket.timeouts = bucket.Timeouts(connect=20, silence=20, deadline=15, first_delay=0.02, longest_delay=0.3)
    _inject(fault or Fault("never"), trained)
    run_trainer()


class _Injector:
    """Makes a fault happen when its point is passed."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.passed = fault, 0

    def is_due(self, point: str) -> bool:
        if point != self.fault.point:
            return False
        self.passed += 1
        return self.passed == self.fault.count

    def pass_point(self, point: str) -> None:
        if self.is_due(point):
            self.trigger()

    def trigger(self) -> None:
        def send_signals() -> None:
            for number in self.fault.signals:
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        if self.fault.delay:
            threading.Timer(self.fault.delay, send_signals).start()
        else:
            send_signals()


def _inject(fault: Fault, trained: str) -> None:
    """Wraps the trainer's functions with the points, and with a record of each step in the file `trained`."""
    from training.backends.torch_xla.backend import TorchXla
    from training.distributed.tcp_allreduce import TcpAllReduce
    from training.models import export

    injector = _Injector(fault)
    _inject_into_storage(injector)
    _inject_into_saves(injector)
    _inject_into_rendezvous(injector)
    _inject_into_steps(injector, trained)
    for owner, name, point in (
        (TcpAllReduce, "sum", "exchanging gradients"),
        (TorchXla, "evaluate", "evaluating"),
        (export, "write_model_folder", "exporting"),
    ):
        setattr(owner, name, _before(getattr(owner, name), injector, point))


def _before(real: Callable[..., Any], injector: _Injector, point: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        injector.pass_point(point)
        return real(*arguments, **options)

    return call


def _inject_into_storage(injector: _Injector) -> None:
    from training.checkpoint.format import MANIFEST
    from training.storage.types import local_errors

    real_write, real_delete = storage.write, storage.delete

    def write(url: str, data: bytes, *, create_only: bool = False) -> storage.Stat:
        name = storage.name_of(url)
        file = "the part" if name.startswith("part-") else "the manifest" if name == MANIFEST else None
        if file is None:
            return real_write(url, data, create_only=create_only)
        injector.pass_point(f"before {file}")
        if injector.is_due(f"within {file}"):
            if not storage.is_remote(url):
                with local_errors(url), storage._replacing(url, create_only) as descriptor:
                    os.write(descriptor, data[: len(data) // 2])
                    injector.trigger()
            injector.trigger()
        written = real_write(url, data, create_only=create_only)
        injector.pass_point(f"after {file}")
        return written

    def delete(url: str) -> None:
        real_delete(url)
        if storage.name_of(url) == MANIFEST:
            injector.pass_point("between deletions")

    storage.write, storage.delete = write, delete  # type: ignore[assignment]


def _inject_into_saves(injector: _Injector) -> None:
    from training.checkpoint.snapshot import Snapshot
    from training.checkpoint.writer import CheckpointWriter

    real_save, real_copy = CheckpointWriter.save, Snapshot._run

    def save(writer: Any, step: int, specs: Any, start_snapshot: Callable[[Any], Any], state: Any) -> None:
        def start(views: Any) -> Any:
            injector.pass_point("copying")
            return start_snapshot(views)

        real_save(writer, step, specs, start, state)

    def copy(snapshot: Any) -> None:
        real_copy(snapshot)
        injector.pass_point("copied")

    CheckpointWriter.save, Snapshot._run = save, copy  # type: ignore[assignment,method-assign]


def _inject_into_rendezvous(injector: _Injector) -> None:
    from training.distributed.rendezvous import RendezvousClient

    real_meet, real_post = RendezvousClient.meet, RendezvousClient._post

    def post(client: Any, *messages: dict[str, Any]) -> None:
        real_post(client, *messages)
        if any(str(message.get("arrive", "")).startswith("checkpoint ") for message in messages):
            injector.pass_point("waiting for the others")

    def meet(client: Any, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        if name == "start":
            injector.pass_point("starting")
        payloads = real_meet(client, name, payload, seconds)
        if name.startswith("checkpoint "):
            injector.pass_point("everyone has met")
        return payloads

    RendezvousClient.meet, RendezvousClient._post = meet, post  # type: ignore[assignment,method-assign]


def _inject_into_steps(injector: _Injector, trained: str) -> None:
    from training.trainer import Trainer

    announce_step, read_results_due = Trainer.announce_step, Trainer.read_results_due

    def announce(trainer: Any) -> Any:
        if not trainer.progress.trained:
            injector.pass_point("compiling")
        injector.pass_point("a step")
        return announce_step(trainer)

    def read_results(trainer: Any, pending: Any, batch: Any, signals: Any) -> Any:
        line = {
            "attempt": trainer.run.cluster.attempt,
            "worker": trainer.run.cluster.worker,
            "step": trainer.progress.step,
            "records": [int(record) for record in batch.records],
        }
        descriptor = os.open(trained, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
        return read_results_due(trainer, pending, batch, signals)

    Trainer.announce_step, Trainer.read_results_due = announce, read_results  # type: ignore[method-assign]
