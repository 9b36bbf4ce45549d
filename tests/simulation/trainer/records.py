"""Promises about what a run leaves for its readers: the metrics of its steps, and the record of each attempt's end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from training.errors import Exit
from training.storage import join

if TYPE_CHECKING:
    from tests.simulation.trainer.hosts import Host
    from tests.simulation.trainer.world import World

_HOW = {
    Exit.FINISHED: "finished", Exit.FAILED: "failed", Exit.BAD_INPUT: "refused", Exit.SAVED: "stopped",
    Exit.LOST_PEER: "lost a host",
}  # fmt: skip
_KILLED = 128 + 9
_ENDED_BY_A_THREAD = (
    "could not stop in good order", "took longer than", "tpu-train: lost peer:", "tpu-train: stopped:",
)  # fmt: skip


class RecordPromises:
    def __init__(self, world: World, folder: str) -> None:
        self._world, self._folder = world, folder
        kinds = {fault.kind for fault in world.plan.faults}
        # Storage loses metrics then, or two starts write them at once.
        self._may_lose = not kinds.isdisjoint({"telemetry", "cut line", "second start"})

    def ended(self, host: Host, claim: str) -> None:
        """Checks a process of host 0, which records. `claim`: the name of its attempt's record."""
        recorders = [group.hosts[0] for group in self._world.groups]
        said = [line for each in recorders for line in each.lines if "was started again" not in line]
        warned = any("not recorded" in line or "metrics" in line for line in said)
        # A cut hangs the upload, for which commits wait some seconds only; a kill before its end loses it.
        hung = any(each.hurt and each.code == _KILLED for each in recorders)
        if self._may_lose or hung or self._world.disturbed or warned or host.backend is None or host.code not in _HOW:
            return
        if not any(words in line for line in host.lines for words in _ENDED_BY_A_THREAD):
            self.the_end_is_recorded(host, join(self._folder, "attempts", claim.removesuffix(".json") + ".end.json"))
        if host.code == Exit.FINISHED:
            self.the_metrics_are_whole(host)

    def the_end_is_recorded(self, host: Host, url: str) -> None:
        """The record of an attempt's end agrees with the exit code."""
        record = self._read(url)
        how = json.loads(record)["how"] if record else None
        if how != _HOW[Exit(host.code or 0)]:
            self._broken("the end is recorded", f"{host.name} exits with {host.code}, and its record says {how}")

    def the_metrics_are_whole(self, host: Host) -> None:
        """The history of a finished run has the losses of all steps that are due, once and in order, and all its
        evaluations, whichever attempts were killed: an attempt stores its lines before it commits their step."""
        plan, right, every = self._world.plan, self._world.curriculum, self._world.config.train.log_every
        history = [json.loads(line) for line in (self._read(join(self._folder, "metrics.jsonl")) or b"").splitlines()]
        seen = [(line["step"], line["loss"]) for line in history if "loss" in line]
        due = [step for step in range(1, plan.steps + 1) if step % every == 0 or step == plan.steps]
        lost = {number for number in plan.skipped if number % 2}  # their losses are not finite
        expected = [(step, None if step - 1 in lost else right.losses[step - 1]) for step in due]
        if seen != expected:
            self._broken("the metrics are whole", f"{host.name} left {seen}, not {expected}")
        between = plan.evaluate_every or plan.steps
        figures = {(line["step"], line["eval_loss"]) for line in history if "eval_loss" in line}
        evaluated = {(step, right.figures[step]) for step in (*range(between, plan.steps, between), plan.steps)}
        if figures != evaluated:
            self._broken("the metrics are whole", f"{host.name} left the evaluations {figures}, not {evaluated}")

    def _read(self, url: str) -> Any:
        stored = self._world.bucket.objects.get(url)
        return stored.data if stored else None

    def _broken(self, promise: str, what: str) -> None:
        self._world.promises.broken(promise, what)
