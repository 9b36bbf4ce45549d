"""The runs that call a function are found by a mark in its source."""

import sys
from pathlib import Path

from tests.simulation import reached

SOURCE = '''"""A module."""


class Doubling:
    def double(self, value):
        """Twice."""
        return 2 * value
'''


def test_runs_that_reach_a_function_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    Path("doubled.py").write_text(SOURCE)
    reached.import_instead(Path("doubled.py"), reached.mark(SOURCE, "Doubling.double"))
    import doubled

    assert reached.record(lambda seed: seed > 2 and doubled.Doubling().double(seed), range(5)) == [3, 4]
