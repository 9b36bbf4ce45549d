"""Charts with each number where its scale says, and report.html, which fetches nothing and says what happened."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from training import storage
from training.cli.main import tpu_train
from training.errors import BadInput, StopRequested, TrainError
from training.telemetry import report as html
from training.telemetry import svg
from training.telemetry.metrics import AttemptInfo, MetricsLog
from training.telemetry.svg import axis_ticks, confusion_matrix, downsample, format_number, line_chart, share_bar

SECONDS = {"start": 2.0, "step": 6.0, "compile": 2.0, "total": 10.0}


def attempt(run: str, number: int, resumed: int, steps: range, error: Exception | None, ended: bool = True) -> None:
    """Writes what an attempt leaves in the run's folder, a path or a URL."""
    start = f"{run}/attempts/attempt-{number:04d}.t{number}.json"
    record = {"run_id": "bert-<1>", "hosts": ["a", "b"], "code": "c0de", "config": {"seed": 1}}
    storage.write(start, json.dumps({**record, "began": 1795169047.0 + number}).encode())
    log = MetricsLog(AttemptInfo(run, number, resumed))
    for step in steps:
        log.log(step, {"loss": 8.0 / step, "learning_rate": 1e-4, "examples_per_second": 100.0 + step})
    log.log(steps[-1], {"eval_loss": 2.5, "eval_accuracy": 0.25})
    log.flush()
    if ended:
        html.write_end(start, error, steps[-1], SECONDS)


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
    run = str(tmp_path)
    attempt(run, 0, 0, range(1, 31), StopRequested("stopped after step 30"))
    attempt(run, 1, 30, range(31, 41), None, ended=False)
    attempt(run, 2, 20, range(21, 51), TrainError("the loss of step 50 is nan & <infinite>"))
    page_text = texts(html.render_report(html.read_run(run)))
    assert "bert-<1> failed" in page_text
    assert "the loss of step 50 is nan & <infinite>" in page_text
    for words in ("stopped after step 30", "going on, or killed", "evaluation accuracy", "None was committed"):
        assert words in page_text
    assert "8.0000 → 0.1600" in page_text
    (tmp_path / html.SUMMARY_FILE).write_text("half")
    assert texts(html.render_report(html.read_run(run))) == page_text
    assert "Goodput, the share of the time that was spent in steps: 60.0% of 20.0 s" in page_text


def test_the_report_of_a_finished_run_in_a_bucket_has_figures_and_confusion(gcs: Any) -> None:
    run = "gs://bucket/runs/bank"
    attempt(run, 0, 0, range(1, 31), None)
    summary: dict[str, Any] = {
        "run_id": "bank", "examples_per_second": 1234.5, "tokens_per_second": 9876.0, "mfu": 0.412, "goodput": 0.9,
        "compilations": 4, "compile_seconds": 3.0, "graphs": 4, "device_to_host_syncs": 0,
        "host_fallbacks": [], "skipped_records": 3,
        "hub": {"repository": "org/bank", "step": 30, "commit": "https://hub/org/bank/commit/1", "error": None},
    }  # fmt: skip
    storage.write(f"{run}/{html.SUMMARY_FILE}", json.dumps(summary).encode())
    counts = [[7.0, 3.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 5.0]]
    html.write_confusion(run, ["card <lost>", "card stolen", "other"], counts)
    assert CliRunner().invoke(tpu_train, ["report", run]).output.strip() == f"{run}/report.html"
    page_text = texts(storage.read(f"{run}/report.html").decode())
    for words in ("bank finished", "1,234.5", "9,876", "41.2%", "in steps: 60.0% of 10.0 s", "4 graphs"):
        assert words in page_text
    assert "3 rows of damaged records" in page_text
    assert "hub: org/bank has step 30: https://hub/org/bank/commit/1" in page_text
    assert "card <lost> taken for card stolen: 3 of 10" in page_text
    assert "90.0%" not in page_text, "one goodput: over all attempts"
    picture = ElementTree.fromstring(storage.read(f"{run}/confusion.svg"))
    assert "card stolen taken for card <lost>: 1 of 10" in " ".join(picture.itertext())
    attempt(run, 1, 30, range(31, 61), TrainError("no such record"))
    later = texts(html.render_report(html.read_run(run)))
    assert not [words for words in ("1,234.5", "41.2%", "taken for") if words in later], "figures of attempt 0"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run's folder"):
        html.read_run(str(tmp_path / "nothing"))


