"""Whatever is killed, whenever: restoring gives the newest whole checkpoint, and the last weights are the same bits.

Trainers on two and on four hosts are killed at random moments (the seed is fixed), started again after each kill, and
compared with a run that nothing disturbs. TPU_LAUNCH_KILLS says how many kills there are in all. They come at night,
because the simulated trainers of tests/simulation are killed at every point in `make test`.
"""

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.container import small_runs
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import verify
from training.errors import Exit

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("TPU_LAUNCH_KILLS", "100"))
ATTEMPT = 300.0  # seconds; most of the 3 s that it takes are compiling, but a machine may have other things to do
LONGEST_WAIT = 0.2  # seconds from the first step to the kill, in which less than STEPS steps are trained
STEPS = 40


def newest(folder: Path, run_id: str) -> int:
    """Returns the newest committed step, 0 without one. Raises Damaged unless all committed checkpoints are whole."""
    place = str(folder / "runs" / run_id / "checkpoints")
    steps = committed_steps(place)
    for step in steps:
        verify(place, step)
    return steps[0] if steps else 0


@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize(("count", "kills"), [(2, KILLS - KILLS // 3), (4, KILLS // 3)])
def test_killed_at_any_moment(folder: Path, count: int, kills: int) -> None:
    draw, name, straight = random.Random(count), f"killed-{count}", f"undisturbed-{count}"
    small = {"model__layers": 1, "model__hidden_size": 16, "data__evaluation": None, "export__at_end": False}
    saves = {"train__steps": STEPS * (kills + 1), "checkpoint__every_steps": 2, "checkpoint__keep_last": 2}
    config = small_runs.document(folder, **small, **saves)
    for attempt in range(kills):
        before = newest(folder, name)
        hosts = small_runs.start(folder, name, config, hosts=count, attempt=attempt)
        hosts[0].wait_for("  loss ", ATTEMPT)
        time.sleep(draw.uniform(0, LONGEST_WAIT))
        victims = range(count) if draw.random() < 0.1 else [draw.randrange(count)]
        for victim in victims:
            hosts[victim].process.kill()
        codes = [host.finish(ATTEMPT) for host in hosts]
        told = "\n".join(host.text()[-3000:] for host in hosts)
        assert {codes[victim] for victim in victims} <= {-9, Exit.LOST_PEER}, told
        assert {code for worker, code in enumerate(codes) if worker not in victims} <= {Exit.LOST_PEER}, told
        begun = re.findall(r"going on from \S+/step-(\d+)", hosts[0].text())
        assert int(begun[-1] if begun else 0) == before, told
        assert newest(folder, name) >= before
    for run_id, number in ((name, kills), (straight, 0)):
        small_runs.trained(folder, run_id, config, count, attempt=number, seconds=ATTEMPT)
    killed, undisturbed = (small_runs.summary(folder, run_id) for run_id in (name, straight))
    for key in ("first_loss", "last_loss", "final_weights_crc32c", "committed_step"):
        assert killed[key] == undisturbed[key], key
    losses, expected = (small_runs.figures(folder, run_id, "loss") for run_id in (name, straight))
    assert max(losses) == max(expected)
    assert losses.items() <= expected.items(), "a loss in the history is not the undisturbed one"
