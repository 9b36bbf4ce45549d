"""report.html: what a run was, on one page that needs nothing else. Made of what the run's folder holds, so it can be
made again at any time and of any run: finished, stopped, failed, or still going on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from training import storage
from training.checkpoint.format import Manifest
from training.checkpoint.safetensors_file import Damaged
from training.checkpoint.store import committed_steps, read_manifest
from training.errors import BadInput
from training.telemetry import attempts, metrics
from training.telemetry import svg as charts
from training.telemetry import text as report
from training.telemetry.attempts import Attempt

NAME = "report.html"
SUMMARY_FILE = "summary.json"
CONFUSION_FILE = "confusion.json"
_STYLE = """
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
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
class RunRecord:
    """All that a folder says of its run."""

    folder: str
    lines: Sequence[Mapping[str, Any]]  # as metrics.history
    attempts: Sequence[Attempt]
    summary: Mapping[str, Any] | None
    checkpoints: Sequence[tuple[int, Manifest | str]]  # newest first: the manifest, or what is wrong with it
    confusion: Mapping[str, Any] | None  # labels, counts

    @property
    def state(self) -> str:
        """How the newest attempt ended."""
        end = self.attempts[-1].end if self.attempts else None
        return str(end["how"]) if end else "going on, or killed"


def read_run(folder: str) -> RunRecord:
    """Raises BadInput for what is not a run's folder."""
    found = attempts.read(folder)
    lines = metrics.read_history(folder)
    place = storage.join(folder, "checkpoints")
    steps = committed_steps(place)
    if not (found or lines or steps):
        raise BadInput(
            f"{folder} is not a run's folder: it has no attempts, metrics or checkpoints (it is <output>/<run id>)"
        )
    checkpoints = [(step, _manifest(place, step)) for step in steps]
    return RunRecord(folder, lines, found, _json(folder, SUMMARY_FILE), checkpoints, _json(folder, CONFUSION_FILE))


def write_report(folder: str, out: str | None = None) -> str:
    """Makes the page of a run, and returns where it is. Raises BadInput."""
    url = out or storage.join(folder, NAME)
    storage.write(url, render_report(read_run(folder)).encode())
    return url


