"""Executions on a virtual TPU end late, as on chips: the host stays ahead, and results, saves and stops are equal."""

import signal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.container import small_runs
from training.backends.torch_xla.step_cache import FIRST_TRACED

SECONDS = 560.0  # beside other tests
STEPS, SAVED_AT = 24, 16
pytestmark = pytest.mark.timeout(2 * SECONDS)


class Execution(NamedTuple):
    """Times in seconds of time.monotonic: the call, and when the device began and ended."""

    called: float
    begun: float
    ended: float


def read_executions(log: Path) -> list[Execution]:
    """Reads the file that VIRTUAL_TPU_LOG named."""
    return [Execution(*(int(number) / 1e9 for number in line.split())) for line in log.read_text().splitlines()]


def test_programs_are_started_before_the_one_before_has_ended(tmp_path: Path) -> None:
    """In training and in evaluation, as soon as no step is traced any more; stopped in between and resumed."""
    folder, log = small_runs.prepare(tmp_path / "data"), tmp_path / "executions"
    config = small_runs.document(
        folder, train__steps=STEPS, train__global_batch_size=2, checkpoint__every_steps=SAVED_AT, model__layers=1
    )
    device = {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}
    late = {**device, "VIRTUAL_TPU_STEP_MS": "200", "VIRTUAL_TPU_LOG": str(log)}
    straight = small_runs.trained(folder, "straight", config, seconds=SECONDS, **device)
    (host,) = small_runs.start(folder, "late", config, **late)
    host.wait_for(f"step {SAVED_AT + 2}/{STEPS}", SECONDS)
    host.process.send_signal(signal.SIGTERM)
    assert host.finish(SECONDS) == 75, host.text()
    stopped = read_executions(log)
    log.unlink()
    assert is_ahead(stopped[FIRST_TRACED:SAVED_AT])
    resumed = small_runs.trained(folder, "late", config, attempt=1, seconds=SECONDS, **late)
    executions = read_executions(log)
    evaluation = executions[STEPS - len(stopped) :]
    assert len(evaluation) > 2 * FIRST_TRACED
    assert is_ahead(evaluation[FIRST_TRACED:])
    small_runs.require_same_bits(resumed, straight)


def is_ahead(executions: list[Execution]) -> bool:
    """Returns whether three of four programs were there when the one before ended: a loop that waits for results has
    none, and a busy machine holds some back."""
    ahead = [later.called < earlier.ended and later.begun == earlier.ended for earlier, later in pairwise(executions)]
    return sum(ahead) >= 0.75 * len(ahead)
