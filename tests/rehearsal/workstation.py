"""A workstation for tests: runs `tpu-launch`, reads its lines, and inspects the workstation's container engine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from launcher.emulator import control
from launcher.emulator.state import emulator_id
from launcher.images.engine import client
from tests import xla_flags

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "rehearsal"
COMPILE_FAST = ("--set", f"run.environment.XLA_FLAGS={xla_flags.COMPILE_FAST}")  # for runs that train


def environment_for(folder: Path, *left_out: str, **more: str) -> dict[str, str]:
    """Returns the environment of commands in a workstation's folder: this process's, less what is left out."""
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    own = {"TPU_LAUNCH_HOME": str(folder / ".tpu-launch"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return {**inherited, **own, **more}


@dataclass
class Ended:
    """The result of a command. `output` is standard output and error together, as in a terminal."""

    code: int
    output: str
    seconds: float

    def require(self, code: int, *says: str) -> Self:
        """Requires an exit code, words in the output and no traceback but a host's; returns itself."""
        assert self.code == code, self.output
        for words in says:
            assert words in self.output, self.output
        assert not re.search(r"^(?!\[\d+\] ).*Traceback", self.output, re.MULTILINE), self.output
        return self

    def json(self) -> Any:
        """The JSON object that the command printed last."""
        start = 0 if self.output.startswith("{") else self.output.index("\n{")
        return json.loads(self.output[start:])


