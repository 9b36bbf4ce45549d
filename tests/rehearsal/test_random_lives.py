"""Claim: whatever happens to a run in random order, `up` and `run`, repeated until the run has finished, end with the
bits of the undisturbed run. Hosts are killed, hang and are cut off, the slice is preempted, launchers die, and a second
terminal runs, stops and downs. Each life trains on emulated hosts for some minutes."""

import random
import time
from typing import Any

import pytest

from tests.rehearsal.test_recovery import FILE, require_the_same, small, trainable, undisturbed  # noqa: F401
from tests.rehearsal.workstation import Running, Workstation, settings

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

DEEDS = ("kill-host", "hang-host", "cut-host", "preempt", "launcher dies", "ctrl-c", "run", "stop", "down")
_OPTIONS = ("run.preemption_retries=30", "run.failure_retries=5", "run.host_lost_seconds=10")
_COMMANDS = 30  # until a run has succeeded


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_a_run_to_which_anything_happens_ends_with_the_bits_of_the_undisturbed_one(
    trainable: Workstation,  # noqa: F811
    undisturbed: dict[str, Any],  # noqa: F811
    seed: int,
) -> None:
    work, rng = trainable, random.Random(seed)
    deeds = [rng.choice(DEEDS) for _ in range(rng.randint(4, 6))]
    print(f"life {seed}: {', '.join(deeds)}")
    before = set(work.runs.iterdir())
    for _ in range(_COMMANDS):
        work.launch("--emulated", "up", "-f", FILE)
        new = ["--new"] if set(work.runs.iterdir()) == before else []
        running = work.begin("--emulated", "run", *new, "-f", FILE, *small(), *settings(*_OPTIONS))
        live(work, running, deeds, rng)
        ended = running.end(900)
        print(f"  run ended with {ended.code}, left: {', '.join(deeds) or 'nothing'}")
        assert "Traceback" not in ended.output, ended.output
        made = set(work.runs.iterdir()) - before
        if made and any(event.get("outcome") == "finished" for event in work.events(min(made).name)):
            break
    assert len(made) == 1, ended.output
    work.good("emulator", "inject", "clear")
    require_the_same(work, made.pop().name, undisturbed)
    assert work.containers_of_runs() == []


def live(work: Workstation, running: Running, deeds: list[str], rng: random.Random) -> None:
    """Does one deed after another, at random moments, while a `run` goes on."""
    due = time.monotonic() + rng.uniform(1.0, 40.0)
    while running.process.poll() is None:
        if deeds and time.monotonic() > due:
            do(work, running, deeds.pop(0), rng)
            due = time.monotonic() + rng.uniform(1.0, 40.0)
        time.sleep(0.2)


def do(work: Workstation, running: Running, deed: str, rng: random.Random) -> None:
    """Does one deed. Emulated hosts come back by themselves after some seconds."""
    print(f"  {deed}")
    match deed:
        case "kill-host" | "hang-host" | "cut-host":
            seconds = rng.choice((3, 8, 20))
            work.launch("emulator", "inject", deed, "rehearsal", str(rng.randrange(2)), "--for", str(seconds))
        case "preempt":
            work.launch("emulator", "inject", "preempt", "rehearsal")
        case "launcher dies":
            running.process.kill()
        case "ctrl-c":
            running.interrupt()
        case "run":
            ended = work.launch("--emulated", "run", "-f", FILE, *small(), seconds=900)
            assert "Traceback" not in ended.output, ended.output
        case _:
            ended = work.launch("--emulated", deed, "-f", FILE)
            assert "Traceback" not in ended.output, ended.output
