"""Every protection that a simulator is tried without can still be taken away: the patches apply to the tree."""

import pytest

from tests.simulation.__main__ import sides
from tests.simulation.sensitivity import check, patches

PATCHES = [patch for side in sides() for patch in patches(side)]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parents[1].name}-{patch.stem}")
def test_patch_applies(patch):
    assert check(patch) == ""
