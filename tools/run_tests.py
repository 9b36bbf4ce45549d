"""Everything `make test` runs: lint, fast tests, tests inside the images, whole emulated slices. run_tests.py [stage...]

A stage that fails does not keep the next from running. Each stage's output goes to the screen and to .tpu-launch/tests/<stage>.log; at the
end comes a table of what ran and how long it took, and as the last line "N passed, N failed", also in .tpu-launch/tests/closing-line.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent
LOGS = HOUSE / ".tpu-launch" / "tests"
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
TWO = ("-n", "2")  # at once: most of the time such tests wait for each other's processes or for a time-out
STAGES = (
    Stage("lint", ("make", "--no-print-directory", "lint"), 300, runs_tests=False),
    Stage("fast", (*PYTEST, *TWO, "--durations=5"), 600),
    Stage("container", (sys.executable, "tools/container_tests.py"), 1500),
    Stage("tensorflow", (sys.executable, "tools/container_tests.py", "tensorflow"), 900),
    Stage("beam", (sys.executable, "tools/container_tests.py", "beam"), 600),
    Stage("rehearsal", (*PYTEST, "tests/rehearsal", "-m", "alone", *SLOWEST), 2400),
    Stage("slices", (*PYTEST, "tests/rehearsal", "-m", "not alone", *TWO, "--dist", "loadfile", *SLOWEST), 1800),
)


def run(stage: Stage) -> Outcome:
    print(f"\n== {stage.name}: {' '.join(stage.command)}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        stage.command,
        cwd=HOUSE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Timer(stage.seconds, end, (process, f"stage {stage.name} was not done within {stage.seconds} s"))
    late.daemon = True
    late.start()
    closing = ""
    try:
        assert process.stdout is not None
        with (LOGS / f"{stage.name}.log").open("w", encoding="utf-8") as log:
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
                if re.search(r"\d+ (passed|failed|errors?)\b.* in [\d.]+s", line):
                    closing = line
        returncode = process.wait()
    except BaseException:
        end(process, f"stage {stage.name} interrupted")
        raise
    finally:
        late.cancel()
    passed, failed = count(closing, "passed"), count(closing, "failed", "error", "errors")
    if returncode and not failed:
        failed = 1  # the stage itself
    return Outcome(stage, returncode, time.monotonic() - begin, passed, failed)


def count(closing: str, *words: str) -> int:
    return sum(int(number) for number, word in re.findall(r"(\d+) (\w+)", closing) if word in words)


def end(process: subprocess.Popen[str], why: str) -> None:
    """Interrupts the stage as Ctrl-C would, so that it can clean up; kills what is left after 30 s."""
    print(why, flush=True)
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main(names: list[str]) -> int:
    wanted = [stage for stage in STAGES if not names or stage.name in names]
    LOGS.mkdir(mode=0o700, parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        outcomes = [run(stage) for stage in wanted]
    except KeyboardInterrupt:
        return 130
    print()
    for outcome in outcomes:
        print(f"{outcome.stage.name:<10} {outcome.seconds:7.1f} s   {outcome.verdict}")
    print(f"{'together':<10} {sum(outcome.seconds for outcome in outcomes):7.1f} s")
    closing = f"{sum(outcome.passed for outcome in outcomes)} passed, {sum(outcome.failed for outcome in outcomes)} failed"
    (LOGS / "closing-line").write_text(closing + "\n", encoding="utf-8")
    print(closing, flush=True)
    return int(any(outcome.returncode for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
