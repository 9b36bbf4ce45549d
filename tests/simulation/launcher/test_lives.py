"""The launcher's promises hold in 10,000 lives (LIVES changes the number, FIRST the first seed)."""

import os
import time

import pytest

from tests.simulation.__main__ import play_lives
from tests.simulation.launcher.life import play

LIVES = int(os.environ.get("LIVES", "10000"))
FIRST = int(os.environ.get("FIRST", "0"))


def test_a_seed_is_a_life():
    assert play(7, story=True).story == play(7, story=True).story


@pytest.mark.timeout(60 + LIVES)
def test_promises_hold_in_every_life(capsys: pytest.CaptureFixture[str]):
    began = time.monotonic()
    with capsys.disabled():
        broken = play_lives("launcher", range(FIRST, FIRST + LIVES))
        print(f"\nlauncher: {LIVES} lives in {time.monotonic() - began:.0f} s, {len(broken)} promises broken")
    first = {promise: found[0] for promise, found in broken.items()}
    assert not first, "python -m tests.simulation --side launcher --seed SEED --story"
