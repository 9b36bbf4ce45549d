"""Prints on host 0, and formats what it prints: the progress of the steps, and the final summary.

A terminal's progress line is replaced in place; elsewhere each progress line is a line of its own.

A failed write (a closed pipe, a log on a full disk) is ignored, so that it does not stop training.
"""

import contextlib
import shutil
import sys
from typing import Any, TextIO

from training.machine import tell

_CLEAR = "\r\x1b[2K"


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    tell(f"warning: {message}")


class Console:
    """Prints to standard output, or to `out`; with `shown` false, as on every host but host 0, nothing."""

    def __init__(self, shown: bool, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown, self._is_terminal = shown, self._out.isatty()
        self._line_open = False  # the last line is a progress line that the next one replaces

    def print(self, message: str) -> None:
        """Prints, if `shown`, a line that stays, in place of an open progress line, which is gone. A failed write is
        ignored."""
        self._print(message, stays=True)

    def progress(self, line: str) -> None:
        """Prints, if `shown`, a progress line: on a terminal cut to its width and replaced by the next line, elsewhere
        kept."""
        self._print(line, stays=not self._is_terminal)

    def close(self) -> None:
        """Ends an open progress line with a newline, so that other output begins on its own line. Closes no file."""
        if self._line_open:
            with contextlib.suppress(OSError):
                print(file=self._out, flush=True)
            self._line_open = False

    def _print(self, text: str, stays: bool) -> None:
        """Prints `text`, if `shown`, over an open progress line; unless `stays`, cuts it and leaves it open."""
        if not self._shown:
            return
        if not stays:  # a wider line would wrap, and could not be replaced
            text = text[: shutil.get_terminal_size().columns - 1]
        prefix = _CLEAR if self._line_open else ""
        with contextlib.suppress(OSError):
            print(f"{prefix}{text}", end="\n" if stays else "", file=self._out, flush=True)
        self._line_open = not stays


def format_progress(
    step: int, steps: int, loss: float, examples_per_second: float, data_wait: float, remaining_seconds: float
) -> str:
    """Returns the line that shows a step's figures to the user. `examples_per_second`: of all hosts; `data_wait`: the
    share, 0 to 1, of the steps' time that waited for batches."""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.5f}  {examples_per_second:,.1f} examples/s  "
        f"{data_wait:.0%} data wait  {format_remaining(remaining_seconds)} left"
    )


def format_remaining(seconds: float) -> str:
    """Returns seconds, rounded (0 if negative), as hours, minutes and seconds, for example "2:05:00" or "0:07"."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_early_end(step: int, evaluations: int, best: dict[str, Any] | None) -> str:
    """Returns the line for an end by train.early_stopping. `evaluations`: how many in a row were not better; `best`:
    step, metric and value; None if none was finite."""
    text = f"training ends early, after step {step}: {evaluations} evaluations in a row were not better"
    if best is None:
        return f"{text}; none was finite"
    return f"{text}; the result is the model after step {best['step']}, {best['metric']} {best['value']:.5f}"


def format_figures(figures: dict[str, float]) -> str:
    """Returns the figures on one line, as "loss 0.12345  accuracy 0.67890"."""
    return "  ".join(f"{name} {value:.5f}" for name, value in figures.items())


def format_program_counts(summary: dict[str, Any]) -> str:
    """Returns a line of compilations, graphs, syncs and operations on the host, which cost time, and of preflight."""
    fallbacks = summary.get("host_fallbacks") or []
    counts = [f"{summary['compilations']} compilations in {summary.get('compile_seconds', 0.0):.1f} s"]
    if "graphs" in summary:
        counts.append(f"{summary['graphs']} graphs")
    if summary.get("device_to_host_syncs") is not None:
        counts.append(f"{summary['device_to_host_syncs']} unplanned device-to-host syncs")
    counts.append(f"{len(fallbacks)} operations on the host" + (f" ({', '.join(fallbacks)})" if fallbacks else ""))
    if summary.get("preflight"):
        counts.append(f"preflight: {summary['preflight']}")
    return f"programs: {', '.join(counts)}"


def format_upload(hub: dict[str, Any]) -> str:
    """Returns a line about the summary's "hub": the newest step that this attempt uploaded, and any last error."""
    done = f"has step {hub['step']}: {hub['commit']}" if hub["commit"] else "has nothing of this attempt"
    return f"hub: {hub['repository']} {done}" + (f"; the last upload failed: {hub['error']}" if hub["error"] else "")


def format_summary(summary: dict[str, Any]) -> str:
    """Returns the main figures of summary.json as a few lines."""
    precision = f", {summary['precision']}" if "precision" in summary else ""
    losses = ["nan" if loss is None else f"{loss:.4f}" for loss in (summary["first_loss"], summary["last_loss"])]
    lines = [
        f"finished {summary['steps']} steps on {summary['hosts']} host(s), {summary['devices']} device(s){precision}: "
        f"loss {' -> '.join(losses)}"
    ]
    if summary.get("skipped_steps"):
        lines.append(format_skipped_steps(summary["skipped_steps"]))
    if summary.get("not_finite"):
        lines.append(f"evaluation: {', '.join(summary['not_finite'])} is not finite")
    elif summary.get("eval_loss") is not None:
        figures = {key[5:]: value for key, value in summary.items() if key.startswith("eval_") and value is not None}
        digits = {"perplexity": ".2f"}
        shown = [f"{name.replace('_', ' ')} {value:{digits.get(name, '.4f')}}" for name, value in figures.items()]
        lines.append(f"evaluation: {', '.join(shown)}")
    seconds: dict[str, float] = summary["seconds"]
    rates = f"{summary['examples_per_second']:,.1f} examples/s, {summary.get('tokens_per_second', 0.0):,.0f} tokens/s"
    mfu = "" if summary.get("mfu") is None else f", MFU {summary['mfu']:.1%}"
    lines.append(f"speed: {rates}{mfu}; seconds: {_format_phases(seconds)} (total {seconds['total']:.1f})")
    lines.append(format_program_counts(summary))
    lines.append(f"checkpoint: {summary['checkpoint']}")
    if summary.get("hub"):
        lines.append(format_upload(summary["hub"]))
    return "\n".join(lines)


def format_skipped_steps(count: int) -> str:
    return f"{count} step(s) were skipped, whose loss or gradient norm was not finite (train.on_nonfinite: skip)"


def format_start(attempt: int, seconds: dict[str, float], programs: int, cached: int) -> str:
    """Returns a line about an attempt's time to the result of its first step. `seconds` is by phase, from
    PhaseTimer.report; `cached` of the `programs` were in the compilation cache, the framework compiled the others."""
    compiled = f"{programs} program(s)" + (f", {cached} of them from the cache" if cached else "")
    return f"attempt {attempt}: first step after {seconds['total']:.1f} s: {_format_phases(seconds)}; {compiled}"


def _format_phases(seconds: dict[str, float]) -> str:
    """Returns the phases of at least 0.05 s with their seconds, without the total."""
    return ", ".join(f"{name} {amount:.1f}" for name, amount in seconds.items() if name != "total" and amount >= 0.05)
