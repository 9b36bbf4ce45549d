"""Records how the attempts of a run began and ended, and writes report.html: a run on one page that fetches nothing.

    attempts/attempt-0002.<token>.json              when all hosts have agreed: hosts, code, configuration
    attempts/attempt-0002.<token>.end.json          when the attempt ends, unless it is killed
    attempts/attempt-0002.<token>.nonfinite.json    before that, if a step that was not finite ended it

Host 0 writes these records to the run's folder. An attempt without the second file is running, or was killed:
preempted, out of memory, SIGKILL. The token belongs to one group of processes, so no record is ever overwritten. The
page is rendered from the run's folder alone, so it can be written at any time for any run.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from training import storage as default_storage
from training.checkpoint.format import Manifest, committed_steps, describe, read_manifests
from training.errors import BadInput, Exit, StopRequested, TrainError
from training.storage import NotFound, Storage, join, name_of
from training.telemetry import svg
from training.telemetry.console import format_program_counts, format_skipped_steps, format_upload, warn
from training.telemetry.metrics import read_history

NAME = "report.html"
SUMMARY_FILE = "summary.json"
CONFUSION_FILE = "confusion.json"
_RECORD_NAME = re.compile(r"attempt-(\d+)\.([^.]+)(\.end)?\.json")
_END, _NON_FINITE = ".end.json", ".nonfinite.json"
_UNFINISHED = "going on, or killed"  # an attempt without an end record
_STYLE = """
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--paper); color: var(--ink); }
body { font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.faint, caption { color: var(--faint); } .bad { color: var(--b); }
.figures { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0; padding: 0; list-style: none; }
.figures b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.2rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } td.number, th.number { text-align: right; } td { white-space: pre-wrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--rule); }
"""


@dataclass(frozen=True)
class AttemptRecords:
    """The start record and the end record of one attempt."""

    number: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None  # how, message, step, ended, seconds


@dataclass(frozen=True)
class NonFiniteStep:
    """An attempt's record of a step that was not finite. Later attempts choose their checkpoint by it."""

    step: int
    restored: int  # step of the checkpoint that the attempt had restored; 0 without one
    checkpoint: str | None  # unique name of that checkpoint
    program: str  # hash of configuration and code: another program may not have this problem


def write_nonfinite(start_url: str, record: NonFiniteStep, storage: Storage = default_storage) -> None:
    """Writes the record of a step that was not finite beside the start record at `start_url`. Raises StorageError."""
    url = start_url.removesuffix(".json") + _NON_FINITE
    storage.write(url, json.dumps(asdict(record), indent=1).encode() + b"\n")


def read_nonfinite(folder: str, storage: Storage = default_storage) -> list[NonFiniteStep]:
    """Returns the records of a run's steps that were not finite, by attempt, without unreadable ones. Raises
    StorageError."""
    records = []
    for info in storage.listing(join(folder, "attempts")):
        if info.url.endswith(_NON_FINITE):
            with contextlib.suppress(ValueError, TypeError):
                records.append(NonFiniteStep(**json.loads(storage.read(info.url))))
    return records


def write_end(
    start_url: str,
    error: BaseException | None,
    step: int,
    seconds: Mapping[str, float],
    storage: Storage = default_storage,
) -> None:
    """Writes the end record of an attempt, with the time now, beside its start record at `start_url`. `error` ended the
    attempt (None: it finished) after `step` steps; `seconds` is by phase, from PhaseTimer.report. Raises
    StorageError."""
    record = {
        "how": classify_end(error),
        "message": str(error or ""),
        "step": step,
        "ended": round(time.time(), 3),
        "seconds": dict(seconds),
    }
    storage.write(start_url.removesuffix(".json") + _END, json.dumps(record, indent=1).encode() + b"\n")


