"""The statements that a simulated run reaches are found by marks in the source."""

import sys
from pathlib import Path

import pytest

from tests.simulation import reached

SOURCE = '''"""A module."""

LIMIT = 1


def double(value):
    """Twice."""
    if value > LIMIT:
        for step in range(value):
            value += 1
    elif value:
        value = (
            2
        )
    return value
'''


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("value += 1", "value += 2", 10),
        ("            2\n", "            3\n", 12),
        ("if value > LIMIT", "if value < LIMIT", 8),
        ("elif value", "elif not value", 8),
        ("return value", "return 2 * value", 15),
        ("            value += 1\n", "            value += 1\n            value += 1\n", 10),
        ("LIMIT = 1", "LIMIT = 2", None),
        ("def double(value)", "def double(value=1)", None),
    ],
)
def test_a_change_is_marked_at_the_innermost_statement(old, new, line):
    changed = SOURCE.replace(old, new, 1)
    assert changed != SOURCE
    assert reached.places_of(SOURCE, changed) == (None if line is None else {line})


def test_a_marked_source_reports_what_it_reaches():
    seen = []
    module = {"_reached": seen.append}
    exec(reached.mark(SOURCE, [(10, 1), (12, 2), (15, 3)]), module)
    assert module["double"](2) == 4
    assert seen == [1, 1, 3]
    assert module["double"](1) == 2
    assert seen == [1, 1, 3, 2, 3]


def test_runs_that_reach_a_function_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    Path("doubled.py").write_text(SOURCE)
    line = reached.first_line(SOURCE, "double")
    reached.import_instead(Path("doubled.py"), reached.mark(SOURCE, [(line, 4)]))
    import doubled

    assert reached.record(lambda seed: seed > 2 and doubled.double(seed), range(5)) == {4: [3, 4]}
