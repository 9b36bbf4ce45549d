"""report.html is valid XML that fetches nothing, says what happened, and can be made of any run's folder."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from training import storage
from training.cli.main import tpu_train
from training.errors import BadInput, StopRequested, TrainError
from training.telemetry import report as html
from training.telemetry.metrics import AttemptInfo, MetricsLog

SECONDS = {"start": 2.0, "step": 6.0, "compile": 2.0, "total": 10.0}


def attempt(folder: Path, number: int, resumed: int, steps: range, error: Exception | None, ended: bool = True) -> None:
    """What an attempt leaves in the run's folder."""
    start = folder / "attempts" / f"attempt-{number:04d}.t{number}.json"
    start.parent.mkdir(parents=True, exist_ok=True)
    record = {"run_id": "bert-<1>", "hosts": ["a", "b"], "code": "c0de", "config": {"seed": 1}}
    start.write_text(json.dumps({**record, "began": 1795169047.0 + number}))
    log = MetricsLog(AttemptInfo(str(folder), number, resumed))
    for step in steps:
        log.log(step, {"loss": 8.0 / step, "learning_rate": 1e-4, "examples_per_second": 100.0 + step})
    log.log(steps[-1], {"eval_loss": 2.5, "eval_accuracy": 0.25})
    log.flush()
    if ended:
        html.write_end(str(start), error, steps[-1], SECONDS)


def texts(document: str) -> str:
    """All text of a page, which must be well-formed and must not fetch or run anything."""
    root = ElementTree.fromstring(document.split("\n", 1)[1])
    for element in root.iter():
        name = element.tag.rpartition("}")[2]
        assert name not in ("script", "link", "iframe", "img", "image", "use"), name
        for attribute, value in element.attrib.items():
            assert not attribute.endswith(("href", "src")), (name, attribute)
            assert "http" not in value, value
    assert "url(" not in document
    assert "@import" not in document
    return " ".join(" ".join(root.itertext()).split())


def test_the_report_of_a_failed_run_has_all_attempts(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 0, range(1, 31), StopRequested("stopped after step 30"))
    attempt(tmp_path, 1, 30, range(31, 41), None, ended=False)
    attempt(tmp_path, 2, 20, range(21, 51), TrainError("the loss of step 50 is nan & <infinite>"))
    page_text = texts(html.render_report(html.read_run(str(tmp_path))))
    assert "bert-<1> failed" in page_text
    assert "the loss of step 50 is nan & <infinite>" in page_text
    for words in ("stopped after step 30", "going on, or killed", "evaluation accuracy", "None was committed"):
        assert words in page_text
    assert "8.0000 → 0.1600" in page_text
    assert "Goodput, the share of the time that was spent in steps: 60.0% of 20.0 s" in page_text


def test_the_report_of_a_finished_run_has_figures_and_confusion(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 0, range(1, 31), None)
    summary: dict[str, Any] = {
        "run_id": "bank", "examples_per_second": 1234.5, "tokens_per_second": 9876.0, "mfu": 0.412, "goodput": 0.9,
        "compilations": 4, "compile_seconds": 3.0, "graphs": 4, "device_to_host_syncs": 0,
        "host_fallbacks": [], "skipped_records": 3,
        "hub": {"repository": "org/bank", "step": 30, "commit": "https://hub/org/bank/commit/1", "error": None},
    }  # fmt: skip
    (tmp_path / html.SUMMARY_FILE).write_text(json.dumps(summary))
    counts = [[7.0, 3.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 5.0]]
    html.write_confusion(str(tmp_path), ["card <lost>", "card stolen", "other"], counts)
    assert CliRunner().invoke(tpu_train, ["report", str(tmp_path)]).output.strip() == str(tmp_path / "report.html")
    page_text = texts((tmp_path / "report.html").read_text())
    for words in ("bank finished", "1,234.5", "9,876", "41.2%", "in steps: 60.0% of 10.0 s", "4 graphs"):
        assert words in page_text
    assert "3 rows of damaged records" in page_text
    assert "hub: org/bank has step 30: https://hub/org/bank/commit/1" in page_text
    assert "card <lost> taken for card stolen: 3 of 10" in page_text
    assert "90.0%" not in page_text, "one goodput: over all attempts"
    picture = ElementTree.parse(tmp_path / "confusion.svg").getroot()
    assert "card stolen taken for card <lost>: 1 of 10" in " ".join(picture.itertext())


def test_the_report_of_a_run_in_a_bucket_is_written_there(gcs: Any) -> None:
    start = "gs://bucket/runs/bert/attempts/attempt-0000.t.json"
    storage.write(start, json.dumps({"run_id": "bert", "hosts": ["a"]}).encode())
    log = MetricsLog(AttemptInfo("gs://bucket/runs/bert", 0, 0))
    log.log(1, {"loss": 2.0})
    log.finish()
    html.write_end(start, None, 1, SECONDS)
    assert html.write_report("gs://bucket/runs/bert") == "gs://bucket/runs/bert/report.html"
    assert "bert finished" in texts(storage.read("gs://bucket/runs/bert/report.html").decode())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run's folder"):
        html.read_run(str(tmp_path / "nothing"))