def classify_end(error: BaseException | None) -> str:
    """Returns "finished", "stopped", "refused" (exit code BAD_INPUT), "lost a host", or "failed" (any other error)."""
    if error is None:
        return "finished"
    if isinstance(error, StopRequested):
        return "stopped"
    known = {Exit.BAD_INPUT: "refused", Exit.LOST_PEER: "lost a host"}
    return known.get(error.exit_code, "failed") if isinstance(error, TrainError) else "failed"


def read_attempts(folder: str, storage: Storage = default_storage) -> list[AttemptRecords]:
    """Returns a run's attempts by number, then by start; [] without any. Leaves out each damaged record, with a
    warning: an attempt of which the end record is left has {} as its start. Raises StorageError."""
    records: dict[tuple[int, str], dict[str, Any]] = {}  # (number, token) -> "start" and "end"
    for info in storage.listing(join(folder, "attempts")):
        match = _RECORD_NAME.fullmatch(name_of(info.url))
        if match and (document := _read_json(info.url, storage)) is not None:
            records.setdefault((int(match[1]), match[2]), {})["end" if match[3] else "start"] = document
    ordered = sorted(records.items(), key=lambda item: (item[0][0], item[1].get("start", {}).get("began", 0.0)))
    return [AttemptRecords(number, record.get("start", {}), record.get("end")) for (number, _), record in ordered]


@dataclass(frozen=True)
class RunContents:
    """The content of a run's folder, except for its tensors."""

    folder: str
    lines: Sequence[Mapping[str, Any]]  # as training.telemetry.metrics.read_history
    attempts: Sequence[AttemptRecords]
    summary: Mapping[str, Any] | None
    checkpoints: Mapping[int, Manifest | str]  # by step, newest first: the manifest, or how it is damaged
    confusion: Mapping[str, Any] | None  # labels, counts

    @property
    def state(self) -> str:
        """Returns how the newest attempt ended, as classify_end; "going on, or killed" without an end record."""
        end = self.attempts[-1].end if self.attempts else None
        return str(end["how"]) if end else _UNFINISHED


def read_run(folder: str, storage: Storage = default_storage) -> RunContents:
    """Reads what the report of a run shows. Raises BadInput if the folder has neither attempts nor metrics nor
    checkpoints; StorageError."""
    attempts, lines = read_attempts(folder, storage), read_history(folder, storage)
    checkpoints_folder = join(folder, "checkpoints")
    steps = committed_steps(checkpoints_folder, storage)
    if not (attempts or lines or steps):
        raise BadInput(
            f"{folder} is not a run's folder: it has no attempts, metrics or checkpoints (it is <output>/<run id>)"
        )
    checkpoints = read_manifests(checkpoints_folder, steps, storage)
    summary, confusion = (_read_json(join(folder, name), storage) for name in (SUMMARY_FILE, CONFUSION_FILE))
    if attempts and (attempts[-1].end or {}).get("how") != "finished":  # an earlier attempt has written them
        summary = confusion = None
    return RunContents(folder, lines, attempts, summary, checkpoints, confusion)


def write_report(folder: str, out: str | None = None, storage: Storage = default_storage) -> str:
    """Writes a run's report to `out` (None: its report.html); returns that path or URL. Raises as `read_run`."""
    url = out or join(folder, NAME)
    storage.write(url, render_report(read_run(folder, storage)).encode())
    return url


def write_confusion(folder: str, labels: Sequence[str], counts: Sequence[Sequence[float]]) -> None:
    """Writes confusion.json and confusion.svg to `folder`, the run's. `counts`: by (true class, predicted class);
    rounded to whole numbers. Raises StorageError."""
    matrix = {"labels": list(labels), "counts": [[round(count) for count in row] for row in counts]}
    default_storage.write(join(folder, CONFUSION_FILE), json.dumps(matrix).encode() + b"\n")
    picture = svg.standalone(svg.confusion_matrix(labels, counts))
    default_storage.write(join(folder, "confusion.svg"), picture.encode())


