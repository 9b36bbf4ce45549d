"""Runs all stages of `make test`: lint, fast tests, tests inside the images, whole emulated slices. run_tests.py
[stage...]

After a failed stage the next one still runs. Each stage's output goes to the screen and to
.tpu-launch/tests/<stage>.log; at the end it prints a table of the stages with their times, the tests that failed with
the last lines of their messages, and as the last line "N passed, N failed", also in .tpu-launch/tests/closing-line.
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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".tpu-launch" / "tests"
PYTEST = (sys.executable, "-m", "pytest")
CONTAINER_TESTS = (sys.executable, "tools/container_tests.py")


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    seconds: int  # how long it may take
    runs_tests: bool = True
    idle: bool = False  # uses only idle processor time


@dataclass(frozen=True)
class Outcome:
    stage: Stage
    returncode: int
    seconds: float
    passed: int
    failed: int
    failures: tuple[str, ...]  # a line of pytest's summary each
    errors: tuple[str, ...]  # the last lines in which pytest says what went wrong

    @property
    def verdict(self) -> str:
        if self.returncode:
            return "FAILED"
        return f"{self.passed} passed" if self.stage.runs_tests else "clean"


SLOWEST = ("--durations=0", "--durations-min=1")
PATIENT = ("--timeout=900",)  # of a test with its fixtures, which train too
FAULTS = tuple(
    f"tests/rehearsal/test_{name}.py"
    for name in ("fault_matrix", "queued_slices", "emulator_slice", "housekeeping", "gcloud_defects", "readme_commands")
)
# Two stages of a row run at the same time, in its order, because most stages wait half of their time, for processes,
# hosts and time-outs. The rows follow each other.
LANES = 2
SHOWN_FAILURES = 10  # of a stage, at the end of the output
SHOWN_ERRORS = 12  # lines: pytest's summary has the first line of a message alone
SIMULATED = Stage("simulated-runs", (*PYTEST, "-s", "tests/simulation"), 4800, idle=True)
ROWS: tuple[tuple[Stage, ...], ...] = (
    (
        Stage("images", (*CONTAINER_TESTS, "--build-only"), 1800, runs_tests=False),
        Stage("fast", (*PYTEST, "--durations=30", "tests/launcher", "tests/emulator"), 1200),
        Stage("fast-training", (*PYTEST, "--durations=30", "tests/training"), 1200),
        Stage("lint", ("make", "--no-print-directory", "lint"), 600, runs_tests=False),
    ),
    (
        Stage("container", CONTAINER_TESTS, 3600),
        Stage("virtual-tpu", (*CONTAINER_TESTS, "virtual-tpu"), 1200),
        Stage("torch-tpu", (*CONTAINER_TESTS, "torch-tpu"), 1500),
        Stage("tensorflow", (*CONTAINER_TESTS, "tensorflow"), 1800),
        Stage("oracle-torch-xla", (*CONTAINER_TESTS, "oracle-torch-xla", "-s"), 600),
    ),
    (Stage("rehearsal", (*PYTEST, "tests/rehearsal", "-m", "alone", *PATIENT, *SLOWEST), 3600),),
    (
        Stage(
            "slices",
            (*PYTEST, "tests/rehearsal", "-m", "not alone", *(f"--ignore={file}" for file in FAULTS), *SLOWEST),
            2400,
        ),
        Stage("faults", (*PYTEST, *FAULTS, *SLOWEST), 2400),
    ),
)


class Running:
    """A stage under way. Its lines go to the screen, with its name where others run beside it, and to its log."""

    def __init__(self, stage: Stage, *, prefix: str) -> None:
        print(f"\n== {stage.name}: {' '.join(stage.command)}", flush=True)
        self.stage = stage
        self._prefix = prefix
        self._closing = ""
        self._failures: list[str] = []
        self._errors: deque[str] = deque(maxlen=SHOWN_ERRORS)
        self._began = self._ended = time.monotonic()
        self.process = subprocess.Popen(
            ("nice", "-n", "19", *stage.command) if stage.idle else stage.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if stage.idle:
            yield_to_other_sessions(self.process.pid)
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
                elif re.match(r"(FAILED|ERROR) tests/", line):
                    self._failures.append(line.rstrip())
                elif line.startswith("E  "):
                    self._errors.append(line.rstrip())
        self._ended = time.monotonic()

    def has_ended(self) -> bool:
        """Returns whether the process has ended and all its lines were read."""
        return self.process.poll() is not None and not self._reading.is_alive()

    def outcome(self) -> Outcome:
        """Waits for the end of the stage and returns its outcome."""
        returncode = self.process.wait()
        self._late.cancel()
        self._reading.join()
        passed, failed = count(self._closing, "passed"), count(self._closing, "failed", "error", "errors")
        if returncode and not failed:
            failed = 1  # the stage itself
        return Outcome(
            self.stage,
            returncode,
            self._ended - self._began,
            passed,
            failed,
            tuple(self._failures),
            tuple(self._errors),
        )


def yield_to_other_sessions(process: int) -> None:
    """Lowers this session's share: where the kernel divides the processor by sessions, `nice` acts only inside one
    (sched(7))."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text("19", encoding="ascii")


