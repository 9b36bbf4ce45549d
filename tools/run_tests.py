"""Everything `make test` runs: lint, fast tests, tests inside the images, whole emulated slices. run_tests.py
[stage...]

A stage that fails does not keep the next from running. Each stage's output goes to the screen and to
.tpu-launch/tests/<stage>.log; at the end comes a table of what ran and how long it took, and as the last line "N
passed, N failed", also in .tpu-launch/tests/closing-line.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".tpu-launch" / "tests"
PYTEST = (sys.executable, "-m", "pytest")


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    seconds: int  # how long it may take
    runs_tests: bool = True


@dataclass(frozen=True)
class Outcome:
    stage: Stage
    returncode: int
    seconds: float
    passed: int
    failed: int

    @property
    def verdict(self) -> str:
        if self.returncode:
            return "FAILED"
        return f"{self.passed} passed" if self.stage.runs_tests else "clean"


SLOWEST = ("--durations=0", "--durations-min=1")
FAULTS = tuple(
    f"tests/rehearsal/test_{name}.py"
    for name in ("fault_matrix", "queued_slices", "emulator_slice", "housekeeping", "gcloud_defects")
)
SIMULATORS = ("tests/simulation/test_scheduler.py", "tests/simulation/test_sensitivity.py")
# One after the other; those of one line at the same time, because they wait more than they work, for processes, hosts
# and time-outs.
STAGES = (
    (Stage("lint", ("make", "--no-print-directory", "lint"), 300, runs_tests=False),),
    (Stage("fast", (*PYTEST, "--durations=5"), 600),),
    (
        Stage("trainer-lives", (*PYTEST, "-s", "tests/simulation/trainer", *SIMULATORS), 900),
        Stage("launcher-lives", (*PYTEST, "-s", "tests/simulation/launcher"), 900),
    ),
    (Stage("container", (sys.executable, "tools/container_tests.py"), 3000),),
    (Stage("virtual-tpu", (sys.executable, "tools/container_tests.py", "virtual-tpu"), 1200),),
    (Stage("tensorflow", (sys.executable, "tools/container_tests.py", "tensorflow"), 1500),),
    (Stage("oracle-torch-xla", (sys.executable, "tools/container_tests.py", "oracle-torch-xla", "-s"), 600),),
    (Stage("oracle-tensorflow", (sys.executable, "tools/container_tests.py", "oracle-tensorflow", "-s"), 900),),
    (Stage("beam", (sys.executable, "tools/container_tests.py", "beam"), 600),),
    (Stage("rehearsal", (*PYTEST, "tests/rehearsal", "-m", "alone", *SLOWEST), 2400),),
    (
        Stage(
            "slices",
            (*PYTEST, "tests/rehearsal", "-m", "not alone", *(f"--ignore={file}" for file in FAULTS), *SLOWEST),
            1800,
        ),
        Stage("faults", (*PYTEST, *FAULTS, *SLOWEST), 1800),
    ),
)


class Running:
    """A stage under way. Its lines go to the screen, with its name where others run beside it, and to its log."""

    def __init__(self, stage: Stage, *, alone: bool) -> None:
        print(f"\n== {stage.name}: {' '.join(stage.command)}", flush=True)
        self.stage = stage
        self._prefix = "" if alone else f"{stage.name}: "
        self._closing = ""
        self._began = self._ended = time.monotonic()
        self.process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._late = threading.Timer(
            stage.seconds, end, ([self.process], f"stage {stage.name} was not done within {stage.seconds} s")
        )
        self._late.daemon = True
        self._late.start()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with (LOGS / f"{self.stage.name}.log").open("w", encoding="utf-8") as log:
            for line in self.process.stdout:
                print(self._prefix + line, end="", flush=True)
                log.write(line)
                if re.search(r"\d+ (passed|failed|errors?)\b.* in [\d.]+s", line):
                    self._closing = line
        self._ended = time.monotonic()

    def outcome(self) -> Outcome:
        """Waits for its end."""
        returncode = self.process.wait()
        self._late.cancel()
        self._reading.join()
        passed, failed = count(self._closing, "passed"), count(self._closing, "failed", "error", "errors")
        if returncode and not failed:
            failed = 1  # the stage itself
        return Outcome(self.stage, returncode, self._ended - self._began, passed, failed)


def run(stages: Sequence[Stage]) -> list[Outcome]:
    """At the same time."""
    started: list[Running] = []
    try:
        for stage in stages:
            started.append(Running(stage, alone=len(stages) == 1))
        return [each.outcome() for each in started]
    except BaseException:
        end([each.process for each in started], f"interrupted: {', '.join(each.stage.name for each in started)}")
        raise


def count(closing: str, *words: str) -> int:
    return sum(int(number) for number, word in re.findall(r"(\d+) (\w+)", closing) if word in words)


def end(processes: Sequence[subprocess.Popen[str]], why: str) -> None:
    """Interrupts stages as Ctrl-C would, so that they can clean up; kills what is left after a minute."""
    print(why, flush=True)
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(60)
            return


def main(names: list[str]) -> int:
    wanted = [[stage for stage in stages if not names or stage.name in names] for stages in STAGES]
    LOGS.mkdir(mode=0o700, parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        began = time.monotonic()
        outcomes = [outcome for stages in wanted for outcome in run(stages)]
    except KeyboardInterrupt:
        return 130
    print()
    for outcome in outcomes:
        print(f"{outcome.stage.name:<18} {outcome.seconds:7.1f} s   {outcome.verdict}")
    print(f"{'together':<18} {time.monotonic() - began:7.1f} s")
    closing = (
        f"{sum(outcome.passed for outcome in outcomes)} passed, {sum(outcome.failed for outcome in outcomes)} failed"
    )
    (LOGS / "closing-line").write_text(closing + "\n", encoding="utf-8")
    print(closing, flush=True)
    return int(any(outcome.returncode for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