def render_report(run: RunContents) -> str:
    """Returns the page as XHTML, valid XML too. State, message and configuration are those of the newest attempt."""
    start = run.attempts[-1].start if run.attempts else {}
    end = (run.attempts[-1].end or {}) if run.attempts else {}
    name = str((run.summary or start).get("run_id", name_of(run.folder)))
    message = str(end.get("message", ""))
    state_class = "faint" if run.state == "finished" else "bad"
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    matrix = (run.confusion["labels"], run.confusion["counts"]) if run.confusion else None
    body = [
        f"<h1>{escape(name)} <span class='{state_class}'>{escape(run.state)}</span></h1>",
        f"<p class='faint'>{escape(run.folder)} · made {made}</p>",
        f"<pre class='bad'>{escape(message)}</pre>" if message else "",
        _render_figures(run),
        "<h2>Curves</h2><div class='charts'>", *_render_curves(run.lines), "</div>",
        "<h2>Time</h2>", _render_phases(run.attempts),
        "<h2>Attempts</h2>", _render_attempts(run.attempts),
        "<h2>Checkpoints</h2>", _render_checkpoints(run.checkpoints),
        f"<h2>Confusion matrix</h2>{svg.confusion_matrix(*matrix, top=20)}" if matrix else "",
        _render_configuration(run.attempts),
    ]  # fmt: skip
    head = (
        "<html lang='en' xmlns='http://www.w3.org/1999/xhtml'><head><meta charset='utf-8'/>"
        f"<meta name='viewport' content='width=device-width'/><title>{escape(name)}</title>"
        f"<style>{svg.STYLE}{_STYLE}</style></head>"
    )
    return "\n".join(["<!DOCTYPE html>", head, "<body>", *body, "</body></html>", ""])


def _render_figures(run: RunContents) -> str:
    """Returns HTML: the headline figures; notes on compiled programs, the Hub, skipped steps and damaged records."""
    summary = run.summary or {}
    items = "".join(
        f"<li><span class='faint'>{escape(name)}</span><b>{escape(value)}</b></li>"
        for name, value in _headline_figures(run.lines, summary)
    )
    notes = [format_program_counts(dict(summary))] if summary else []
    if summary.get("hub"):
        notes.append(format_upload(summary["hub"]))
    skipped = summary.get("skipped_steps") or max((line.get("skipped_steps", 0) for line in run.lines), default=0)
    if skipped:
        notes.append(format_skipped_steps(skipped))
    if summary.get("skipped_records"):
        notes.append(f"{summary['skipped_records']} rows of damaged records were replaced (data.on_corrupt: skip)")
    return f"<ul class='figures'>{items}</ul>" + "".join(f"<p>{escape(note)}</p>" for note in notes)


def _headline_figures(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) of the steps, the first and the last loss, the figures of the last evaluation, and the
    summary's speed and MFU; without a summary, the last line's examples/s."""
    figures: list[tuple[str, str]] = []
    if lines:
        figures.append(("steps", f"{lines[-1]['step']:,}"))
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    if losses:
        figures.append(("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    evaluations = [line for line in lines if any(key.startswith("eval_") for key in line)]
    figures += [
        (f"evaluation {_figure_title(key)}", "not finite" if value is None else f"{value:.4f}")
        for line in evaluations[-1:]
        for key, value in line.items()
        if key.startswith("eval_")
    ]
    rates = [line["examples_per_second"] for line in (*lines, summary) if "examples_per_second" in line]
    if rates:
        figures.append(("examples/s", f"{rates[-1]:,.1f}"))
    if summary.get("tokens_per_second"):
        figures.append(("tokens/s", f"{summary['tokens_per_second']:,.0f}"))
    if summary.get("mfu") is not None:
        figures.append(("MFU", f"{summary['mfu']:.1%}"))
    return figures


def _figure_title(key: str) -> str:
    """Returns "weighted f1" for `eval_weighted_f1`."""
    return key.removeprefix("eval_").replace("_", " ")


def _render_curves(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns SVG charts by step: losses, each other evaluation figure, examples/s, gradient norm, learning rate."""

    def chart(title: str, **keys: str) -> str:
        """Returns a chart with a curve for each name in `keys`, whose value is the key of its numbers in `lines`."""
        points = {
            name: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
            for name, key in keys.items()
        }
        return svg.line_chart(title, points)

    evaluated = dict.fromkeys(key for line in lines for key in line if key.startswith("eval_") and key != "eval_loss")
    return [
        chart("Loss", training="loss", evaluation="eval_loss"),
        *(chart(f"Evaluation: {_figure_title(key)}", value=key) for key in evaluated),
        chart("Examples/s", value="examples_per_second"),
        chart("Gradient norm", value="gradient_norm"),
        chart("Learning rate", value="learning_rate"),
    ]