def run(rows: Sequence[Sequence[Stage]], beside: Sequence[Stage]) -> list[Outcome]:
    """Runs the rows one after another, and the stages of `beside` at the same time."""
    outcomes: list[Outcome] = []
    under_way = [Running(stage, prefix=f"{stage.name}: ") for stage in beside]
    try:
        for row in rows:
            waiting = list(row)
            while waiting or any(each.stage in row for each in under_way):
                while waiting and sum(each.stage in row for each in under_way) < LANES:
                    stage = waiting.pop(0)
                    under_way.append(Running(stage, prefix=f"{stage.name}: " if beside or len(row) > 1 else ""))
                time.sleep(0.1)
                for each in [each for each in under_way if each.has_ended()]:
                    under_way.remove(each)
                    outcomes.append(each.outcome())
        return [*outcomes, *(each.outcome() for each in under_way)]
    except BaseException:
        end([each.process for each in under_way], f"interrupted: {', '.join(each.stage.name for each in under_way)}")
        raise


def count(closing: str, *words: str) -> int:
    return sum(int(number) for number, word in re.findall(r"(\d+) (\w+)", closing) if word in words)


def end(processes: Sequence[subprocess.Popen[str]], why: str) -> None:
    """Interrupts stages as Ctrl-C would, so that they can clean up; kills remaining processes after a minute."""
    print(why, flush=True)
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(60)
            return


def choose(stages: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    """Returns the named stages; all of them if none is named."""
    return [stage for stage in stages if not names or stage.name in names]


def main(names: list[str]) -> int:
    rows = [choose(row, names) for row in ROWS]
    LOGS.mkdir(mode=0o700, parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        began = time.monotonic()
        outcomes = run(rows, choose([SIMULATED], names))
    except KeyboardInterrupt:
        return 130
    print()
    for outcome in outcomes:
        print(f"{outcome.stage.name:<18} {outcome.seconds:7.1f} s   {outcome.verdict}")
    print(f"{'together':<18} {time.monotonic() - began:7.1f} s")
    for outcome in outcomes:
        for line in outcome.failures[:SHOWN_FAILURES]:
            print(f"{outcome.stage.name}: {line[:500]}")
        for line in outcome.errors if outcome.returncode else ():
            print(f"{outcome.stage.name}: {line[:300]}")
    closing = (
        f"{sum(outcome.passed for outcome in outcomes)} passed, {sum(outcome.failed for outcome in outcomes)} failed"
    )
    (LOGS / "closing-line").write_text(closing + "\n", encoding="utf-8")
    print(closing, flush=True)
    return int(any(outcome.returncode for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
