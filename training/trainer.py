"""The training loop: `train` starts everything up, `Trainer.loop` is the loop, for every backend and task.

Step number k trains on batch k and is a function of the state, k and the batch alone; "step 40" in messages and
checkpoints means that 40 steps are done. All hosts run this code and must make the same choices, from the step number
or from a `StepResult`, which all hosts read after the same step: a host that is asked to stop says so in the signals of
its next step, and all hosts stop after reading that step's result.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from training import run_end, run_setup, storage
from training.backends.protocol import Backend
from training.batch import HostBatch, Pending, Signals, StepResult
from training.checkpoint.config import are_minutes_over, is_step_due
from training.checkpoint.format import step_folder
from training.checkpoint.reader import Restored, checkpoint_name, restore
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.config import TrainerConfig
from training.distributed.cluster import Cluster, device_kind
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import LostPeer, NonFinite, StopRequested, TrainError
from training.evaluate import evaluate_all
from training.models.flops import WorkCounter, mfu, peak_flops
from training.models.hub import BackgroundUploader
from training.optim.schedule import learning_rate
from training.profiler import Profiler
from training.progress import Compilations, Evaluations, NonFiniteHistory
from training.run_end import Background
from training.run_setup import Dependencies, Run
from training.telemetry import console
from training.telemetry.console import warn
from training.telemetry.host_progress import HostProgress, PhaseTimer
from training.telemetry.metrics import AttemptInfo, MetricsLog, finite_or_none
from training.telemetry.progress_line import ProgressLine
from training.telemetry.report import NonFiniteStep, write_nonfinite
from training.telemetry.writer import HURRIED_SECONDS, MetricsWriter

_FINISH_SECONDS = 60.0  # for the last metrics to be written

FinishedStep = tuple[StepResult, HostBatch]

FIRST_STEP_SECONDS = 1800.0  # to compile, start and read the first step
RECORD_SECONDS = 30.0  # for host 0 to record that a step was not finite, before any host leaves


def train(
    config: TrainerConfig,
    cluster: Cluster,
    rendezvous: Rendezvous,
    shutdown: ShutdownRequest,
    timer: PhaseTimer,
    dependencies: Dependencies | None = None,
) -> dict[str, Any]:
    """Trains to the last step or an early stop, evaluates, saves and exports. Returns the summary, on every host; host
    0 also writes it to the run's folder. `timer` times this process, and is the clock of checkpoint.every_minutes.
    Raises StopRequested when a host was asked to stop: the run goes on from its last commit; TrainError for other ends.
    Ends the process if opening the devices or the first step takes too long."""
    dependencies = dependencies or Dependencies()
    host_progress = HostProgress(timer, dependencies.machine)
    with host_progress.writing():
        run = run_setup.open_run(config, cluster, rendezvous, shutdown, timer, host_progress, dependencies)
        host_progress.limit = max(FIRST_STEP_SECONDS, config.rendezvous.start_seconds, config.rendezvous.seconds)
        host_progress.program = run.program
        background = Background()
        recording = run_end.record_attempt_end(run, background) if cluster.is_first else contextlib.nullcontext()
        with recording:
            trainer = open_trainer(run, background)
            try:
                trainer.loop()
                return trainer.finish()
            except NonFinite as error:
                raise trainer.judge(error) from None


def open_trainer(run: Run, background: Background) -> Trainer:
    """Builds the model and restores the newest usable checkpoint, if any; writes another run's model, if that is where
    this one starts. On host 0 also opens the metrics and the uploads to the Hub, in `background`. Raises TrainError."""
    cluster, dependencies = run.cluster, run.dependencies
    with run.timer.phase("start"):
        run = replace(run, config=run_setup.with_starting_model(run.config, run.folder, cluster, run.rendezvous))
        run.rendezvous.set_phase("loading the framework")
    with run.timer.phase("imports"):
        backend = dependencies.open_backend(run.config, cluster, run.rendezvous, run.task)
    for phase, seconds in backend.opening_seconds.items():
        run.timer.move("imports", phase, seconds)
    with run.timer.phase("restore"):
        warn_here = warn if cluster.is_first else lambda _: None
        history = NonFiniteHistory.read(run.folder, run.program, run.rendezvous, cluster.is_first, dependencies.storage)
        restored = restore(
            storage.join(run.folder, "checkpoints"), run.rendezvous, run.identity, backend.load_state, warn_here,
            dependencies.storage, dependencies.machine.threads, history.suspects, run.config.rendezvous.seconds,
            backend.slice_to_load,
        )  # fmt: skip
        trainer = Trainer(run, backend, history, restored, background)
        run.console.print(
            f"run {cluster.run_id}, attempt {cluster.attempt}: {len(cluster.all_addresses)} host(s), "
            f"{backend.devices} device(s), {run.precision}, {run.task.data.train.records} records"
        )
        if restored:
            trainer.resume(restored)
        if cluster.is_first:
            trainer.open_background()
    return trainer


class Trainer:
    """The loop of one attempt."""

    def __init__(
        self, run: Run, backend: Backend, history: NonFiniteHistory, restored: Restored | None, background: Background
    ) -> None:
        """Begins at step 0: `resume` takes over what was restored. `history`: of earlier attempts. Raises as
        `Run.model_config`."""
        self.run, self.backend, self.history, self.restored = run, backend, history, restored
        self.background, self.host_progress = background, run.host_progress
        self.host_progress.figures = ProgressLine(0, run.config.train.steps)
        self._recording = run.dependencies.machine.threads.lock()
        self._is_recorded = False  # that a step of this attempt was not finite
        self.checkpoints = CheckpointWriter(
            storage.join(run.folder, "checkpoints"), run.cluster, run.rendezvous,
            RunDescription(run.identity, run.config.canonical(), run.code, run.token), run.config.checkpoint,
            fence=run.fence, warn=warn, meeting_seconds=run.config.rendezvous.seconds,
            storage=run.dependencies.storage, machine=run.dependencies.machine,
        )  # fmt: skip
        self.checkpoints.on_nonfinite = self.record
        train, stopping = run.config.train, run.config.train.early_stopping
        self.progress = background.progress
        self.evaluations = Evaluations(
            run.config.best, run.task.data.hashes()["evaluation data"], patience=stopping.patience if stopping else None
        )
        self.compilations = Compilations(backend, run.timer, run.task.shapes, strict=train.strict, warn=warn)
        self.work = WorkCounter(run.model_config(), run.cluster.hosts)
        self._in_flight: deque[tuple[Pending, HostBatch]] = deque()
        self._saved_at = run.timer.total()  # seconds; of the last save
        self._rate = StepRate()
        self._start_seconds: dict[str, float] | None = None  # to the first step's result; empty when it was recorded

    def resume(self, restored: Restored) -> None:
        """Takes over the counts and evaluations of a checkpoint, whose tensors the backend has. Newer ones that were
        passed over as damaged may be written again. Prints where the run goes on."""
        step, state = restored.manifest.step, restored.manifest.state
        self.progress.resume(step, state)
        self.host_progress.figures = replace(self.host_progress.figures, step=step)
        self.evaluations.resume(state)
        self.checkpoints.continue_from(step, restored.damaged)
        self.run.console.print(f"going on from {self._checkpoint_url(step)}")

    def open_background(self) -> None:
        """Starts the thread of host 0 that writes metrics, and prepares uploads to the Hub. An attempt that a newer one
        has fenced writes no metrics: they would supersede the newer one's."""
        run, config, dependencies = self.run, self.run.config, self.run.dependencies
        info = AttemptInfo(
            run.folder, run.cluster.attempt, self.progress.step, run.token, dependencies.storage, config.canonical()
        )
        trackers = (*dependencies.trackers, *config.telemetry.trackers)
        log = MetricsWriter(partial(MetricsLog, info, trackers, run.fence), warn, dependencies.machine)
        self.background.log, self.checkpoints.before_commit = log, log.flush
        if config.hub:
            self.background.uploader = BackgroundUploader(
                config.hub, run.folder, warn, dependencies.push, dependencies.machine
            )

    # --- the loop

    def loop(self) -> None:
        """Waits for all hosts, runs the steps that are left (fewer with early stopping) with their saves and
        evaluations, and saves the last state. Raises StopRequested, after the commit, if a host was asked to stop;
        NonFinite and other TrainErrors. Ends the process if the first result takes too long."""
        run, progress, steps = self.run, self.progress, self.run.config.train.steps
        self.begin()
        with (
            self.open_profiler() as self.profiler,
            contextlib.closing(self.backend.batches(run.task, progress.step)) as batches,
        ):
            while progress.step < steps and not progress.signals.stop and not self.evaluations.ends_training:
                with self.profiler.step(progress.step):
                    with run.timer.phase("data_wait"), self.part("data_wait"):
                        batch = next(batches)
                    signals = self.announce_step()
                    with self.compilations.timed("step"), self.limit_first_step():
                        with self.part("dispatch"):
                            pending = self.backend.step(progress.step, batch.arrays, signals)
                        results = self.read_results_due(pending, batch, signals)
                    self.take_results(results)
                    self.check_step(batch)
                self.profiler.check()
                if progress.step < steps:
                    self.save_and_evaluate_if_due()
        if self.evaluations.ends_training and progress.step < steps:
            evaluations, best = self.evaluations.since_best, self.evaluations.best
            run.console.print(console.format_early_end(progress.step, evaluations, best))
        if run.config.best and run.config.evaluation.at_end:
            self.evaluate()  # before the save, which keeps the figures
        self.save()
        if progress.signals.stop:
            self.stop()

    def begin(self) -> None:
        """Prepares saves and waits for all hosts; repeats the evaluation in which an earlier attempt was stopped."""
        run, step = self.run, self.progress.step
        self.checkpoints.prepare(self.backend.tensor_specs(), self.backend.state_slices())
        self.progress.signals = Signals(stop=any(run.rendezvous.meet("ready", run.shutdown.requested)))
        run.shutdown.nothing_to_save = False
        if 0 < step < run.config.train.steps and is_step_due(step, run.config.evaluation.every):
            self.evaluate()

    def save_and_evaluate_if_due(self) -> None:
        """Saves and evaluates, each if due after the step just started. A checkpoint that may be the best one is saved
        after the evaluation, and keeps the figures; any other before it. Raises as `save` and `evaluate`."""
        config, step = self.run.config, self.progress.step
        save_due = is_step_due(step, config.checkpoint.every_steps) or self.progress.signals.save
        if save_due and not config.best:
            self.save()
        if is_step_due(step, config.evaluation.every):
            self.evaluate()
        if save_due or self.evaluations.is_best(step):
            self.save()

    def open_profiler(self) -> Profiler:
        """Returns a profiler of this host's steps by the backend's own tracer, which takes requests from now on."""
        run, worker, dependencies = self.run, self.run.cluster.worker, self.run.dependencies
        return Profiler(
            dependencies.profiles(worker), storage.join(run.folder, "profiles"), worker,
            partial(run_setup.open_tracer, run.config.backend), lambda: self.progress.finished, warn,
            dependencies.storage, dependencies.machine,
        )  # fmt: skip

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Names the block in profiles, and counts its seconds in this host's line of progress. Only within `loop`."""
        with self.host_progress.part(name), self.profiler.scope(name.replace("_", " ")):
            yield

    def announce_step(self) -> Signals:
        """Tells the other hosts that this one starts the next step. Returns what this host asks of all hosts in the
        step: a stop, and on host 0 a save when checkpoint.every_minutes have passed."""
        first = "" if self.progress.trained else ", the first of this attempt"
        self.run.rendezvous.set_phase(f"step {self.progress.step}{first}")
        since_save = self.run.timer.total() - self._saved_at
        save_due = self.run.cluster.is_first and are_minutes_over(self.run.config.checkpoint.every_minutes, since_save)
        return Signals(self.run.shutdown.requested, save_due)

    def read_results_due(self, pending: Pending, batch: HostBatch, signals: Signals) -> list[FinishedStep]:
        """Counts a step, whose result `pending` gives, as started and in flight; waits for the oldest steps until at
        most `backend.in_flight` are left, or none if a host without others asks to stop in `signals`. Returns their
        results, oldest first. Raises as `Pending`."""
        self._in_flight.append((pending, batch))
        self.progress.start_step()
        self.work.add(batch.arrays)
        # A host without others need not wait until all have read the result of this step.
        is_last = signals.stop and self.run.cluster.hosts == 1
        with self.part("result"):
            return self._read_results(leave=0 if is_last else self.backend.in_flight)

    def check_step(self, batch: HostBatch) -> None:
        """Raises errors of other hosts and of saves; warns, or with train.strict raises, if the step just started, of
        `batch`, compiled again. Tells the uploader of a new commit."""
        self.checkpoints.check()
        self.run.rendezvous.check()
        if self.background.uploader:
            self.background.uploader.note_commit(self.checkpoints.committed)
        self.compilations.check_step(self.progress.step - 1, batch)

    def save(self) -> None:
        """Waits for the steps in flight and for the save before, and saves the state if it is not saved, by default in
        the background. Raises as `finish_steps`, and errors of the save before; `check_step` raises those of this
        one."""
        progress = self.progress
        self.finish_steps()
        progress.signals, self._saved_at = Signals(stop=progress.signals.stop), self.run.timer.total()
        if self.checkpoints.newest == progress.step:
            return
        self.run.rendezvous.set_phase(f"copying the state of step {progress.step}")
        with self.run.timer.phase("checkpoint"):
            losses = {"first_loss": progress.first_loss, "last_loss": progress.last_loss}
            state = {**losses, **self.evaluations.state(progress.step), "skipped_steps": progress.skipped}
            specs, split = self.backend.tensor_specs(), self.backend.state_slices()
            self.checkpoints.save(progress.step, specs, self.backend.snapshot_state, state, split)

    def evaluate(self) -> None:
        """Waits for the steps in flight and evaluates; shows and keeps the figures. Does nothing if this step was
        evaluated; breaks off if all hosts are to stop. Raises as `finish_steps` and `evaluate_all`."""
        run, step = self.run, self.progress.step
        if self.evaluations.step == step or self.progress.signals.stop:
            return
        self.finish_steps()
        with self.compilations.evaluation():
            total = evaluate_all(
                run.task, self.backend, run.rendezvous, run.shutdown, f"evaluation after step {step}",
                self.host_progress.count_batch,
            )  # fmt: skip
        if total.signals.stop:
            self.progress.signals = Signals(stop=True)
            return
        self.evaluations.record(step, run.task.figures(total), total.counts)
        run.console.print(f"evaluation after step {step}: {console.format_figures(self.evaluations.figures)}")
        if self.evaluations.nonfinite and run.cluster.is_first:
            why = "" if total.sums["weight"] else "; all predictions of its data have weight 0"
            warn(f"the evaluation after step {step} is not finite: {', '.join(self.evaluations.nonfinite)}{why}")
        if self.background.log:
            self.background.log.log(step, {f"eval_{name}": value for name, value in self.evaluations.figures.items()})

    def stop(self) -> None:
        """Waits for the commit on all hosts, and shortly for the metrics; then raises StopRequested: exit code 75."""
        step = self.progress.step
        self.run.rendezvous.set_phase(f"stopping after step {step}")
        self.checkpoints.wait()
        self.run.rendezvous.meet("stop", step, self.checkpoints.meeting_seconds)
        if self.background.log:
            self.background.log.finish(HURRIED_SECONDS)
        raise StopRequested(f"stopped after step {step}, which is committed: {self._checkpoint_url(step)}")

    def finish(self) -> dict[str, Any]:
        """Evaluates and exports, if configured, compares the hosts' weights, and waits for the last save and for the
        upload to the Hub. Returns the summary, which host 0 writes. Raises StopRequested if a host was asked to stop
        before the upload (during it, that only cuts it short), the error of the last save, and other TrainErrors:
        weights differ, a host is lost, or the export fails."""
        run = self.run
        if run.config.data.evaluation and run.config.evaluation.at_end:
            self.evaluate()
        if self.progress.signals.stop:
            self.stop()
        with run.timer.phase("checkpoint"):
            self.checkpoints.release()
        seconds = self.checkpoints.meeting_seconds
        checksum, replaced = run_end.compare_weights(run, self.backend, self.progress.replaced, seconds)
        best = self.evaluations.best if run.config.train.early_stopping else None
        result_step = int(best["step"]) if best else self.progress.step
        if run_end.export_model(run, self.backend, None if result_step == self.progress.step else result_step):
            self.stop()
        hub = None
        if self.background.uploader:
            run.rendezvous.set_phase("waiting for the upload to the Hub")
            with run.timer.phase("upload"):
                hub = self.background.uploader.finish(result_step, is_hurried=run.is_hurried)
        summary = self.build_summary(checksum, replaced, hub)
        if self.background.log:
            self.background.log.finish(_FINISH_SECONDS, is_hurried=run.is_hurried)
            run_end.write_summary(run, self.evaluations, summary)
        return summary

    def build_summary(self, checksum: str, replaced: int, hub: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the values of summary.json. `checksum`: of the weights; `replaced`: rows of all hosts that replaced
        damaged records; `hub`: the result of the upload, if there was one."""
        run, progress, cluster = self.run, self.progress, self.run.cluster
        count, compile_seconds = self.backend.compilations()
        step_seconds, seconds = run.step_seconds(), run.timer.report()
        examples = progress.trained * run.config.train.global_batch_size
        figures = finite_or_none(self.evaluations.figures)
        return {
            "run_id": cluster.run_id,
            "attempt": cluster.attempt,
            "hosts": len(cluster.all_addresses),
            "devices": self.backend.devices,
            "precision": run.precision,
            "steps": progress.step,
            "first_loss": progress.first_loss,
            "last_loss": progress.last_loss,
            **{f"eval_{name}": figures.get(name) for name in run.task.figure_names},
            "best": self.evaluations.best,
            "examples_per_second": examples / step_seconds if step_seconds else 0.0,
            "tokens_per_second": round(self.work.tokens / step_seconds, 1) if step_seconds else 0.0,
            "mfu": mfu(self.work.flops, step_seconds, peak_flops(cluster.accelerator_type, device_kind())),
            "checkpoint": self._checkpoint_url(progress.step),
            "committed_step": self.checkpoints.committed,
            "model": run.model_folder if run.config.export.at_end else None,
            "hub": hub,
            "compilations": count,
            "compile_seconds": round(compile_seconds, 3),
            **self.backend.counters(),
            "preflight": self.backend.preflight(),
            "checkpoint_blocked_seconds": round(self.checkpoints.blocked_seconds, 3),
            "host_fallbacks": self.backend.fallbacks(),
            "skipped_records": replaced,
            "skipped_steps": progress.skipped,
            "not_finite": [f"eval_{name}" for name in self.evaluations.nonfinite],
            "final_weights_crc32c": checksum,
            "goodput": round(seconds.get("step", 0.0) / seconds["total"], 4),
            "seconds": seconds,
        }

    def judge(self, error: NonFinite) -> TrainError:
        """Waits, without limit, for the save in progress, which may hold the last finite state; records that a step or
        a state was not finite, as `record`. Returns the error that ends the attempt."""
        try:
            self.checkpoints.wait()
        except NonFinite as earlier:  # the saved state came before the step
            error = earlier
        except TrainError as problem:
            warn(f"the save in progress failed: {problem}")
        self.record(error)
        return self.history.judge(error, self.restored.manifest.step if self.restored else 0)

    def record(self, error: NonFinite) -> None:
        """Records on host 0, for later attempts, the first step of this attempt that was not finite, or warns that
        storage fails; later calls do nothing. All hosts call it, wait for the record, at most RECORD_SECONDS, and go on
        in any case: host 0 ends soon after the first host that leaves. Threads that save call this too: they learn that
        a state is not finite at different steps, while host 0 may wait in a step for a host that has left the loop."""
        manifest = self.restored.manifest if self.restored else None
        with self._recording:
            if self._is_recorded:
                return
            if self.run.cluster.is_first:
                restored, name = (manifest.step, checkpoint_name(manifest)) if manifest else (0, None)
                try:
                    record = NonFiniteStep(error.step, restored, name, self.run.program)
                    write_nonfinite(self.run.record_url, record, self.run.dependencies.storage)
                except storage.StorageError as problem:
                    warn(f"that step {error.step} was not finite is not recorded: {problem}")
            self._is_recorded = True
            with contextlib.suppress(LostPeer, StopRequested):
                self.run.rendezvous.meet("a step was not finite", seconds=RECORD_SECONDS)

    # --- results of steps

    def finish_steps(self) -> None:
        """Waits for all steps in flight; counts and reports their results. Raises NonFinite, and the
        backend's errors, such as LostPeer. Ends the process if the first step hangs (`limit_first_step`)."""
        with self.compilations.timed("step"), self.limit_first_step():
            results = self._read_results(leave=0)
        self.take_results(results)

    def _read_results(self, leave: int) -> list[FinishedStep]:
        """Waits for steps, oldest first, until `leave` are in flight. Returns their results. Raises as `Pending`."""
        finished = []
        while len(self._in_flight) > leave:
            pending, batch = self._in_flight.popleft()
            finished.append((pending.result(), batch))
        return finished

    def limit_first_step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that ends the process if its block takes longer than FIRST_STEP_SECONDS (or
        rendezvous.start_seconds, if longer) before the first result, which is the first sum over all devices, was read.
        Some frameworks wait for it when a step is started."""
        if self._start_seconds is not None:
            return contextlib.nullcontext()
        seconds = max(FIRST_STEP_SECONDS, self.run.config.rendezvous.start_seconds)
        return self.run.rendezvous.limit("the first step", seconds)

    def take_results(self, results: list[FinishedStep]) -> None:
        """Counts the results of steps. Host 0 shows and logs those due by train.log_every and the last one, announces
        the first, and warns of skipped ones (the first 5, then each 100th). Raises NonFinite."""
        train, log = self.run.config.train, self.background.log
        for result, batch in results:
            self.progress.finish_step(result, batch)
            step = self.progress.finished
            self.host_progress.finish_step(step)
            if self._start_seconds is None:
                self._start_seconds = self.run.timer.report()
                cached = self.backend.counters().get("programs_from_cache", 0)
                programs = self.backend.compilations()[0]
                attempt = self.run.cluster.attempt
                self.run.console.print(console.format_start(attempt, self._start_seconds, programs, cached))
            if log and result.skipped and (self.progress.skipped <= 5 or self.progress.skipped % 100 == 0):
                warn(f"{result.nonfinite(step - 1)}: its update was skipped ({self.progress.skipped} so far)")
            if log and (step % train.log_every == 0 or step == train.steps):
                self._report(log, step, result)

    def _report(self, log: MetricsWriter, step: int, result: StepResult) -> None:
        """Shows the progress line; sets its figures and device memory for the thread that writes this host's progress;
        queues the step's numbers, gradient norm and learning rate too, for the trackers. For a skipped step shows and
        sets the last finite loss, if any; the trackers get the step's own."""
        train, loss = self.run.config.train, result.loss
        if result.skipped and self.progress.last_loss is not None:
            loss = self.progress.last_loss
        waited = self.run.timer.seconds.get("data_wait", 0.0)
        seconds, data_wait = self._rate.update(self.run.step_seconds(), waited, self.progress.trained)
        rate = train.global_batch_size / seconds if seconds > 0 else 0.0
        remaining = (train.steps - step) * seconds
        self.run.console.progress(console.format_progress(step, train.steps, loss, rate, data_wait, remaining))
        used, total = self.backend.device_memory()
        self.host_progress.figures = replace(
            self.host_progress.figures,
            loss=loss, examples_per_second=round(rate, 2), data_wait=data_wait,
            left=console.format_remaining(remaining), device_memory_used=used, device_memory_total=total,
        )  # fmt: skip
        values = {
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": learning_rate(train, step - 1),
            "examples_per_second": rate,
            "data_wait": data_wait,
        }
        if self._start_seconds:
            values |= {f"start_{phase}_seconds": seconds for phase, seconds in self._start_seconds.items()}
            self._start_seconds = {}
        log.log(step, {**values, **({"skipped_steps": self.progress.skipped} if train.on_nonfinite == "skip" else {})})

    def _checkpoint_url(self, step: int) -> str:
        return storage.join(self.checkpoints.folder, step_folder(step))


class StepRate:
    """The seconds of a step, and the share of them that waited for the batch, between two updates."""

    def __init__(self) -> None:
        self._totals, self._rate = (0.0, 0.0, 0), (0.0, 0.0)  # of the last update

    def update(self, seconds: float, waited: float, steps: int) -> tuple[float, float]:
        """Returns the seconds of a step since the last update and their share, 0 to 1, that waited for batches; the
        former values if no step came since. `seconds`, `waited` and `steps` are totals so far."""
        earlier_seconds, earlier_waited, earlier_steps = self._totals
        if steps > earlier_steps:
            spent = seconds - earlier_seconds
            # A framework may count more seconds of compiling, which leave the step's, than the clock has.
            data_wait = min(1.0, (waited - earlier_waited) / spent) if spent > 0 else 0.0
            self._totals, self._rate = (seconds, waited, steps), (spent / (steps - earlier_steps), data_wait)
        return self._rate
