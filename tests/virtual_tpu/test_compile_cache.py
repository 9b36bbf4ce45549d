"""Compiled programs outlive the process: a second attempt on the same host compiles nothing, and trains to the same
bits. What was damaged in between, or did not run after it was loaded, is compiled again."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container import small_runs
from tests.nightly import others_at_night
from tests.processes import run_python, wait_until

SECONDS = 560.0  # beside other tests
pytestmark = pytest.mark.timeout(SECONDS + 40)


def attempt(folder: Path, run_id: str, programs: Path) -> tuple[dict[str, Any], str]:
    """The summary of a run of four steps and an evaluation, and what it printed."""
    config = small_runs.document(folder, train__steps=4, train__strict=True)
    (host,) = small_runs.start(folder, run_id, config, TPU_LAUNCH_COMPILE_CACHE=str(programs))
    assert host.finish(SECONDS) == 0, host.text()
    return small_runs.summary(folder, run_id), host.text()


def test_a_second_start_compiles_only_what_was_damaged_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    folder, programs = small_runs.prepare(tmp_path / "data"), tmp_path / "programs"
    first, _ = attempt(folder, "first", programs)
    assert first["devices"] == 8
    assert first["programs_from_cache"] == 0
    assert first["compilations"] == 2, "of the step, and of the evaluation"

    evaluation, _step = sorted(programs.iterdir(), key=lambda entry: entry.stat().st_size)
    content = evaluation.read_bytes()
    evaluation.write_bytes(content[: len(content) // 2])
    second, text = attempt(folder, "second", programs)
    assert (second["programs_from_cache"], second["compilations"]) == (1, 2)
    assert "attempt 0: first step after " in text
    assert "; 1 program(s), 1 of them from the cache" in text
    assert evaluation.stat().st_size > 0.9 * len(content), "written again"
    for figure in ("final_weights_crc32c", "eval_loss", "last_loss"):
        assert first[figure] == second[figure]


@pytest.mark.parametrize("fault", others_at_night(("fail", "hang"), ("fail",)))
def test_a_program_that_does_not_run_after_it_was_loaded_is_met_once(fault: str, tmp_path: Path) -> None:
    folder, programs = small_runs.prepare(tmp_path / "data"), tmp_path / "programs"
    config = small_runs.document(folder, train__steps=4, model__layers=1, evaluation__at_end=False)
    environment = {"TPU_LAUNCH_COMPILE_CACHE": str(programs), "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
    first = small_runs.trained(folder, "first", config, seconds=SECONDS, **environment)
    (entry,) = programs.iterdir()
    assert small_runs.trained(folder, "proved", config, seconds=SECONDS, **environment)["programs_from_cache"] == 1
    assert list(programs.iterdir()) == [entry]

    (host,) = small_runs.start(folder, "faulty", config, **environment, VIRTUAL_TPU_FAULT=fault)
    if fault == "hang":
        wait_until(lambda: len(list(programs.iterdir())) >= 2, SECONDS)
        host.process.kill()
    assert host.finish(SECONDS) not in (0, 75), host.text()
    for run_id in ("next", "one after"):
        (host,) = small_runs.start(folder, run_id, config, **environment, VIRTUAL_TPU_FAULT=fault)
        assert host.finish(SECONDS) == 0, host.text()
        assert f"not kept as long as there is {entry}.unproven" in host.text()
        summary = small_runs.summary(folder, run_id)
        assert summary["programs_from_cache"] == 0
        assert summary["final_weights_crc32c"] == first["final_weights_crc32c"]


INTERRUPTED = """
import signal
from training import one_host
from training.backends import compile_cache

def interrupted(function):
    def call(*arguments):
        setattr(compile_cache.ProgramCache, function.__name__, function)
        signal.raise_signal(signal.SIGINT)
    return call

for function in (compile_cache.ProgramCache._key, compile_cache.ProgramCache._serialize):
    setattr(compile_cache.ProgramCache, function.__name__, interrupted(function))
for _ in range(2):
    try:
        one_host.train(one_host.configuration("notebook.yaml"))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        print("trained", flush=True)
"""


def test_interrupts_while_a_program_compiles_end_the_cell_and_not_the_kernel(tmp_path: Path) -> None:
    """One before the compiler, and one after it. The next cell trains."""
    folder = small_runs.prepare(tmp_path / "data")
    config = small_runs.document(folder, train__steps=2, model__layers=1, export__at_end=False)
    (folder / "notebook.yaml").write_text(yaml.safe_dump(config))
    device = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LAUNCH_COMPILE_CACHE": str(tmp_path / "programs")}
    printed = run_python("-c", INTERRUPTED, folder=folder, seconds=SECONDS, **device)
    ends = ["interrupted", "trained"]
    assert [line for line in printed.splitlines() if line in ends] == ends
