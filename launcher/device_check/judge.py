"""What the hosts' reports of their devices mean. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.provider import Observation
from training.device_check import Problem, find_problems, parse_facts
from training.errors import Exit

CREATE_ANEW = "`tpu-launch status`, then `tpu-launch down` and `up`"
_CLOCK_SECONDS = 5.0  # hosts that differ more spoil the order of log lines; much more, tokens and certificates


@dataclass(frozen=True)
class HostResult:
    """What one host reported, and what is wrong with it."""

    worker: int
    facts: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a run could use the host."""
        return not any(problem.fatal for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        problems = [asdict(problem) for problem in self.problems]
        return {"worker": self.worker, "ok": self.ok, "facts": dict(self.facts), "problems": problems}

    def row(self) -> list[str]:
        """A row of the table: COLUMNS."""
        facts = self.facts
        memory, free = facts.get("memory_bytes"), facts.get("disk_free_bytes")
        write, read = facts.get("bucket_write_mb_s"), facts.get("bucket_read_mb_s")
        wrong, total = facts.get("wrong_products"), facts.get("sum")
        devices = f"{facts['devices']} of {facts['devices_expected']} {facts['kind']}" if "devices" in facts else "-"
        return [
            str(self.worker),
            devices,
            "-" if memory is None else f"{memory / 2**30:.1f} GiB",
            "-" if wrong is None else f"{wrong} wrong" if wrong else "right",
            "-" if total is None else "right" if total == facts.get("slice_devices") else f"{total:g}",
            "-" if "clock_offset" not in facts else f"{facts['clock_offset']:+.1f} s",
            "-" if free is None else f"{free / 2**30:.0f} GiB",
            "-" if write is None else f"{write:g} / {read:g} MB/s",
            "ok" if self.ok else "FAIL",
        ]


COLUMNS = ["host", "devices", "memory", "bf16 product", "sum over all", "clock", "disk free", "bucket w / r", ""]


def judge(observations: Sequence[Observation], accelerator_type: str, seconds: float) -> list[HostResult]:
    """The results of all hosts, from the last observation of each.

    Args:
        observations: In worker order.
        accelerator_type: Of the slice.
        seconds: How long the hosts had.
    """
    results = []
    for observation in observations:
        facts = parse_facts(line.text for line in observation.lines)
        problems = find_problems(facts, len(observations), accelerator_type)
        if not facts.get("error") and (end := _judge_end(observation, facts, seconds)):
            problems.insert(0, end)
        results.append(HostResult(observation.worker, facts, tuple(problems)))
    return _compare_clocks(results)


def _judge_end(observation: Observation, facts: Mapping[str, Any], seconds: float) -> Problem | None:
    """What is wrong with how the container ended, or with that it did not."""
    state, phase = observation.container, facts.get("phase", "beginning")
    if state is None:
        return Problem(f"does not answer: {observation.problem}", CREATE_ANEW)
    if not state.ended:
        return Problem(f"not done after {seconds:g} s, in phase {phase!r}", CREATE_ANEW)
    if state.exit_code == 0 or phase == "done":
        return None
    if state.exit_code == Exit.LOST_PEER:
        lost = facts.get("lost") or (observation.lines[-1].text if observation.lines else "")
        return Problem(f"not finished, because of another host: {lost}", "")
    last = observation.lines[-1].text if observation.lines else "no output"
    return Problem(f"{phase}: ended with exit code {state.exit_code}: {last}", CREATE_ANEW)


def _compare_clocks(results: Sequence[HostResult]) -> list[HostResult]:
    """With `clock_offset` (seconds from the median) among the facts. All read their clocks when all had met."""
    clocks = sorted(result.facts["clock"] for result in results if "clock" in result.facts)
    if not clocks:
        return list(results)
    median = clocks[len(clocks) // 2]
    compared = []
    for result in results:
        if "clock" in result.facts:
            offset = result.facts["clock"] - median
            result = replace(result, facts={**result.facts, "clock_offset": round(offset, 3)})
            if abs(offset) > _CLOCK_SECONDS:
                fix = "sudo systemctl restart chrony, on that host"
                problem = Problem(f"its clock is {offset:+.0f} s off the others'", fix, fatal=False)
                result = replace(result, problems=(*result.problems, problem))
        compared.append(result)
    return compared
