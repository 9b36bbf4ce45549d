"""Promises about what a run leaves: evaluations, the best checkpoint and those that are kept, metrics, and records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.simulation.trainer.plan import KILLED, RUN
from training.errors import Exit
from training.storage import join

_PRINTED = re.compile(r"evaluation after step (\d+): loss (\S+)")
_HOW = {
    Exit.FINISHED: "finished", Exit.FAILED: "failed", Exit.BAD_INPUT: "refused", Exit.SAVED: "stopped",
    Exit.LOST_PEER: "lost a host",
}  # fmt: skip
_ENDED_BY_A_THREAD = (
    "could not stop in good order", "took longer than", "tpu-train: lost peer:", "tpu-train: stopped:",
)  # fmt: skip


class BrokenPromises:
    """Records the promises that are broken."""

    def __init__(self, world) -> None:
        self._world, self._plan = world, world.plan
        self.violations: list[tuple[str, str]] = []  # (promise, observation)

    def broken(self, promise: str, what: str) -> None:
        self._world.scheduler.note(f"BROKEN: {promise}: {what}")
        self.violations.append((promise, what))


class EvaluationPromises(BrokenPromises):
    def __init__(self, world) -> None:
        super().__init__(world)
        self._evaluated: set[int] = set()  # steps of checkpoints that were committed after their evaluation

    def restored(self, backend, step: int) -> None:
        """Notes that a host begins after `step` steps, perhaps evaluated before."""
        stored = self.manifest_of(step)  # None: deleted since the host read it
        evaluated = step in self._evaluated if stored is None else stored.state["evaluated"] == step
        if -1 in backend.evaluated or evaluated:
            backend.evaluated.add(step)

    def none_is_left_out(self, host, step: int) -> None:
        """Before a host trains on, it has evaluated all batches where evaluation.every says so, in some attempt."""
        if self._is_due(step) and step not in host.backend.evaluated:
            self.broken("evaluations are complete", f"{host.name} begins step {step} without an evaluation before it")

    def what_is_printed_is_complete(self, host, message: str) -> None:
        """The figures that a host prints are those of the whole evaluation set."""
        for step, loss in _PRINTED.findall(message):
            if float(loss) != self._world.curriculum.figures[int(step)] and not host.group.glitch:
                self.broken("evaluations are complete", f"{host.name} prints loss {loss} after step {step}")

    def a_checkpoint_knows_the_best(self, step: int, state: Mapping[str, Any], by: str) -> None:
        """A checkpoint names the best step of all evaluations until then, which is committed, and its own figures."""
        figures, group = self._world.curriculum.figures, self._world.group(by.partition(".")[0])
        evaluated = state["evaluated"] == step
        self._evaluated |= {step} if evaluated else set()
        seen = (state["best"], state["figures"])
        expected = (self._best(step if evaluated else step - 1), {"loss": figures[step]} if evaluated else None)
        if seen != expected:
            self.broken("a checkpoint knows the best", f"{by} committed step {step} with {seen}, not {expected}")
        if self._has_best and self._is_due(step) and not evaluated and not group.asked_to_stop:
            self.broken("evaluations are complete", f"{by} committed step {step} before its evaluation")
        if expected[0] and expected[0]["step"] != step:
            self._is_there(expected[0]["step"], by)

    def what_is_kept_is_not_deleted(self, step: int, by: str) -> None:
        """No program deletes one of the newest whole checkpoints, one that `keep_every` keeps, or the best."""
        plan, manifest = self._plan, self.manifest_of(self.newest_whole)
        best = manifest.state["best"] if manifest else None
        whole = {step, *self.find_whole()}
        if self._world.group(by.partition(".")[0]).began < self._world.poison_noticed and self._world.poisoned:
            whole.add(self._world.poisoned)  # another program finds out that it can't be gone on from
        kept = {*sorted(whole)[-plan.keep_last :], *([best["step"]] if best else [])}
        if self.overtaken:
            return  # retention may have counted these, which have no parts
        if step in kept or (plan.keep_every and step % plan.keep_every == 0):
            self.broken("what is kept is not deleted", f"{by} deleted step {step} of {sorted(whole)}; best: {best}")

    def the_summary_has_the_last_and_the_best(self, summary: Mapping[str, Any], by: str) -> None:
        steps = self._plan.steps
        expected = (self._world.curriculum.figures[steps], self._best(steps))
        seen = (summary["eval_loss"], summary["best"])
        if seen != expected:
            self.broken("the summary has the last and the best", f"{by} wrote {seen}, not {expected}")

    def finished_means_evaluated(self, host) -> None:
        """A process that exits with 0 has evaluated the last state, and the best one is there."""
        if self._plan.steps not in host.backend.evaluated:
            self.broken("evaluations are complete", f"{host.name} exits with 0 without the last one")
        if best := self._best(self._plan.steps):
            self._is_there(best["step"], host.name)

    @property
    def _has_best(self) -> bool:
        return self._plan.best and self._plan.evaluate_every is not None

    def _is_due(self, step: int) -> bool:
        return self._plan.evaluate_every is not None and step > 0 and step % self._plan.evaluate_every == 0

    def _best(self, last: int) -> dict[str, Any] | None:
        """Returns the first of the best evaluations until step `last`, as a checkpoint has it; None without one."""
        figures = self._world.curriculum.figures
        steps = [step for step in range(1, last + 1) if self._is_due(step) or step == self._plan.steps]
        if not self._has_best or not steps:
            return None
        best = min(steps, key=lambda step: figures[step])
        return {"step": best, "metric": "loss", "mode": "min", "value": figures[best]}

    def _is_there(self, step: int, by: str) -> None:
        if step not in self.find_whole() and not self._world.damaged and not self._world.given_up:
            self.broken("the best is kept", f"{by}: step {step} is the best, and there is no such checkpoint")


class RecordPromises(BrokenPromises):
    """About the metrics of a run's steps, and the record of each attempt's end."""

    def what_host_0_did_is_recorded(self, host, claim: str) -> None:
        """Checks a process of host 0, which records. `claim`: the name of its attempt's record."""
        # Storage loses metrics with such a fault, or two starts write them at once.
        may_lose = any(fault.kind in ("telemetry", "cut line", "second start") for fault in self._plan.faults)
        recorders = [group.hosts[0] for group in self._world.groups]
        said = [line for each in recorders for line in each.lines if "was started again" not in line]
        warned = any("not recorded" in line or "metrics" in line for line in said)
        # A cut hangs the upload, for which commits wait some seconds only; a kill before its end loses it.
        hung = any(each.hurt and each.code == KILLED for each in recorders)
        if may_lose or hung or self._world.disturbed or warned or host.backend is None or host.code not in _HOW:
            return
        if not any(words in line for line in host.lines for words in _ENDED_BY_A_THREAD):
            self.the_end_is_recorded(host, join(RUN, "attempts", claim.removesuffix(".json") + ".end.json"))
        if host.code == Exit.FINISHED:
            self.the_metrics_are_whole(host)

    def the_end_is_recorded(self, host, url: str) -> None:
        """The record of an attempt's end agrees with the exit code."""
        record = self._read(url)
        how = json.loads(record)["how"] if record else None
        if how != _HOW[Exit(host.code or 0)]:
            self.broken("the end is recorded", f"{host.name} exits with {host.code}, and its record says {how}")

    def the_metrics_are_whole(self, host) -> None:
        """The history of a finished run has the losses of all steps that are due, once and in order, and all its
        evaluations, whichever attempts were killed: an attempt stores its lines before it commits their step."""
        plan, right, every = self._plan, self._world.curriculum, self._world.config.train.log_every
        history = [json.loads(line) for line in (self._read(join(RUN, "metrics.jsonl")) or b"").splitlines()]
        seen = [(line["step"], line["loss"]) for line in history if "loss" in line]
        due = [step for step in range(1, plan.steps + 1) if step % every == 0 or step == plan.steps]
        lost = {number for number in plan.skipped if number % 2}  # their losses are not finite
        expected = [(step, None if step - 1 in lost else right.losses[step - 1]) for step in due]
        if seen != expected:
            self.broken("the metrics are whole", f"{host.name} left {seen}, not {expected}")
        between = plan.evaluate_every or plan.steps
        figures = {(line["step"], line["eval_loss"]) for line in history if "eval_loss" in line}
        evaluated = {(step, right.figures[step]) for step in (*range(between, plan.steps, between), plan.steps)}
        if figures != evaluated:
            self.broken("the metrics are whole", f"{host.name} left the evaluations {figures}, not {evaluated}")

    def _read(self, url: str) -> Any:
        stored = self._world.bucket.objects.get(url)
        return stored.data if stored else None