def _render_phases(attempts: Sequence[AttemptRecords]) -> str:
    """Returns HTML: seconds by phase (without those below 0.5 %) and goodput, of all attempts with an end record."""
    seconds: dict[str, float] = {}
    for attempt in attempts:
        for phase, amount in (attempt.end or {}).get("seconds", {}).items():
            seconds[phase] = seconds.get(phase, 0.0) + amount
    total = seconds.pop("total", 0.0)
    shown = [(phase, amount) for phase, amount in seconds.items() if amount >= 0.005 * total]
    shown.sort(key=lambda item: -item[1])
    chart = svg.share_bar("Where the time went", shown, width=760)
    if not total:
        return chart
    goodput = f"{seconds.get('step', 0.0) / total:.1%} of {svg.format_duration(total)}"
    return f"{chart}<p>Goodput, the share of the time that was spent in steps: {goodput}.</p>"


def _render_attempts(attempts: Sequence[AttemptRecords]) -> str:
    """Returns HTML: a table with a row for each attempt: begin, hosts, accelerator, how, when and why it ended."""
    rows = []
    for attempt in attempts:
        end = attempt.end or {}
        began = attempt.start.get("began")
        rows.append(
            [
                str(attempt.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began)) if began else "",
                str(len(attempt.start.get("hosts", ()))),
                str(attempt.start.get("accelerator") or "CPU"),
                str(end.get("how", _UNFINISHED)),
                str(end.get("step", "")),
                svg.format_duration(end["seconds"]["total"]) if "seconds" in end else "",
                str(end.get("message", "")),
            ]
        )
    header = ("attempt", "began (UTC)", "hosts", "accelerator", "ended", "at step", "took", "message")
    return _render_table(header, rows)


def _render_checkpoints(checkpoints: Mapping[int, Manifest | str]) -> str:
    """Returns HTML: a table of the checkpoints, step -> manifest or why it can't be read; a sentence for none."""
    if not checkpoints:
        return "<p class='faint'>None was committed.</p>"
    rows = [describe(step, manifest) for step, manifest in checkpoints.items()]
    return _render_table(("step", "bytes", "parts", "attempt", "loss"), rows)


def _render_configuration(attempts: Sequence[AttemptRecords]) -> str:
    """Returns HTML: the section of the newest attempt's configuration and code; "" if it recorded none."""
    if not attempts or not attempts[-1].start.get("config"):
        return ""
    start = attempts[-1].start
    config, code = escape(json.dumps(start["config"], indent=1)), escape(str(start.get("code", "")))
    details = f"<details><summary>of the newest attempt</summary><pre>{config}</pre></details>"
    return f"<h2>Configuration</h2><p class='faint'>code {code}</p>{details}"


def _render_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns an HTML table, with its texts escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _read_json(url: str, storage: Storage) -> dict[str, Any] | None:
    """Returns the JSON object at `url`; None if there is none or, after a warning, if it is damaged."""
    try:
        document = json.loads(storage.read(url))
    except NotFound:
        return None
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    warn(f"{url}: not readable as JSON; left out")
    return None
