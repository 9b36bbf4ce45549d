"""`backend: tensorflow` by the same commands: two hosts train; at night they lose one, end at once, and the resumed run
equals the undisturbed one bit for bit. Starts one slice of two hosts and trains once, and twice at night."""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.container import small_runs
from tests.rehearsal.workstation import ROOT, EmulatedSlice, Workstation, on_this_machine, settings

pytestmark = pytest.mark.alone

FILE = "tensorflow.yaml"
LOCAL = ("-f", FILE)
SETTINGS = ("train.steps=160", "checkpoint.every_steps=20", "evaluation.every=80", "train.log_every=5")


@pytest.fixture(scope="module")
def trainable(emulator: Workstation) -> Iterator[EmulatedSlice]:
    """A READY slice of two hosts, and data in the bucket."""
    shutil.copy(ROOT / "examples" / FILE, emulator.folder / FILE)
    emulator.make_data(LOCAL)
    with emulator.slice_of(FILE) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(trainable: EmulatedSlice) -> dict[str, Any]:
    ended = trainable.good_on_slice("run", "--new", "--json", *settings(*SETTINGS))
    return trainable.results(ended.json()["run"], LOCAL)


def test_two_hosts_train_one_model(undisturbed: dict[str, Any]) -> None:
    told = undisturbed
    assert (told["hosts"], told["devices"], told["compilations"]) == (2, 2, 3)  # gradients, update, evaluation
    assert told["last_loss"] < told["first_loss"] - 0.5


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # two trainings of two hosts, on a machine that may be busy
def test_a_lost_host_ends_all_which_reach_the_same_bits(trainable: EmulatedSlice, undisturbed: dict[str, Any]) -> None:
    work, run = trainable, ("run", "--json", *settings(*SETTINGS))
    running = work.begin_on_slice(*run, "--new")
    running.wait_for(r"^\[0\].*\bstep +[4-9][05]/", 200)
    work.good("emulator", "inject", "kill-host", "tensorflow", "1")
    begun = time.monotonic()
    ended = running.end(60)
    assert time.monotonic() - begun < on_this_machine(10), "the run must end within 10 s of the host's death"
    assert ended.require(11, "host 1 is gone").json()["cause"]["worker"] == 1

    work.good("emulator", "inject", "restore-host", "tensorflow", "1")
    again = work.good_on_slice(*run).json()
    assert (again["run"], again["attempt"]) == (ended.json()["run"], 1)
    small_runs.require_same_bits(work.results(again["run"], LOCAL), undisturbed, "committed_step", "steps")
