"""A profile of some steps, taken when somebody asks for it: `tpu-train profile`, beside the trainer of its host.

Both sides meet in a folder of the host's temporary files, one for each worker:

    trainer         the process id of the trainer, from its first step to its last
    request.json    {"name", "steps"}: written by who asks, removed by the trainer when it begins
    NAME.json       the answer: {"first", "last", "file"}, or {"problem"}

The profile is `profiles/NAME/plugins/profile/NAME/host-<worker>.xplane.pb` in the run's folder, as TensorBoard's
profile plugin wants it. Steps that are profiled compute what they would compute otherwise, and what fails here becomes
the answer: it can't stop a training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from training import storage as default_storage
from training.errors import BadInput, TrainError
from training.machine import SYSTEM, Machine
from training.machine.threads import Thread
from training.storage import Storage, StorageError, join
from training.telemetry.writer import join as join_thread

_DELIVERY_SECONDS = 10.0  # that the end of an attempt waits for a profile
_POLL_SECONDS = 0.2


class Tracer(Protocol):
    """A framework's profiler."""

    def start(self, folder: str) -> None:
        """Begins to record what this process and its devices do."""

    def stop(self) -> None:
        """Ends that, and writes *.xplane.pb files below the folder."""

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        """A named block of the recording."""


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    first: int = 0
    """Number of the first step that was profiled, from 1 on."""

    last: int = 0
    file: str = ""
    """Where the profile is."""

    problem: str = ""
    """Why there is none."""


def folder_of(worker: int) -> Path:
    """Where the trainer of a worker of this machine is asked for profiles."""
    return Path(tempfile.gettempdir()) / "tpu-train-profile" / str(worker)


class Profiler:
    """The trainer's side: looks for a request before every step, and records the steps that are asked for."""

    def __init__(
        self,
        folder: Path | None,
        output: str,
        worker: int,
        open_tracer: Callable[[], Tracer],
        finished: Callable[[], int],
        warn: Callable[[str], None],
        storage: Storage = default_storage,
        machine: Machine = SYSTEM,
    ) -> None:
        """Says in `folder` that a trainer is here, unless there is none.

        Args:
            folder: see `folder_of`.
            output: the folder of the run's profiles.
            worker: of this host.
            open_tracer: imports the framework's profiler, when somebody asks.
            finished: the number of steps whose results were read.
            warn: shows a warning.
            storage: where `output` is.
            machine: for the thread that writes a profile there.
        """
        self._folder, self._output, self._worker = folder, output, worker
        self._open_tracer, self._finished, self._warn = open_tracer, finished, warn
        self._storage, self._machine = storage, machine
        self._recording: _Recording | None = None
        self._delivery: Thread | None = None
        if folder:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                (folder / "request.json").unlink(missing_ok=True)
                _write(folder / "trainer", str(os.getpid()))
            except OSError as error:
                self._folder = None
                warn(f"this run can't be profiled: {error}")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block of step `number`, from 0 on, with the wait for its batch."""
        if self._folder and self._recording is None and (self._folder / "request.json").exists():
            self._begin(number)
        if self._recording is None:
            yield
            return
        with self._recording.tracer.scope("train", step_num=number + 1, _r=1):
            yield

    def scope(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A part of a step."""
        return self._recording.tracer.scope(name) if self._recording else contextlib.nullcontext()

    def check(self) -> None:
        """Ends a profile when the results of its last step have been read."""
        if self._recording and self._finished() >= self._recording.last:
            self._end(self._recording, self._recording.last)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        """The training ends, with what was recorded until now."""
        if self._recording:
            self._end(self._recording, self._finished())
        if self._delivery:
            join_thread(self._delivery, _DELIVERY_SECONDS, lambda: False, self._machine.clock.monotonic)
        if self._folder:
            with contextlib.suppress(OSError):
                (self._folder / "trainer").unlink()

    def _begin(self, number: int) -> None:
        assert self._folder
        path = self._folder / "request.json"
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
            name, steps = _checked_name(request["name"]), int(request["steps"])
            path.unlink()
        except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn(f"a request for a profile can't be read: {error}")
            return
        try:
            local = tempfile.mkdtemp(prefix="profile-")
            tracer = self._open_tracer()
            tracer.start(local)
        except Exception as error:  # whatever a framework's profiler raises: it must not end the run
            self._answer(name, Answer(problem=f"the profiler does not start: {error}"))
            return
        self._recording = _Recording(name, number + 1, number + steps, tracer, Path(local))

    def _end(self, recording: _Recording, last: int) -> None:
        self._recording = None
        try:
            recording.tracer.stop()
        except Exception as error:
            self._answer(recording.name, Answer(problem=f"the profiler has failed: {error}"))
            return
        self._delivery = self._machine.threads.start(self._deliver, recording, last, name="profile")

    def _deliver(self, recording: _Recording, last: int) -> None:
        """Copies a profile to the run's folder; what is written may be large, and storage slow."""
        name = recording.name
        target = join(self._output, name, "plugins", "profile", name, f"host-{self._worker}.xplane.pb")
        try:
            [traced] = recording.folder.rglob("*.xplane.pb")
            self._storage.write(target, traced.read_bytes())
            answer = Answer(recording.first, last, target)
        except (OSError, ValueError, StorageError) as error:
            answer = Answer(problem=f"the profile can't be written to {target}: {error}")
        finally:
            shutil.rmtree(recording.folder, ignore_errors=True)
        self._answer(name, answer)

    def _answer(self, name: str, answer: Answer) -> None:
        assert self._folder
        if answer.problem:
            self._warn(f"profile {name}: {answer.problem}")
        with contextlib.suppress(OSError):
            _write(self._folder / f"{name}.json", json.dumps(asdict(answer)))