def render_report(run: RunRecord) -> str:
    """The page as XHTML, so that it is valid XML too."""
    name = str(
        (run.summary or (run.attempts[-1].start if run.attempts else {})).get("run_id", storage.name_of(run.folder))
    )
    message = str((run.attempts[-1].end or {}).get("message", "")) if run.attempts else ""
    body = [
        f"<h1>{escape(name)} <span class='{'faint' if run.state == 'finished' else 'bad'}'>{escape(run.state)}</span></h1>",
        f"<p class='faint'>{escape(run.folder)} · made {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}</p>",
        f"<pre class='bad'>{escape(message)}</pre>" if message else "",
        _figures(run),
        "<h2>Curves</h2><div class='charts'>", *_curves(run.lines), "</div>",
        "<h2>Time</h2>", _phases(run),
        "<h2>Attempts</h2>", _attempts(run.attempts),
        "<h2>Checkpoints</h2>", _checkpoints(run.checkpoints),
        _confusion(run.confusion),
        _configuration(run),
    ]  # fmt: skip
    head = f"<meta charset='utf-8'/><meta name='viewport' content='width=device-width'/><title>{escape(name)}</title><style>{charts.STYLE}{_STYLE}</style>"
    return (
        f"<!DOCTYPE html>\n<html lang='en' xmlns='http://www.w3.org/1999/xhtml'><head>{head}</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figures(run: RunRecord) -> str:
    losses = [line["loss"] for line in run.lines if "loss" in line]
    evaluations = [line for line in run.lines if any(key.startswith("eval_") for key in line)]
    told: list[tuple[str, str]] = []
    if run.lines:
        told.append(("steps", f"{run.lines[-1]['step']:,}"))
    if losses:
        told.append(("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if evaluations:
        told += [
            (f"evaluation {key.removeprefix('eval_').replace('_', ' ')}", f"{value:.4f}")
            for key, value in evaluations[-1].items()
            if key != "step"
        ]
    summary = run.summary or {}
    rates = [line["examples_per_second"] for line in run.lines if "examples_per_second" in line]
    if "examples_per_second" in summary or rates:
        told.append(("examples/s", f"{summary.get('examples_per_second', rates[-1] if rates else 0.0):,.1f}"))
    if summary.get("tokens_per_second"):
        told.append(("tokens/s", f"{summary['tokens_per_second']:,.0f}"))
    if summary.get("mfu") is not None:
        told.append(("MFU", f"{summary['mfu']:.1%}"))
    if "goodput" in summary:
        told.append(("goodput", f"{summary['goodput']:.1%}"))
    items = "".join(f"<li><span class='faint'>{escape(name)}</span><b>{escape(value)}</b></li>" for name, value in told)
    notes = [report.format_program_counts(dict(summary))] if summary else []
    if summary.get("hub"):
        notes.append(report.format_upload(summary["hub"]))
    if summary.get("skipped_records"):
        notes.append(f"{summary['skipped_records']} damaged records were replaced (data.on_corrupt: skip)")
    return f"<ul class='figures'>{items}</ul>" + "".join(f"<p>{escape(note)}</p>" for note in notes)


def _curves(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    def curve(name: str, key: str) -> charts.Curve:
        return charts.Curve(
            name, [(line["step"], line[key]) for line in lines if key in line and line[key] is not None]
        )

    others = dict.fromkeys(key for line in lines for key in line if key.startswith("eval_") and key != "eval_loss")
    return [
        charts.line_chart("Loss", [curve("training", "loss"), curve("evaluation", "eval_loss")]),
        *(
            charts.line_chart(f"Evaluation: {key.removeprefix('eval_').replace('_', ' ')}", [curve(key, key)])
            for key in others
        ),
        charts.line_chart("Examples/s", [curve("examples/s", "examples_per_second")]),
        charts.line_chart("Learning rate", [curve("learning rate", "learning_rate")]),
    ]


def _phases(run: RunRecord) -> str:
    """Of all attempts that told their seconds, together."""
    together: dict[str, float] = {}
    for each in run.attempts:
        for phase, amount in (each.end or {}).get("seconds", {}).items():
            together[phase] = together.get(phase, 0.0) + amount
    total = together.pop("total", 0.0)
    parts = sorted(
        ((phase, amount) for phase, amount in together.items() if amount >= 0.005 * total), key=lambda item: -item[1]
    )
    told = (
        f"<p>Goodput, the share of the time that was spent in steps: {together.get('step', 0.0) / total:.1%} of {charts.format_duration(total)}.</p>"
        if total
        else ""
    )
    return charts.share_bar("Where the time went", parts, width=760) + told


def _attempts(found: Sequence[Attempt]) -> str:
    rows = []
    for each in found:
        end = each.end or {}
        began = each.start.get("began")
        rows.append(
            [
                str(each.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began)) if began else "",
                str(len(each.start.get("hosts", ()))),
                str(each.start.get("accelerator") or "CPU"),
                str(end.get("how", "going on, or killed")),
                str(end.get("step", "")),
                charts.format_duration(end["seconds"]["total"]) if "seconds" in end else "",
                str(end.get("message", "")),
            ]
        )
    return _table(("attempt", "began (UTC)", "hosts", "accelerator", "ended", "at step", "took", "said"), rows)


def _checkpoints(found: Sequence[tuple[int, Manifest | str]]) -> str:
    rows = []
    for step, manifest in found:
        if isinstance(manifest, str):
            rows.append([str(step), f"damaged: {manifest}", "", "", ""])
            continue
        loss = manifest.state.get("last_loss")
        size = f"{sum(part.size for part in manifest.parts):,}"
        rows.append(
            [str(step), size, str(len(manifest.parts)), str(manifest.attempt), "" if loss is None else f"{loss:.5f}"]
        )
    return (
        _table(("step", "bytes", "parts", "attempt", "loss"), rows)
        if rows
        else "<p class='faint'>None was committed.</p>"
    )


def _confusion(found: Mapping[str, Any] | None) -> str:
    return (
        f"<h2>Confusion matrix</h2>{charts.confusion_matrix(found['labels'], found['counts'], top=20)}" if found else ""
    )


def _configuration(run: RunRecord) -> str:
    if not run.attempts or not run.attempts[-1].start.get("config"):
        return ""
    start = run.attempts[-1].start
    text, code = escape(json.dumps(start["config"], indent=1)), escape(str(start.get("code", "")))
    details = f"<details><summary>of the newest attempt</summary><pre>{text}</pre></details>"
    return f"<h2>Configuration</h2><p class='faint'>code {code}</p>{details}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _manifest(place: str, step: int) -> Manifest | str:
    try:
        return read_manifest(place, step)
    except Damaged as error:
        return str(error)


def _json(folder: str, name: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(storage.read(storage.join(folder, name)))
    except storage.NotFound:
        return None
    return value


def write_confusion(folder: str, labels: Sequence[str], counts: Sequence[Sequence[float]]) -> None:
    """Writes the matrix of the last evaluation to the run's folder: its numbers, and a picture."""
    value = {"labels": list(labels), "counts": [[round(count) for count in row] for row in counts]}
    storage.write(storage.join(folder, CONFUSION_FILE), json.dumps(value).encode() + b"\n")
    storage.write(
        storage.join(folder, "confusion.svg"), charts.standalone(charts.confusion_matrix(labels, counts)).encode()
    )
