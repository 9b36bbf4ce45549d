"""What a person and the launcher read: the progress line and the final summary. Pure functions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

_PROGRESS = re.compile(r"step +(\d+)/(\d+)  loss (\S+)  ([\d,.]+) examples/s")


@dataclass(frozen=True)
class Progress:
    """What a progress line says."""

    step: int  # steps done
    steps: int  # of the whole run
    loss: float
    examples_per_second: float


def format_progress(step: int, steps: int, loss: float, examples_per_second: float, remaining_seconds: float) -> str:
    """The progress line that host 0 prints. `parse_progress` is its inverse."""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.5f}  {examples_per_second:,.1f} examples/s  "
        f"{format_remaining(remaining_seconds)} left"
    )


def parse_progress(line: str) -> Progress | None:
    """What a line of host 0's log says, or None when it holds no progress line.

    The loss is rounded to 5 decimals and the rate to 1, as in the line.
    """
    match = _PROGRESS.search(line)
    if match is None:
        return None
    step, steps, loss, rate = match.groups()
    try:
        return Progress(int(step), int(steps), float(loss), float(rate.replace(",", "")))
    except ValueError:  # another program's line that looks alike
        return None


def format_remaining(seconds: float) -> str:
    """For example "2:05:00" or "0:07"."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def format_evaluation(step: int, results: dict[str, float]) -> str:
    return f"evaluation after step {step}: {format_figures(results)}"


def format_figures(results: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.5f}" for name, value in results.items())


def format_program_counts(values: dict[str, Any]) -> str:
    """What the framework's own counts say of a run: each of these costs time that the model does not use."""
    syncs, fallbacks = values.get("device_to_host_syncs"), values.get("host_fallbacks") or []
    told = [f"{values['compilations']} compilations in {values.get('compile_seconds', 0.0):.1f} s"]
    if "graphs" in values:
        told.append(f"{values['graphs']} graphs")
    if syncs is not None:
        told.append(f"{syncs} unplanned device-to-host syncs")
    told.append(f"{len(fallbacks)} operations on the host" + (f" ({', '.join(fallbacks)})" if fallbacks else ""))
    if values.get("preflight"):
        told.append(f"preflight: {values['preflight']}")
    return f"programs: {', '.join(told)}"


def format_upload(hub: dict[str, Any]) -> str:
    """What became of the model on the Hub."""
    done = f"has step {hub['step']}: {hub['commit']}" if hub["commit"] else "has nothing of this attempt"
    return f"hub: {hub['repository']} {done}" + (f"; the last upload failed: {hub['error']}" if hub["error"] else "")


def format_summary(values: dict[str, Any]) -> str:
    """A few lines for people; summary.json has all of it."""
    seconds: dict[str, float] = values["seconds"]
    phases = ", ".join(f"{name} {amount:.1f}" for name, amount in seconds.items() if name != "total" and amount >= 0.05)
    lines = [
        f"finished {values['steps']} steps on {values['hosts']} host(s), {values['devices']} device(s): "
        f"loss {values['first_loss']:.4f} -> {values['last_loss']:.4f}"
    ]
    if values.get("eval_loss") is not None:
        told = (("loss", ".4f"), ("perplexity", ".2f"), ("accuracy", ".4f"), ("weighted_f1", ".4f"))
        shown = [(name, values.get(f"eval_{name}"), form) for name, form in told]
        lines.append(
            "evaluation: "
            + ", ".join(f"{name.replace('_', ' ')} {value:{form}}" for name, value, form in shown if value is not None)
        )
    speed = [
        f"{values['examples_per_second']:,.1f} examples/s",
        f"{values.get('tokens_per_second', 0.0):,.0f} tokens/s",
    ]
    if values.get("mfu") is not None:
        speed.append(f"MFU {values['mfu']:.1%}")
    lines.append(f"speed: {', '.join(speed)}; seconds: {phases} (total {seconds['total']:.1f})")
    lines.append(format_program_counts(values))
    lines.append(f"checkpoint: {values['checkpoint']}")
    if values.get("hub"):
        lines.append(format_upload(values["hub"]))
    return "\n".join(lines)