@dataclass
class Running:
    """A running command, and its lines so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    ignored: str = "\0"  # how lines begin that are not kept

    def read(self) -> None:
        for line in self.process.stdout:
            if not line.startswith(self.ignored):
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """The first line that matches; fails with all lines when none came in time."""
        deadline, read = time.monotonic() + seconds, 0
        while True:
            ended = self.process.poll()
            while read < len(self.lines):
                read += 1
                if re.search(pattern, self.lines[read - 1]):
                    return self.lines[read - 1]
            if ended is not None or time.monotonic() > deadline:
                told = f"no line matched {pattern!r} within {seconds} s (ended: {ended})"
                pytest.fail("\n".join([f"{told}:", *self.lines]))
            time.sleep(0.05)

    def wait_for_both(self, pattern: str, seconds: float = 90) -> None:
        """Waits until hosts 0 and 1 have each printed a line that begins so."""
        for worker in (0, 1):
            self.wait_for(rf"^\[{worker}\] {pattern}", seconds)

    def run_id(self, seconds: float = 120) -> str:
        """Waits until an attempt has begun; returns its run."""
        return self.wait_for(r"run \S+: attempt \d+ on", seconds).split("run ")[1].split(":")[0]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, seconds: float = 300) -> Ended:
        """Waits until the command has ended; fails the test when it runs longer than `seconds`."""
        start = time.monotonic()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"still running after {seconds} s:\n" + "\n".join(self.lines))
        time.sleep(0.1)
        return Ended(code, "\n".join(self.lines) + "\n", time.monotonic() - start)


@dataclass
class Workstation:
    """A working directory with its own TPU_LAUNCH_HOME, in which commands run."""

    folder: Path
    environment: dict[str, str]
    program: tuple[str, ...] = (sys.executable, "-m", "launcher.cli")

    @property
    def home(self) -> Path:
        return Path(self.environment["TPU_LAUNCH_HOME"])

    @property
    def runs(self) -> Path:
        return self.home / control.SUBFOLDER / "runs"

    @property
    def emulator(self) -> Path:
        """The emulator's home."""
        return self.home / "emulator"

    def launch(self, *arguments: str, seconds: float = 600, environment: dict[str, str] | None = None) -> Ended:
        """Runs `tpu-launch ARGUMENTS` to its end."""
        return self.begin(*arguments, environment=environment).end(seconds)

    def begin(self, *arguments: str, environment: dict[str, str] | None = None) -> Running:
        return self.begin_other((*self.program, *arguments), environment)

    def begin_other(self, argv: Sequence[str], environment: dict[str, str] | None = None) -> Running:
        process = subprocess.Popen(
            # A shell in the background ignores SIGINT, and its children inherit that.
            ["env", "--default-signal=INT", *argv],
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

    def good(self, *arguments: str, seconds: float = 600) -> Ended:
        """As `launch`, for a command that must succeed."""
        return self.launch(*arguments, seconds=seconds).require(0)

    def train_on_slice(self, file: str) -> Ended:
        """`up`, `run`, which must succeed, and `down`, whatever happens."""
        with self.slice_of(file):
            return self.good("--emulated", "run", "--new", "-f", file, *COMPILE_FAST)

    @contextlib.contextmanager
    def slice_of(self, file: str) -> Iterator["EmulatedSlice"]:
        """Makes the slice of a file, and removes it after the block; both must succeed."""
        self.good("--emulated", "up", "-f", file)
        try:
            yield EmulatedSlice(self.folder, self.environment, self.program, file)
        finally:
            self.good("--emulated", "down", "-f", file)

    def make_data(self, local: Sequence[str], *options: str) -> None:
        """Makes a tokenizer and shards in the bucket. `local`: options of `tpu-launch local`; `options`: of shards."""
        train, corpus = ["--emulated", "local", *local, "--", "tpu-train"], ["--corpus", "builtin:pydoc"]
        tokenizer = f"gs://{BUCKET}/tokenizer"
        self.good(*train, "tokenizer", *corpus, "--vocabulary", "2000", "--out", tokenizer, seconds=900)
        lengths = ["--tokenizer", tokenizer, "--sequence-length", "64"]
        self.good(*train, "shards", *corpus, *lengths, "--out", f"gs://{BUCKET}/data", *options)

    def results(self, run_id: str, local: Sequence[str]) -> dict[str, Any]:
        """Returns a trainer's summary.json, and the "history" of losses, (step, loss), that led to its weights."""
        script = (
            "import json; from training import storage; from training.telemetry import metrics; "
            f"folder = 'gs://{BUCKET}/runs/{run_id}'; "
            "history = [(line['step'], line['loss']) for line in metrics.read_history(folder) if 'loss' in line]; "
            "print(json.dumps(json.loads(storage.read(folder + '/summary.json')) | {'history': history}))"
        )
        ended = self.good("--emulated", "local", *local, "--", "python", "-c", script)
        return json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])

    def containers_of_runs(self) -> list[str]:
        """Names and states of all containers of runs on the emulated hosts of this workstation, running or not."""
        emulator = emulator_id(self.emulator)
        filters = ["--filter", "label=tpu-launch.run", "--filter", f"label=tpu-launch.emulator={emulator}"]
        return docker("ps", "--all", *filters, "--format", "{{.Names}} {{.Status}}").splitlines()

    def containers(self, worker: int | None = None) -> list[str]:
        """The names of `containers_of_runs`, of all hosts or of one."""
        return [line.split()[0] for line in self.containers_of_runs() if worker is None or f"-w-{worker}." in line]

    def file(self, name: str, text: str) -> str:
        """Writes a file into the working directory; returns its name."""
        (self.folder / name).write_text(text)
        return name

    def events(self, run_id: str) -> list[dict[str, Any]]:
        path = self.runs / run_id / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class EmulatedSlice(Workstation):
    """A workstation, and a file whose slice is READY."""

    run_file: str = ""

    def on_slice(self, verb: str, *arguments: str, **more: Any) -> Ended:
        """As `launch`, of a command with the slice's file."""
        return self.begin_on_slice(verb, *arguments, **more).end(600)

    def begin_on_slice(self, verb: str, *arguments: str, **more: Any) -> Running:
        return self.begin("--emulated", verb, "-f", self.run_file, *arguments, **more)

    def good_on_slice(self, verb: str, *arguments: str) -> Ended:
        """As `good`, of a command with the slice's file."""
        return self.good("--emulated", verb, "-f", self.run_file, *arguments)

    def begin_run(self, script: str, *options: str, environment: dict[str, str] | None = None) -> Running:
        """Begins a new run of a shell's script."""
        return self.begin_on_slice("run", "--new", "--json", *options, *shell(script), environment=environment)


def shell(script: str) -> tuple[str, ...]:
    """The last words of a command line that ends with a command: a shell's script."""
    return ("--", "sh", "-c", script)


def settings(*changes: str) -> list[str]:
    """The options that make changes to a file's settings."""
    return [word for change in changes for word in ("--set", change)]


def docker(*arguments: str) -> str:
    """Runs the docker client on the workstation's own engine, without the emulator's proxy."""
    return subprocess.run([client(), *arguments], capture_output=True, text=True, check=True, timeout=600).stdout


def on_this_machine(seconds: float) -> float:
    """How long something may take that takes `seconds` where no program waits for a processor."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
