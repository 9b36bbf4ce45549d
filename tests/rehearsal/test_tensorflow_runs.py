"""`backend: tensorflow` by the same commands: two hosts train; at night they lose one, end at once, and the resumed run
equals the undisturbed one bit for bit. Starts one slice of two hosts and trains once, and twice at night."""

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rehearsal.workstation import ROOT, EmulatedSlice, Running, Workstation, settings

pytestmark = pytest.mark.alone

FILE = "tensorflow.yaml"
SETTINGS = ("train.steps=160", "checkpoint.every_steps=20", "evaluation.every=80", "train.log_every=5")


def begin_to_train(work: EmulatedSlice, *options: str) -> Running:
    return work.begin_on_slice("run", "--json", *settings(*SETTINGS), *options)


def summary(lines: list[str]) -> dict[str, Any]:
    """What host 0 printed last."""
    [line] = [line for line in lines if line.startswith("[0] summary: ")]
    return json.loads(line.removeprefix("[0] summary: "))


@pytest.fixture(scope="module")
def trainable(emulator: Workstation) -> Iterator[EmulatedSlice]:
    """A READY slice of two hosts, and data in the bucket."""
    shutil.copy(ROOT / "examples" / FILE, emulator.folder / FILE)
    emulator.make_data(("-f", FILE))
    with emulator.slice_of(FILE) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(trainable: EmulatedSlice) -> dict[str, Any]:
    running = begin_to_train(trainable, "--new")
    running.end(400).require(0)
    return summary(running.lines)


def test_two_hosts_train_one_model(undisturbed: dict[str, Any]) -> None:
    told = undisturbed
    assert (told["hosts"], told["devices"], told["compilations"]) == (2, 2, 3)  # gradients, update, evaluation
    assert told["last_loss"] < told["first_loss"] - 0.5


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # two trainings of two hosts, on a machine that may be busy
def test_a_lost_host_ends_all_which_reach_the_same_bits(trainable: EmulatedSlice, undisturbed: dict[str, Any]) -> None:
    work = trainable
    running = begin_to_train(work, "--new")
    running.wait_for(r"^\[0\].*\bstep +[4-9][05]/", 200)
    work.good("emulator", "inject", "kill-host", "tensorflow", "1")
    begun = time.monotonic()
    ended = running.end(60)
    assert time.monotonic() - begun < 10, "the run must end within 10 s of the host's death"
    assert ended.require(11, "host 1 is gone").json()["cause"]["worker"] == 1

    work.good("emulator", "inject", "restore-host", "tensorflow", "1")
    resumed = begin_to_train(work)
    again = resumed.end(400).require(0).json()
    assert (again["run"], again["attempt"]) == (ended.json()["run"], 1)
    after = summary(resumed.lines)
    for key in ("first_loss", "last_loss", "eval_loss", "final_weights_crc32c", "committed_step", "steps"):
        assert after[key] == undisturbed[key], f"{key}: {after[key]} after the kill, {undisturbed[key]} undisturbed"
