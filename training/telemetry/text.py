"""What a person and the launcher read: the progress line and the final summary. Pure functions."""

from __future__ import annotations

import math
from typing import Any


def progress(step: int, steps: int, loss: float, examples_per_second: float, remaining_seconds: float) -> str:
    """One line on host 0."""
    width = len(str(steps))
    return f"step {step:>{width}}/{steps}  loss {loss:.5f}  {examples_per_second:,.1f} examples/s  {remaining(remaining_seconds)} left"


def remaining(seconds: float) -> str:
    """For example "2:05:00" or "0:07"."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def evaluation(step: int, results: dict[str, float]) -> str:
    return f"evaluation after step {step}: {figures(results)}"


def figures(results: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.5f}" for name, value in results.items())


def hygiene(values: dict[str, Any]) -> str:
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


def uploaded(hub: dict[str, Any]) -> str:
    """What became of the model on the Hub."""
    done = f"has step {hub['step']}: {hub['commit']}" if hub["commit"] else "has nothing of this attempt"
    return f"hub: {hub['repository']} {done}" + (f"; the last upload failed: {hub['error']}" if hub["error"] else "")


def summary(values: dict[str, Any]) -> str:
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
    lines.append(hygiene(values))
    lines.append(f"checkpoint: {values['checkpoint']}")
    if values.get("hub"):
        lines.append(uploaded(values["hub"]))
    return "\n".join(lines)
