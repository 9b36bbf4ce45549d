"""A user's own program runs on an emulated slice of two hosts, from a folder and the documented variables. Starts one
slice; half a minute."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.rehearsal.workstation import ROOT, Workstation

pytestmark = pytest.mark.alone


@pytest.mark.nightly
def test_own_code_trains_over_two_hosts(emulator: Workstation) -> None:
    shutil.copytree(ROOT / "examples" / "own_code", emulator.folder / "own")
    ended = emulator.train_on_slice("own/run.yaml")
    found = re.findall(r"^\[(\d)\] host (\d) of 2: y = ([\d.-]+) x \+ ([\d.-]+)$", ended.output, re.MULTILINE)
    assert sorted(each[:2] for each in found) == [("0", "0"), ("1", "1")], ended.output
    assert found[0][2:] == found[1][2:], "the hosts end with the same weights"
    assert [round(float(value), 2) for value in found[0][2:]] == [3.0, -2.0]
