"""Every protection that a simulator is tried without can still be taken away: the patches apply to the tree."""

import pytest

from tests.simulation import reached
from tests.simulation.__main__ import sides
from tests.simulation.sensitivity import check, patches

PATCHES = [patch for side in sides() for patch in patches(side)]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parents[1].name}-{patch.stem}")
def test_patch_applies(patch):
    assert check(patch) == ""


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
    assert reached.places_of({"m.py": SOURCE}, {"m.py": changed}) == (None if line is None else {"m.py": {line}})


def test_a_marked_source_says_what_it_reaches():
    seen = []
    module = {"_reached": seen.append}
    exec(reached.mark(SOURCE, [(10, 1), (12, 2), (15, 3)]), module)
    assert module["double"](2) == 4
    assert seen == [1, 1, 3]
    assert module["double"](1) == 2
    assert seen == [1, 1, 3, 2, 3]