def elements(svg: str, kind: str) -> list[dict[str, str]]:
    """The attributes of all elements of a kind, whose places are within the picture."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    found = [element.attrib for element in root.iter(f"{{http://www.w3.org/2000/svg}}{kind}")]
    for each in found:
        for name, most in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(each.get(name, 0)) <= most, each
        assert float(each.get("x", 0)) + float(each.get("width", 0)) <= width + 0.1, each
    return found


def test_a_curve_is_between_the_corners_of_its_axes() -> None:
    chart = line_chart("loss", {"a": [(0, 0.0), (5, math.nan), (10, 1.0)], "b": [(0, 0.5), (10, 0.5)]})
    assert [(dot["cx"], dot["cy"]) for dot in elements(chart, "circle")] == [
        ("64.0", "210.0"), ("544.0", "34.0"), ("64.0", "122.0"), ("544.0", "122.0")
    ]  # fmt: skip
    assert {(line["x1"], line["x2"]) for line in elements(chart, "line")} == {("64", "544")}
    assert len(elements(chart, "line")) == len({line["y1"] for line in elements(chart, "line")}) == 6
    assert [text["x"] for text in elements(chart, "text")][-2:] == ["339.0", "449.0"]  # the names of the curves
    assert elements(chart, "polyline")[0]["points"] == "64.0,210.0 544.0,34.0"
    assert "nothing was recorded" in line_chart("Loss", {"a": [(1, math.nan)]})


def test_shares_fill_their_bar() -> None:
    bars = elements(share_bar("time", [("a", 1.0), ("b", 3.0)], width=400), "rect")
    assert [(bar["x"], bar["width"]) for bar in bars if bar["height"] == "22"] == [("0.0", "100.0"), ("100.0", "300.0")]


@pytest.mark.parametrize(("classes", "has_counts"), [(26, True), (27, False)])
def test_a_matrix_has_true_classes_downwards_and_predicted_ones_across(classes: int, has_counts: bool) -> None:
    counts = [[0.0] * classes for _ in range(classes)]
    counts[1][0], counts[1][1], counts[0][classes - 1] = 1.0, 3.0, 2.0
    matrix = confusion_matrix([f"c{number:02d}" for number in range(classes)], counts)
    *cells, frame = elements(matrix, "rect")
    size, margin = 640 // classes, float(frame["x"])
    places = [((float(cell["x"]) - margin) / size, (float(cell["y"]) - margin) / size) for cell in cells]
    assert places == [(classes - 1, 0), (0, 1), (1, 1)]
    assert float(frame["width"]) == float(frame["height"]) == classes * size
    assert [cell["opacity"] for cell in cells] == ["1.00", "0.47", "0.82"]
    texts = list(ElementTree.fromstring(matrix).itertext())
    assert [text for text in texts if text in ("1", "2", "3")] == (["2", "1", "3"] if has_counts else [])
    assert texts[-2:] == [f"c00 taken for c{classes - 1}: 2 of 2", "c01 taken for c00: 1 of 4"]


def test_a_long_curve_keeps_its_spikes_in_their_order() -> None:
    points = [(float(step), 1.0) for step in range(1000)]
    points[500], points[700] = (500.0, 9.0), (700.0, -9.0)
    kept = downsample(points, 100)
    assert len(kept) <= 100
    assert {(500.0, 9.0), (700.0, -9.0)} < set(kept)
    assert kept == sorted(kept)
    assert downsample(points, 1000) == points


def test_numbers_at_an_axis_are_short_and_durations_rounded_once() -> None:
    short = [format_number(value) for value in (0, 0.001, 0.00005, 9999, 10_000, 9.5e6, 1e7)]
    assert short == ["0", "0.001", "5e-5", "9999", "10k", "9500k", "1e7"]
    assert list(map(svg.format_duration, (59.94, 59.96, 3599.4))) == ["59.9 s", "1 min 00 s", "59 min 59 s"]


@pytest.mark.parametrize(
    ("low", "high"), [(3e-13, 4e-13), (0.7, 0.7 + 2e-16), (0.0, 0.0), (-5.0, 7.0), (1e-6, 4e-4), (1, 123_456)]
)
def test_ticks_surround_the_values(low: float, high: float) -> None:
    result = axis_ticks(low, high, 5)
    assert result[0] <= low <= high <= result[-1]
    assert 2 <= len(set(result)) == len(result) <= 9
