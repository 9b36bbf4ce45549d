"""A person at a workstation, for tests: commands are typed, lines are read, and the engine is looked at from beside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.state import emulator_id
from launcher.images.engine import client

HOUSE = Path(__file__).resolve().parents[2]
BUCKET = "rehearsal"


@dataclass
class Ended:
    """How a command ended. `output` is standard output and error together, as a person sees them."""

    code: int
    output: str
    seconds: float

    def json(self) -> Any:
        """The JSON object that the command printed last."""
        return json.loads(
            self.output[self.output.index("\n{") + 1 :] if not self.output.startswith("{") else self.output
        )


@dataclass
class Running:
    """A command that goes on: its lines as they come."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """The first line that matches; fails with all lines when none came in time."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                for line in self.lines:
                    if re.search(pattern, line):
                        return line
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    pytest.fail(
                        f"no line matched {pattern!r} within {seconds} s (ended: {self.process.poll()}):\n"
                        + "\n".join(self.lines)
                    )
                self._news.wait(min(left, 0.5))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, seconds: float = 120) -> Ended:
        begun = time.monotonic()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"still running after {seconds} s:\n" + "\n".join(self.lines))
        time.sleep(0.1)
        return Ended(code, "\n".join(self.lines) + "\n", time.monotonic() - begun)


@dataclass
class Workstation:
    """A folder from which a person works: a home, and the commands."""

    folder: Path
    environment: dict[str, str]

    def launch(self, *arguments: str, seconds: float = 300, environment: dict[str, str] | None = None) -> Ended:
        """Runs `tpu-launch ARGUMENTS` to its end."""
        return self.begin(*arguments, environment=environment).end(seconds)

    def begin(self, *arguments: str, environment: dict[str, str] | None = None) -> Running:
        """Starts `tpu-launch ARGUMENTS`."""
        process = subprocess.Popen(
            # Ctrl-C must mean something even where the tests run in the background, which ignores it and hands that on.
            ["env", "--default-signal=INT", sys.executable, "-m", "launcher.cli", *arguments],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running = Running(process)
        threading.Thread(target=running.read, daemon=True).start()
        return running

    def good(self, *arguments: str, seconds: float = 300) -> Ended:
        """As `launch`, for a command that must succeed."""
        ended = self.launch(*arguments, seconds=seconds)
        assert ended.code == 0, f"tpu-launch {' '.join(arguments)} ended with {ended.code}:\n{ended.output}"
        return ended

    def containers_of_runs(self) -> list[str]:
        """Names and states of all containers of runs on the emulated hosts of this workstation, running or not."""
        mine = emulator_id(Path(self.environment["TPU_LAUNCH_HOME"]) / "emulator")
        filters = ["--filter", "label=tpu-launch.run", "--filter", f"label=tpu-launch.emulator={mine}"]
        return docker("ps", "--all", *filters, "--format", "{{.Names}} {{.Status}}").splitlines()

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def events(self, run_id: str) -> list[dict[str, Any]]:
        path = Path(self.environment["TPU_LAUNCH_HOME"]) / "runs" / run_id / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def docker(*arguments: str) -> str:
    """The workstation's own engine, beside the emulator."""
    return subprocess.run([client(), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
