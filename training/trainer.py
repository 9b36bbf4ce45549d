"""The training loop: `train` starts everything up, `_Run.loop` is the loop, for every backend and task.

Step number k trains on batch k and is a function of the state, k and the batch alone; "step 40" in messages and
checkpoints means that 40 steps are done. All hosts run this code and must make the same choices. So every choice rests
on the step number, or on a `StepResult`, which all hosts read after the same step: a host that is asked to stop says so
in its next step's asks, and everyone stops after reading that step's outcome.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from training import storage
from training.backends.protocol import Backend
from training.batch import HostBatch, Pending, Signals, StepResult
from training.checkpoint.format import step_folder
from training.checkpoint.reader import restore
from training.checkpoint.retention import Best, EveryMinutes, EverySteps, Keep
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import StopRequested, TrainError
from training.evaluate import over_all
from training.models import export
from training.models.flops import WorkCounter, mfu, peak_flops
from training.models.hub import BackgroundUploader
from training.models.hugging_face import build_model_config
from training.optim.schedule import learning_rate
from training.registry import TASKS
from training.run_setup import (
    agree,
    claim,
    code_hash,
    device_kind,
    fence,
    model_identity,
    open_backend,
    open_task,
    with_starting_model,
)
from training.tasks.task import Task
from training.telemetry import html as page
from training.telemetry import text as report
from training.telemetry.attempt_end import AttemptContext, record_attempt_end
from training.telemetry.console import Console
from training.telemetry.metrics import MetricsLog
from training.telemetry.phase_timer import PhaseTimer


def train(
    config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, stopping: ShutdownRequest, clock: PhaseTimer
) -> dict[str, Any]:
    """Trains to the last step and returns the summary. Raises StopRequested when asked to stop, once the state is
    committed."""
    folder = storage.join(config.output, cluster.run_id)
    with clock.phase("start"):
        rendezvous.set_phase("opening the data")
        task = open_task(config, cluster)
        code = code_hash()
        token = agree(
            rendezvous,
            {"configuration": config.hash, "code": code, **task.data.hashes()},
            config.rendezvous.start_seconds,
        )
        record = {
            "run_id": cluster.run_id,
            "attempt": cluster.attempt,
            "began": round(time.time(), 3),
            "accelerator": cluster.accelerator_type if device_kind() == "TPU" else None,
            "hosts": cluster.addresses,
            "code": code,
            "config": config.canonical(),
        }
        start = claim(folder, cluster, rendezvous, token, record)
        fenced = fence(folder, cluster)
    ending = AttemptContext(Console(cluster.is_first))
    with record_attempt_end(folder, start, clock, ending, warn) if cluster.is_first else contextlib.nullcontext():
        run = _open(config, cluster, rendezvous, stopping, clock, task, code, token, ending, fenced)
        run.loop()
        return run.finish()


def _open(
    config: TrainerConfig,
    cluster: Cluster,
    rendezvous: Rendezvous,
    stopping: ShutdownRequest,
    clock: PhaseTimer,
    task: Task,
    code: str,
    token: str,
    ending: AttemptContext,
    fenced: Callable[[], None],
) -> _Run:
    """The model, as it was when the run was last committed."""
    folder = storage.join(config.output, cluster.run_id)
    with clock.phase("start"):
        network = model_identity(config)
        config = with_starting_model(config, folder, cluster, rendezvous)
        rendezvous.set_phase("loading the framework")
        backend = open_backend(config, cluster, rendezvous, task, token)
    with clock.phase("restore"):
        checkpoints = storage.join(folder, "checkpoints")
        identity = {
            **task.identity(),
            **network,
            "seed": config.seed,
            "train.global_batch_size": config.train.global_batch_size,
        }
        restored = restore(
            checkpoints, rendezvous, identity, backend.load_state, warn if cluster.is_first else lambda _: None
        )
        keep = Keep(config.checkpoint.keep_last, config.checkpoint.keep_every)
        description = RunDescription(identity, config.canonical(), code, token)
        background = config.checkpoint.background
        saver = CheckpointWriter(
            checkpoints, cluster, rendezvous, description, keep, background=background, fence=fenced, warn=warn
        )
        run = _Run(config, cluster, rendezvous, stopping, clock, task, backend, saver, folder, ending.console)
        run.say(
            f"run {cluster.run_id}, attempt {cluster.attempt}: {cluster.hosts} host(s), {backend.devices} device(s), {task.data.train.records} records"
        )
        if restored:
            run.go_on(restored.manifest.step, restored.manifest.state, restored.damaged)
        run.log = (
            MetricsLog(folder, cluster.attempt, run.step, trackers=("jsonl", "tensorboard"))
            if cluster.is_first
            else None
        )
        run.pushes = BackgroundUploader(config.hub, folder, warn) if config.hub and cluster.is_first else None
        ending.log, ending.step = run.log, lambda: run.step
        if run.pushes:
            ending.close.append(run.pushes.close)
    return run


NOTHING = Signals()


def warn(message: str) -> None:
    print(f"tpu-train: warning: {message}", file=sys.stderr, flush=True)


@dataclass
class _Run:
    config: TrainerConfig
    cluster: Cluster
    rendezvous: Rendezvous
    stopping: ShutdownRequest
    clock: PhaseTimer
    task: Task
    backend: Backend
    saver: CheckpointWriter
    folder: str
    screen: Console
    work: WorkCounter = field(init=False)
    log: MetricsLog | None = None  # host 0 only
    pushes: BackgroundUploader | None = None  # host 0 only
    step: int = 0  # steps done, or at least started
    seen: int = 0  # steps whose outcome was read
    asked: Signals = NOTHING  # what all hosts know that one of them wants
    pending: deque[tuple[Pending, HostBatch]] = field(default_factory=deque)
    losses: dict[str, float | None] = field(default_factory=lambda: {"first": None, "last": None})
    figures: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    confusion: Any = None  # (classes, classes) counts of the last evaluation, of a task that has them
    evaluated: int = -1  # steps that were done at the last evaluation
    best: dict[str, Any] | None = None  # its "step" and "value", with checkpoint.best
    trained: int = 0  # steps of this attempt
    last_save: float = field(default_factory=time.monotonic)
    reported: tuple[float, int] = (0.0, 0)  # seconds in steps, and steps, of this attempt at the last progress line
    compiled: int = 0  # programs of training steps
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # of the training batches of this attempt
    compiled_evaluating: int = 0  # programs of evaluations
    seconds_each: float = 0.0  # of a step, at the last progress line

    def __post_init__(self) -> None:
        self.work = WorkCounter(self.model_config(), self.cluster.hosts)

    def go_on(self, step: int, state: Any, damaged: tuple[int, ...]) -> None:
        self.step = self.seen = step
        self.losses.update(first=state["first_loss"], last=state["last_loss"])
        self.best, self.evaluated = state.get("best"), state.get("evaluated", -1)
        self.figures = state.get("figures") or {}
        self.saver.restored(step, damaged)
        self.say(f"going on from {storage.join(self.saver.folder, step_folder(step))}")

    def loop(self) -> None:
        self.saver.prepare(self.backend.tensor_specs())
        steps, save, evaluate = (
            self.config.train.steps,
            EverySteps(self.config.checkpoint.every_steps),
            EverySteps(self.config.evaluation.every),
        )
        self.asked = Signals(stop=any(self.rendezvous.meet("ready", self.stopping.requested)))
        self.stopping.nothing_to_save = False
        if 0 < self.step < steps and evaluate.due(self.step) and self.evaluated != self.step and not self.asked.stop:
            self.evaluate()  # an attempt before was stopped in it
        with contextlib.closing(self.backend.batches(self.task, self.step)) as batches:
            while self.step < steps and not self.asked.stop:
                with self.clock.phase("data_wait"):
                    batch = next(batches)
                self.train_on(batch)
                due = save.due(self.step) or self.asked.save
                if due and not self.config.checkpoint.best:
                    self.save()
                if evaluate.due(self.step) and self.step < steps and not self.asked.stop:
                    self.evaluate()
                if (due or self.is_best) and self.step < steps:
                    self.save()
        if (
            self.config.checkpoint.best
            and self.config.evaluation.at_end
            and self.evaluated != self.step
            and not self.asked.stop
        ):
            self.evaluate()
        self.save()
        if self.asked.stop:
            self.stop()

    def train_on(self, batch: HostBatch) -> None:
        self.rendezvous.set_phase(
            f"step {self.step}" if self.trained else f"step {self.step}, the first of this attempt"
        )
        minutes = EveryMinutes(self.config.checkpoint.every_minutes)
        with self.compiling("step"), self.clock.phase("step"):
            wishes = Signals(
                self.stopping.requested, self.cluster.is_first and minutes.due(time.monotonic(), self.last_save)
            )
            self.pending.append((self.backend.step(self.step, batch.arrays, wishes), batch))
            self.step, self.trained = self.step + 1, self.trained + 1
            self.work.add(batch.arrays)
            finished = self.read_outcomes(leave=self.backend.in_flight)
        self.observe(finished)
        self.saver.check()
        self.rendezvous.check()
        if self.pushes:
            self.pushes.committed(self.saver.committed)
        self.watch_compilations(batch)

    def watch_compilations(self, batch: HostBatch) -> None:
        """In an attempt the first step of each shape compiles, and no other does; the task knows how many shapes there
        are."""
        shape = tuple(array.shape for array in batch.arrays.values())
        first = shape not in self.shapes and len(self.shapes) < self.task.shapes
        self.shapes.add(shape)
        before, self.compiled = self.compiled, self.backend.compilations()[0] - self.compiled_evaluating
        if self.compiled > before and not first:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.arrays.items())
            message = f"step {self.step - 1} compiled another program, the {self.compiled}th of training; its arrays were {shapes}"
            if self.config.train.strict:
                raise TrainError(f"{message} (train.strict)")
            warn(message)

    def read_outcomes(self, leave: int) -> list[tuple[StepResult, HostBatch]]:
        """Waits for steps, oldest first, until `leave` are in flight."""
        finished = []
        while len(self.pending) > leave:
            pending, batch = self.pending.popleft()
            finished.append((pending.result(), batch))
        return finished

    def observe(self, finished: list[tuple[StepResult, HostBatch]]) -> None:
        for outcome, batch in finished:
            self.asked = Signals(self.asked.stop or outcome.signals.stop, self.asked.save or outcome.signals.save)
            loss = outcome.loss
            if not math.isfinite(loss):
                records = ", ".join(map(str, batch.records[:64]))
                last = (
                    f"the last finite one was {self.losses['last']}"
                    if self.losses["last"] is not None
                    else "none before was finite"
                )
                raise TrainError(
                    f"the loss of step {self.seen} is {loss}; {last}. Records of this host's batch: {records}"
                )
            self.seen += 1
            self.losses.update(first=loss if self.losses["first"] is None else self.losses["first"], last=loss)
            if self.log and (self.seen % self.config.train.log_every == 0 or self.seen == self.config.train.steps):
                self.report(self.log, loss)

    def report(self, log: MetricsLog, loss: float) -> None:
        """The progress line. The time of a step is averaged over the steps since the last line."""
        seconds, trained = self.step_seconds(), self.trained
        if trained > self.reported[1]:
            self.seconds_each = (seconds - self.reported[0]) / (trained - self.reported[1])
            self.reported = (seconds, trained)
        rate = self.config.train.global_batch_size / self.seconds_each if self.seconds_each > 0 else 0.0
        steps = self.config.train.steps
        self.screen.progress(
            report.format_progress(self.seen, steps, loss, rate, (steps - self.seen) * self.seconds_each)
        )
        log.log(
            self.seen,
            {
                "loss": loss,
                "learning_rate": learning_rate(self.config.train, self.seen - 1),
                "examples_per_second": rate,
            },
        )

    @property
    def is_best(self) -> bool:
        """Whether the present step was evaluated, and was better than all before. Then its checkpoint tells so: the
        evaluation comes first."""
        return self.best is not None and self.best["step"] == self.step == self.evaluated

    def save(self) -> None:
        """Begins to save the present step, unless that is done already. With `checkpoint.background` the next steps run
        meanwhile."""
        self.observe(self.read_outcomes(leave=0))
        self.asked, self.last_save = Signals(stop=self.asked.stop), time.monotonic()
        if self.saver.newest == self.step:
            return
        self.rendezvous.set_phase(f"copying the state of step {self.step}")
        with self.clock.phase("checkpoint"):
            state = {
                "first_loss": self.losses["first"],
                "last_loss": self.losses["last"],
                "evaluated": self.evaluated,
                "figures": self.figures if self.evaluated == self.step else None,
                "best": self.best,
            }
            self.saver.save(self.step, self.backend.tensor_specs(), self.backend.snapshot_state, state)

    def evaluate(self) -> None:
        """Over the whole evaluation set, unless all hosts learn meanwhile that one is to stop."""
        self.observe(self.read_outcomes(leave=0))
        compiled = self.backend.compilations()[0]
        with self.compiling("evaluation"), self.clock.phase("evaluation"):
            total = over_all(
                self.task, self.backend, self.rendezvous, self.stopping, f"evaluation after step {self.step}"
            )
        if total.signals.stop:
            self.asked = Signals(stop=True)
            return
        self.compiled_evaluating += self.backend.compilations()[0] - compiled
        self.figures, self.confusion = self.task.figures(total), total.counts
        self.evaluated = self.step
        if best := self.config.checkpoint.best:
            value = self.figures[best.metric]
            if Best(best.metric, best.mode).better(value, self.best["value"] if self.best else None):
                self.best = {"step": self.step, "metric": best.metric, "value": value}
        self.say(report.format_evaluation(self.step, self.figures))
        if self.log:
            self.log.log(self.step, {f"eval_{name}": value for name, value in self.figures.items()})

    def finish(self) -> dict[str, Any]:
        """After the last step and its save: evaluation, the last meeting, the summary."""
        if (
            self.config.data.evaluation
            and self.config.evaluation.at_end
            and not (self.config.checkpoint.best and self.evaluated == self.step)
        ):
            self.evaluate()
            if self.asked.stop:
                self.stop()
        with self.clock.phase("checkpoint"):
            self.saver.wait()
        told = self.rendezvous.meet("end", [self.weights_crc32c(), self.task.skipped])
        checksums = [checksum for checksum, _ in told]
        if len(set(checksums)) > 1:
            raise TrainError(
                f"the hosts ended with different weights (crc32c by host: {', '.join(checksums)}): they did not train the same model"
            )
        if self.cluster.is_first and self.config.export.at_end:
            with self.clock.phase("export"):
                model = storage.join(self.folder, "model")
                export.write_model_folder(
                    model,
                    self.backend.tensor_specs(),
                    self.backend.snapshot_state,
                    self.model_config(),
                    self.config.data.tokenizer,
                )
        if any(self.rendezvous.meet("exported", self.stopping.requested, self.config.rendezvous.start_seconds)):
            self.stop()
        hub = None
        if self.pushes:
            self.rendezvous.set_phase("waiting for the upload to the Hub")
            with self.clock.phase("upload"):
                hub = self.pushes.finish(self.step)
        count, compile_seconds = self.backend.compilations()
        step_seconds = self.step_seconds()
        seconds = self.clock.report()
        summary = {
            "run_id": self.cluster.run_id, "attempt": self.cluster.attempt, "hosts": self.cluster.hosts, "devices": self.backend.devices, "steps": self.step,
            "first_loss": self.losses["first"], "last_loss": self.losses["last"],
            **{f"eval_{name}": self.figures.get(name) for name in self.task.figure_names}, "best": self.best,
            "examples_per_second": self.trained * self.config.train.global_batch_size / step_seconds if step_seconds else 0.0,
            "tokens_per_second": round(self.work.tokens / step_seconds, 1) if step_seconds else 0.0,
            "mfu": mfu(self.work.flops, step_seconds, peak_flops(self.cluster.accelerator_type, device_kind())),
            "checkpoint": storage.join(self.saver.folder, step_folder(self.step)), "committed_step": self.saver.committed,
            "model": storage.join(self.folder, "model") if self.config.export.at_end else None, "hub": hub, "compilations": count,
            "compile_seconds": round(compile_seconds, 3), **self.backend.counters(), "preflight": self.backend.preflight(),
            "checkpoint_blocked_seconds": round(self.saver.blocked_seconds, 3),
            "host_fallbacks": self.backend.fallbacks(), "skipped_records": sum(skipped for _, skipped in told),
            "final_weights_crc32c": checksums[0], "goodput": round(seconds.get("step", 0.0) / seconds["total"], 4), "seconds": seconds,
        }  # fmt: skip
        if self.log:
            self.log.finish()
            if self.confusion is not None and self.task.labels:
                page.write_confusion(
                    self.folder, self.task.labels, self.confusion.reshape(len(self.task.labels), -1).tolist()
                )
            storage.write(storage.join(self.folder, page.SUMMARY_FILE), json.dumps(summary, indent=1).encode() + b"\n")
            self.say(report.format_summary(summary))
            self.say("summary: " + json.dumps(summary))
        return summary

    def stop(self) -> None:
        """Waits for the commit on all hosts, then leaves with exit code 75."""
        self.rendezvous.set_phase(f"stopping after step {self.step}")
        self.saver.wait()
        self.rendezvous.meet("stop", self.step)
        if self.log:
            self.log.finish()
        raise StopRequested(
            f"stopped after step {self.step}, which is committed: {storage.join(self.saver.folder, step_folder(self.step))}"
        )

    def weights_crc32c(self) -> str:
        """Of all weights in the order of their names: equal for equal bits."""
        crc = 0
        for name, info in sorted(self.backend.tensor_specs().items()):
            if name.startswith("model/"):
                data = bytearray(info.size)
                self.backend.snapshot_state({name: memoryview(data)}).wait()
                crc = int(google_crc32c.extend(crc, bytes(data)))
        return f"{crc:08x}"

    def compiling(self, phase: str) -> Compiling:
        return Compiling(self.clock, self.backend, phase)

    def step_seconds(self) -> float:
        return self.clock.seconds.get("step", 0.0) + self.clock.seconds.get("data_wait", 0.0)

    def model_config(self) -> dict[str, Any]:
        """The values of the model's config.json."""
        tokens, dropout = self.task.data.tokens, self.config.train.dropout
        return build_model_config(
            self.config.model,
            vocabulary=tokens.vocabulary,
            pad=tokens.pad,
            dropout=dropout,
            head=TASKS[self.config.task].head,
            labels=self.task.labels,
        )

    def say(self, message: str) -> None:
        self.screen.print(message)


@dataclass
class Compiling:
    """Counts the seconds that were spent compiling inside a phase as "compile"."""

    clock: PhaseTimer
    backend: Backend
    phase: str
    before: float = 0.0

    def __enter__(self) -> None:
        self.before = self.backend.compilations()[1]

    def __exit__(self, *_: object) -> None:
        self.clock.move(self.phase, "compile", self.backend.compilations()[1] - self.before)
