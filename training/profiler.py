"""Profiles steps of a running trainer on request: `tpu-train profile` beside the trainer of its host.

The two processes communicate through a temporary folder of the host, one for each worker:

    trainer         the process id of the trainer, from its first step to its last
    request.json    {"name", "steps"}: written by `request`, removed by the trainer when it begins
    NAME.json       the answer: {"first", "last", "file"}, or {"problem"}

The profile is `profiles/NAME/plugins/profile/NAME/host-<worker>.xplane.pb` in the run's folder, as TensorBoard's
profile plugin expects it. Profiled steps compute the same results, and a failure here becomes the answer: it can't stop
training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from training import storage as default_storage
from training.errors import BadInput, TrainError
from training.machine import SYSTEM, Machine, Thread
from training.storage import Storage, StorageError, join

_DELIVERY_SECONDS = 10.0  # longest time that the end of an attempt waits for the upload of a profile
_POLL_SECONDS = 0.2


class Tracer(Protocol):
    """A framework's profiler."""

    def start(self, folder: str) -> None:
        """Begins to record this process and its devices."""

    def stop(self) -> None:
        """Ends the recording and writes *.xplane.pb files below the folder."""

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that names its block, with these facts, in the recording."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request: a profile."""

    first: int  # number of the first profiled step, from 1 on
    last: int
    file: str  # URL of the profile


def folder_of(worker: int) -> Path:
    """Returns the temporary folder through which a worker of this machine receives requests for profiles."""
    return Path(tempfile.gettempdir()) / "tpu-train-profile" / str(worker)