@dataclass(frozen=True)
class _Recording:
    """A profile that is being taken: of the steps `first` to `last`, both from 1 on."""

    name: str
    first: int
    last: int
    tracer: Tracer
    folder: Path


def request(folder: Path, name: str, steps: int, seconds: float, machine: Machine = SYSTEM) -> Answer:
    """Asks the trainer of a folder (see `folder_of`) for a profile of its next steps, and waits for it.

    Raises:
        BadInput: no trainer is at work there, it is asked for another profile, or the name is none.
        TrainError: it gave none within `seconds`, or had a problem.
    """
    path, answered = folder / "request.json", folder / f"{_checked_name(name)}.json"
    if not _is_training(folder):
        raise BadInput("no trainer is at work on this host, or it has not come to its first step yet")
    if answered.exists():
        raise BadInput(f"there is a profile {name} already: give another name")
    draft = folder / f"{name}.draft"
    _write(draft, json.dumps({"name": name, "steps": steps}))
    try:
        os.link(draft, path)
    except FileExistsError:
        raise BadInput("somebody else is asking for a profile on this host: try again when that has begun") from None
    finally:
        draft.unlink()
    deadline = machine.clock.monotonic() + seconds
    while not answered.exists():
        if not _is_training(folder) and not answered.exists():
            path.unlink(missing_ok=True)
            raise TrainError("the trainer ended before it gave a profile")
        if machine.clock.monotonic() > deadline:
            was_taken = not path.exists()
            path.unlink(missing_ok=True)
            what = "is not done with them" if was_taken else "has begun no step"
            raise TrainError(
                f"{steps} steps were asked for, and after {seconds:.0f} s the trainer {what}: give it more time"
            )
        machine.clock.sleep(_POLL_SECONDS)
    answer = Answer(**json.loads(answered.read_text(encoding="utf-8")))
    if answer.problem:
        raise TrainError(answer.problem)
    return answer


def _is_training(folder: Path) -> bool:
    """Whether the trainer of a folder is alive."""
    try:
        os.kill(int((folder / "trainer").read_text(encoding="ascii")), 0)
    except (OSError, ValueError):
        return False
    return True


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name in ("trainer", "request"):
        raise BadInput(f"{name!r} is no name for a profile: letters, digits, `_`, `-` and `.`, 64 at most")
    return name


def _write(path: Path, text: str) -> None:
    """Puts a whole file into place."""
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
