"""Profiles asked for while a trainer works: which steps, where the result is, and that none can end a training."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import wait_until
from training import storage
from training.errors import BadInput, TrainError
from training.profiler import Answer, Profiler, request
from training.storage import StorageError


class Tracer:
    """Writes the names of its scopes where a framework writes its events."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.folder = ""

    def start(self, folder: str) -> None:
        self.folder = folder

    def stop(self) -> None:
        place = Path(self.folder) / "plugins" / "profile" / "now"
        place.mkdir(parents=True)
        (place / "machine.xplane.pb").write_text(json.dumps(self.scopes))

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        self.scopes.append(facts["step_num"] if name == "train" else name)
        return contextlib.nullcontext()


class Training:
    """A loop of steps whose results are read two steps later."""

    def __init__(self, folder: Path, tracer: Callable[[], Any] = Tracer, **options: Any) -> None:
        self.requests, self.warnings = folder / "requests", list[str]()
        self.started = self.read = 0
        places, warn = (self.requests, str(folder / "profiles"), 3), self.warnings.append
        self.profiler = Profiler(*places, tracer, lambda: self.read, warn, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with self.profiler.step(self.started):
                with self.profiler.scope("data wait"):
                    pass
                self.started += 1
                self.read = max(0, self.started - 2)
            self.profiler.check()


@contextlib.contextmanager
def asking(folder: Path, name: str, steps: int) -> Iterator[Future[Answer]]:
    """Asks meanwhile, for the answer or an error."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(request, folder, name, steps, 20.0)
        wait_until(lambda: answer.done() or (folder / "request.json").exists())
        yield answer


def test_the_next_steps_are_profiled_until_their_results_are_read(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.profiler:
        training.train(4)
        with asking(training.requests, "one", 3) as answer:
            training.train(20)
    file = tmp_path / "profiles" / "one" / "plugins" / "profile" / "one" / "host-3.xplane.pb"
    assert answer.result() == Answer(5, 7, str(file))
    scopes = json.loads(file.read_text())
    assert scopes == [5, "data wait", 6, "data wait", 7, "data wait", 8, "data wait", 9, "data wait"]
    assert training.warnings == []
    assert sorted(path.name for path in training.requests.iterdir()) == ["one.json"]


def test_the_end_of_training_ends_the_profile(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.profiler, asking(training.requests, "short", 100) as answer:
        training.train(6)
        training.profiler.__exit__()
    assert (answer.result().first, answer.result().last) == (1, 4)


def test_a_request_without_a_trainer_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.profiler.__exit__()
    for folder in (training.requests, tmp_path / "none"):
        with pytest.raises(BadInput, match="no trainer is running on this host"):
            request(folder, "late", 1, 5)


def test_a_request_times_out_if_the_trainer_begins_no_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.profiler:
        with pytest.raises(TrainError, match="no profile of 1 steps after 0 s: the trainer has not begun a step"):
            request(training.requests, "patience", 1, 0.01)
        training.train(5)
    assert not (tmp_path / "profiles").exists()


def test_a_request_that_gives_up_leaves_the_next_one(tmp_path: Path) -> None:
    training, path = Training(tmp_path), tmp_path / "requests" / "request.json"
    late = SimpleNamespace(monotonic=Mock(side_effect=[0, 1, 99]))  # the trainer has begun in the first wait
    late.sleep = lambda _: (training.train(1), path.write_text("another's"))
    with training.profiler, pytest.raises(TrainError, match="has not finished them"):
        request(training.requests, "long", 50, 20, SimpleNamespace(clock=late))
    assert path.read_text() == "another's"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "request", "trainer", ".hidden", "x" * 65])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    training = Training(tmp_path)
    with training.profiler, pytest.raises(BadInput, match="invalid name of a profile"):
        request(training.requests, name, 1, 1)


def test_only_one_request_is_pending_and_a_name_is_used_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, link = Training(tmp_path), os.link

    def link_and_be_overtaken(draft: Path, path: Path) -> None:
        link(draft, path)
        monkeypatch.setattr(os, "link", link)
        for name in ("first", "second"):
            with pytest.raises(BadInput, match="another request for a profile is pending"):
                request(training.requests, name, 9, 1)
        training.train(8)

    monkeypatch.setattr(os, "link", link_and_be_overtaken)
    with training.profiler:
        assert (answer := request(training.requests, "first", 1, 20)).first == answer.last == 1
        with pytest.raises(BadInput, match="profile first exists already"):
            request(training.requests, "first", 1, 1)


@pytest.mark.parametrize(
    ("part", "error", "problem"),
    [
        ("start", RuntimeError("only one at a time"), "the profiler does not start: only one at a time"),
        ("stop", RuntimeError("the trace is lost"), "the profiler has failed: the trace is lost"),
        ("write", StorageError("no space"), "the profile can't be written to .*host-3.xplane.pb: no space"),
        ("write", TypeError("a bug"), "the profile can't be written to .*host-3.xplane.pb: a bug"),
    ],
)
def test_a_failure_is_told_and_ends_nothing(tmp_path: Path, part: str, error: Exception, problem: str) -> None:
    tracer, store = Tracer(), SimpleNamespace(write=storage.write)
    setattr(store if part == "write" else tracer, part, Mock(side_effect=error))
    training = Training(tmp_path, lambda: tracer, storage=store)
    with training.profiler:
        with asking(training.requests, "bad", 2) as answer:
            training.train(30)
        assert training.started == 30
        with pytest.raises(TrainError, match=problem):
            answer.result()
    assert (len(training.warnings), bool(tracer.folder) and Path(tracer.folder).exists()) == (1, False)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "../../x", "steps": 1}', '{"name": "x"}', "\x00"])
def test_an_unreadable_request_is_a_warning(tmp_path: Path, text: str) -> None:
    training = Training(tmp_path)
    with training.profiler:
        (training.requests / "request.json").write_text(text)
        training.train(3)
    assert ["request.json is not readable" in warning for warning in training.warnings] == [True]


def test_an_unusable_request_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("a file")
    training = Training(tmp_path)
    with training.profiler:
        training.train(3)
    assert "this run can't be profiled" in training.warnings[0]