class Profiler(contextlib.AbstractContextManager["Profiler"]):
    """The trainer's side: looks for a request before every step, and records the requested steps."""

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
        """Creates the folder (see `folder_of`; None disables profiling), removes an old request, and writes the process
        id into it; if that fails, warns and does no more.

        Args:
            output: the folder of the run's profiles, in `storage`.
            open_tracer: imports the framework's profiler; called on a request.
            finished: returns the number of steps whose results were read.
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
                default_storage.write(str(folder / "trainer"), str(os.getpid()).encode())
            except (OSError, StorageError) as error:
                self._folder = None
                warn(f"this run can't be profiled: {error}")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Begins a requested profile, which `check` ends; runs the block, step `number` (from 0 on) with its data wait,
        as a part of it. If the request is bad or the profiler does not start, warns, and runs the block alone."""
        if self._folder and self._recording is None and (self._folder / "request.json").exists():
            self._begin(number)
        if self._recording is None:
            yield
            return
        with self._recording.tracer.scope("train", step_num=number + 1, _r=1):
            yield

    def scope(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Returns a context whose block is a named part of a step in the profile, if one is recorded."""
        return self._recording.tracer.scope(name) if self._recording else contextlib.nullcontext()

    def check(self) -> None:
        """Stops the recording once the results of its last step were read; a thread then uploads the profile."""
        if self._recording and self._finished() >= self._recording.last:
            self._end(self._recording, self._recording.last)

    def __exit__(self, *_: object) -> None:
        """Ends a profile with the steps so far, waits at most 10 s for its upload, and removes the process id."""
        if self._recording:
            self._end(self._recording, self._finished())
        if self._delivery:
            self._delivery.join(_DELIVERY_SECONDS)
        if self._folder:
            with contextlib.suppress(OSError):
                (self._folder / "trainer").unlink()

    def _begin(self, number: int) -> None:
        """Removes the request, and starts to record at step `number` (from 0 on). Warns of a request that can't be
        read; answers a problem of the profiler."""
        assert self._folder
        path = self._folder / "request.json"
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
            name, steps = _checked_name(request["name"]), int(request["steps"])
            path.unlink()
        except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn(f"the request for a profile in {path} is not readable: {error}")
            return
        with self._answering(name, "the profiler does not start"), contextlib.ExitStack() as on_error:
            tracer, local = self._open_tracer(), tempfile.mkdtemp(prefix="profile-")
            on_error.callback(shutil.rmtree, local, ignore_errors=True)
            tracer.start(local)
            self._recording = _Recording(name, number + 1, number + steps, tracer, Path(local))
            on_error.pop_all()

    def _end(self, recording: _Recording, last: int) -> None:
        """Stops recording; a thread then copies the profile up to step `last`, and answers. A failure is the answer,
        and deletes the local profile."""
        self._recording = None
        with self._answering(recording.name, "the profiler has failed"), contextlib.ExitStack() as on_error:
            on_error.callback(shutil.rmtree, recording.folder, ignore_errors=True)
            recording.tracer.stop()
            self._delivery = self._machine.threads.start(self._deliver, recording, last, name="profile")
            on_error.pop_all()

    def _deliver(self, recording: _Recording, last: int) -> None:
        """Copies a profile to the run's folder, deletes the local one, even after an error, and answers. An error
        becomes a warning and the answer. Runs in a thread. `last`: the last recorded step."""
        name = recording.name
        target = join(self._output, name, "plugins", "profile", name, f"host-{self._worker}.xplane.pb")
        with self._answering(name, f"the profile can't be written to {target}"):
            try:
                [traced] = recording.folder.rglob("*.xplane.pb")
                self._storage.write(target, traced.read_bytes())
            finally:
                shutil.rmtree(recording.folder, ignore_errors=True)
            self._answer(name, asdict(Answer(recording.first, last, target)))

    @contextlib.contextmanager
    def _answering(self, name: str, problem: str) -> Iterator[None]:
        """Makes an error of the block a warning and the answer for `request`, which would wait for all of its time: a
        framework's profiler may raise anything, and must not end the run."""
        try:
            yield
        except Exception as error:
            self._warn(f"profile {name}: {problem}: {error}")
            self._answer(name, {"problem": f"{problem}: {error}"})

    def _answer(self, name: str, answer: dict[str, Any]) -> None:
        """Writes the answer for `request` to read, unless that fails."""
        assert self._folder
        with contextlib.suppress(StorageError):
            default_storage.write(str(self._folder / f"{name}.json"), json.dumps(answer).encode())


@dataclass(frozen=True)
class _Recording:
    """A profile in progress, of the steps `first` to `last`, counted from 1."""

    name: str
    first: int
    last: int
    tracer: Tracer
    folder: Path


def request(folder: Path, name: str, steps: int, seconds: float, machine: Machine = SYSTEM) -> Answer:
    """Requests a profile of the next steps from the trainer of a folder (see `folder_of`), and waits for it. Raises
    BadInput if no trainer is running there, another request is pending, or the name is invalid or taken; TrainError if
    the trainer reports a problem or ends, or no profile came within `seconds`: a request not begun is withdrawn."""
    path, answered = folder / "request.json", folder / f"{_checked_name(name)}.json"
    if not _is_training(folder):
        raise BadInput("no trainer is running on this host, or it has not reached its first step")
    if answered.exists():
        raise BadInput(f"profile {name} exists already: give another name")
    draft = folder / f"{name}.{secrets.token_hex(4)}.draft"  # not another's, which may be the pending request already
    content = json.dumps({"name": name, "steps": steps, "draft": draft.name})
    draft.write_text(content, encoding="utf-8")
    try:
        os.link(draft, path)
    except FileExistsError:
        raise BadInput("another request for a profile is pending on this host: try again later") from None
    finally:
        draft.unlink()
    deadline = machine.clock.monotonic() + seconds
    while not answered.exists():
        if not _is_training(folder) and not answered.exists():
            _withdraw(path, content)
            raise TrainError("the trainer ended before it wrote the profile")
        if machine.clock.monotonic() > deadline:
            state = "has not begun a step" if _withdraw(path, content) else "has not finished them"
            raise TrainError(
                f"no profile of {steps} steps after {seconds:.0f} s: the trainer {state}; wait longer with --seconds"
            )
        machine.clock.sleep(_POLL_SECONDS)
    answer = json.loads(answered.read_text(encoding="utf-8"))
    if "problem" in answer:
        raise TrainError(answer["problem"])
    return Answer(**answer)


def _withdraw(path: Path, content: str) -> bool:
    """Removes the pending request `path` if it has this content: another's may be there since ours was taken. Returns
    whether it had."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == content:
            path.unlink()
            return True
    return False


def _is_training(folder: Path) -> bool:
    """Returns whether the process whose id is in the folder's file `trainer` still runs."""
    try:
        os.kill(int((folder / "trainer").read_text(encoding="ascii")), 0)
    except (OSError, ValueError):
        return False
    return True


def _checked_name(name: str) -> str:
    """Returns the name. Raises BadInput unless it is a safe file name that is none of the folder's own files."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name in ("trainer", "request"):
        raise BadInput(f"invalid name of a profile {name!r}: use at most 64 letters, digits, `_`, `-` and `.`")
    return name
