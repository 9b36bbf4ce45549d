"""Uploads during a run: whatever a process prints, hangs or ends with, the loop goes on and the summary says it."""

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from training.config import Hub
from training.models import hub
from training.models.hub import BackgroundUploader, PushEnd, find_result, run_push

RESULT = '{"step": 8, "commit": "https://hub/commit/1"}'


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def uploader(tmp_path: Path, script: str | None, warnings: list[str], **settings: Any) -> closing[BackgroundUploader]:
    """An uploader whose program runs this script; None: a program that is not there."""
    path = tmp_path / "push.py"
    path.write_text(script or "")
    options = Hub(repository="a/b", every="checkpoint", **settings)
    push = partial(run_push, command=(sys.executable if script is not None else "/no/such/program", str(path)))
    return closing(BackgroundUploader(options, str(tmp_path), warnings.append, push))


@pytest.mark.parametrize(
    "noise",
    [
        f"print('{RESULT}'); import atexit; atexit.register(print, 'ResourceWarning: unclosed socket')",
        f"print('{RESULT}'); print('[1, 2]'); print('12'); print('null')",
        f"import sys; print('{RESULT}'); print('warning', file=sys.stderr)",
    ],
)
def test_a_line_after_the_result_changes_nothing(tmp_path: Path, noise: str) -> None:
    warnings: list[str] = []
    with uploader(tmp_path, noise, warnings) as pushes:
        pushes.note_commit(8)
        assert pushes.finish(8) == {"repository": "a/b", "step": 8, "commit": "https://hub/commit/1", "error": None}
    assert warnings == []


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('done')", "told no commit: done"),
        ("", "told no commit"),
        ("raise SystemExit('tpu-train: error: no hf_secret')", r"no \*\*\*"),
        ("import os; os.write(1, b'\\xff' * 9); os._exit(3)", "\ufffd"),
        ("import os; os._exit(3)", "ended with 3"),
        ("import time; time.sleep(60)", "not done within hub.wait_seconds"),
        (None, "No such file"),
    ],
)
def test_an_upload_that_fails_is_one_warning(tmp_path: Path, script: str | None, error: str) -> None:
    warnings: list[str] = []
    with uploader(tmp_path, script, warnings, wait_seconds=1) as pushes:
        pushes.note_commit(8)
        began = time.monotonic()
        summary = pushes.finish(8)
        assert time.monotonic() - began < 30
    assert summary["commit"] is None
    assert re.search(error, summary["error"])
    assert len(warnings) == 1


def test_an_upload_whose_thread_hangs_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_CLOSE_SECONDS", 0.2)
    release, warnings = threading.Event(), list[str]()

    def push(arguments: Sequence[str], is_over: Callable[[], bool]) -> PushEnd:
        release.wait(60)
        return PushEnd(None)

    uploads = BackgroundUploader(Hub(repository="a/b", wait_seconds=0.5), str(tmp_path), warnings.append, push)
    summary = uploads.finish(8)
    release.set()
    uploads.close()
    assert summary["error"] == "not done within hub.wait_seconds (0.5 s)"
    assert len(warnings) == 1


def test_a_stop_during_the_last_upload_ends_the_upload_and_not_the_run(tmp_path: Path) -> None:
    warnings: list[str] = []
    script = f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    with uploader(tmp_path, script, warnings) as pushes:
        pushes.note_commit(8)
        assert pushes.finish(8, (tmp_path / "up").exists)["error"] == "not done when this host was asked to stop"
    assert len(warnings) == 1


def test_close_ends_an_upload_at_once(tmp_path: Path) -> None:
    with uploader(tmp_path, "import time; time.sleep(60)", []) as pushes:
        pushes.note_commit(8)
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_a_result_is_a_step_and_a_commit_and_nothing_else() -> None:
    found = find_result(["x", RESULT, "[" * 10, "{}", '{"step": "8", "commit": null}'])
    assert found == {"step": 8, "commit": "https://hub/commit/1"}
    assert find_result(["[" * 100_000]) is None
    assert find_result([]) is None
