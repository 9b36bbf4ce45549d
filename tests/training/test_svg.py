"""Claims about charts: each number is where its scale says, and nothing is drawn outside of the picture."""

import math
from xml.etree import ElementTree

import pytest

from training.telemetry import svg
from training.telemetry.svg import axis_ticks, confusion_matrix, downsample, format_number, line_chart, share_bar


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
    curves = {"a": [(0, 0.0), (5, math.nan), (10, 1.0)], "b": [(0, 0.5), (10, 0.5)]}
    chart = line_chart("loss", curves)
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001, "0.001"), (0.00005, "5e-5"), (9999, "9999"), (10_000, "10k"), (9.5e6, "9500k"), (1e7, "1e7")],
)
def test_numbers_at_an_axis_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (3.2, 3.9), (1.0, 1.0), (0.0, 0.0), (-5.0, 7.0), (1e-6, 4e-4), (1, 123_456)]
)
def test_ticks_surround_the_values(low: float, high: float) -> None:
    result = axis_ticks(low, high, 5)
    assert result[0] <= low <= high <= result[-1]
    assert 2 <= len(result) <= 9


def test_durations_are_rounded_once() -> None:
    assert list(map(svg.format_duration, (59.94, 59.96, 3599.4))) == ["59.9 s", "1 min 00 s", "59 min 59 s"]
