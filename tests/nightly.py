"""Cases of a test of which `make test` runs some, and `make test-nightly` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_at_night(cases: Iterable[Any], now: Collection[Any]) -> list[Any]:
    """All cases, as parameters; those that are not among `now` are marked `nightly`."""
    return [pytest.param(case, marks=[] if case in now else pytest.mark.nightly) for case in cases]
