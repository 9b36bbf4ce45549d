"""Uploads models to the Hugging Face Hub: `push_model` at once, `BackgroundUploader` during a run.

A background upload is a process of its own with low priority that reads a committed checkpoint from the run's folder.
It can neither stop nor slow down the run, and ends with it. A failure is one warning and a line of the summary. The
token is HF_TOKEN of the environment: it is in no argument, no file and no message. Files go through the Hub's LFS
protocol; its newer Xet store is not used.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from training import storage
from training.config import Hub
from training.errors import BadInput, TrainError
from training.machine import SYSTEM, Machine
from training.models import export
from training.models.hugging_face import ADAPTER, ADAPTER_CONFIG, read_config
from training.registry import TASKS, task_of_model
from training.storage.hub import is_on_hub
from training.telemetry.metrics import read_history

TOKEN = "HF_TOKEN"
CARD = "README.md"
_TRIES, _RETRY_SECONDS = 2, 3.0  # of an upload
_POLL_SECONDS = 0.2  # between looks at an upload that the run waits for
_KILL_SECONDS = 5.0  # that a killed upload has to end
_SHOWN_BYTES = 1 << 16  # of what an upload printed


def push_model(
    run: str, repository: str, step: int | None, private: bool, sleep: Callable[[float], None] = time.sleep
) -> tuple[int, str]:
    """Uploads what `export_checkpoint` writes for a run and `step` (None: the newest), and a README.md if the
    repository has none. `repository`, ORGANISATION/NAME, is created if it does not exist, `private` or not. Returns the
    step and the URL of the commit. Raises BadInput without HF_TOKEN or such a checkpoint; StorageError; TrainError if
    the Hub refuses, or fails twice, 3 s apart. Sets the Hub library's variables against Xet and progress bars."""
    token = os.environ.get(TOKEN)
    if not token:
        raise BadInput(
            f"{TOKEN} is not in the environment: make a token that may write at https://huggingface.co/settings/tokens"
        )
    os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at the import below
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        exported_step = export.export_checkpoint(run, folder, step)
        api = HfApi(token=token, library_name="tpu-launch")
        for attempt in range(_TRIES):
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                if not api.file_exists(repository, CARD):
                    adapter = Path(folder) / ADAPTER_CONFIG  # instead of config.json
                    config = json.loads(adapter.read_text()) if adapter.exists() else read_config(folder)
                    card = render_card(repository, config, last_figures(run, exported_step))
                    (Path(folder) / CARD).write_text(card)
                options = {"commit_message": f"Step {exported_step} of {storage.name_of(run)}"}
                stale = [ADAPTER_CONFIG, ADAPTER]  # of an earlier push: transformers would load them instead
                commit = api.upload_folder(repo_id=repository, folder_path=folder, delete_patterns=stale, **options)
                return exported_step, str(commit.commit_url)
            except (OSError, ValueError, RuntimeError) as error:  # the library's own errors are of these kinds
                status = getattr(getattr(error, "response", None), "status_code", None) or 500
                if attempt + 1 < _TRIES and status >= 500:
                    sleep(_RETRY_SECONDS)
                    continue
                text = " ".join(str(error).split()).replace(token, "***")[:400]
                raise TrainError(f"{repository} was not pushed to the Hub: {type(error).__name__}: {text}") from None
    raise AssertionError("each try ends with a result or an error")


def last_figures(run: str, step: int) -> dict[str, float]:
    """Returns name, without "eval_", -> finite figure of the run's last evaluation up to `step`; {} without one."""
    figures: dict[str, float] = {}
    for line in read_history(run):
        own = {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
        if own and line["step"] <= step:
            figures = {name: value for name, value in own.items() if value is not None}
    return figures


def render_card(repository: str, config: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """Returns the text of a repository's README.md: library, and pipeline or starting model on the Hub, as metadata for
    the Hub, then `figures`, by name, of an evaluation of the whole set, as a list (no metadata), and an example.
    `repository`: ORGANISATION/NAME; `config`: values of the model's config.json, or of peft's adapter_config.json."""
    if "peft_type" in config:
        start = str(config["base_model_name_or_path"])
        metadata = ["library_name: peft", *([f"base_model: {start}"] if is_on_hub(start) else [])]
        kind = "LoRA adapter"
        example = ["from peft import PeftModel", f'PeftModel.from_pretrained(starting_model, "{repository}")']
    else:
        pipeline = TASKS[task_of_model(config)].head.pipeline
        metadata = ["library_name: transformers", f"pipeline_tag: {pipeline}"]
        kind = f"{config.get('model_type')} model"
        example = ["from transformers import pipeline", f'pipeline("{pipeline}", model="{repository}")']
    lines = ["---", *metadata, "---", "", f"# {repository}", "", f"A {kind}, trained with tpu-launch.", ""]
    if figures:
        bullets = [f"* {name.replace('_', ' ')}: {value:.4f}" for name, value in figures.items()]
        lines += ["Over the whole evaluation set:", "", *bullets, ""]
    return "\n".join([*lines, "```python", *example, "```", ""])


@dataclass(frozen=True)
class PushEnd:
    """The end of an upload's process."""

    code: int
    out: Sequence[str] = ()  # its last lines
    err: Sequence[str] = ()


class Push:
    """A running `tpu-train push`."""

    def __init__(
        self, arguments: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "training.cli", "push")
    ) -> None:
        """Starts it with these arguments. Raises TrainError without a token in the environment, and OSError."""
        if not os.environ.get(TOKEN):
            raise TrainError(f"{TOKEN} is not in the environment (name it in run.secrets)")
        with contextlib.ExitStack() as files:
            self._out, self._err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            # A killed process does not remove the model that it wrote.
            scratch = files.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            # A session of its own: Ctrl-C is for the trainer, which then ends the upload too.
            self._process = subprocess.Popen(
                [*command, *arguments], stdout=self._out, stderr=self._err, stdin=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "TMPDIR": scratch},
            )  # fmt: skip
            self._files = files.pop_all()

    def poll(self) -> PushEnd | None:
        """Returns how the process ended, once; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        with self._files:
            return PushEnd(code, _last_lines(self._out), _last_lines(self._err))

    def kill(self) -> None:
        """Kills the process, waits 5 s at most for its end, and removes its temporary files. The Hub takes a commit
        whole or not at all."""
        self._process.kill()
        with self._files, contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)


class BackgroundUploader:
    """Uploads commits of one attempt, on host 0: one at a time, each by a process. Commits during an upload are left
    out, except the last. Its errors never reach the loop."""

    def __init__(
        self,
        settings: Hub,
        run: str,
        warn: Callable[[str], None],
        start_push: Callable[[Sequence[str]], Push] = Push,
        machine: Machine = SYSTEM,
    ) -> None:
        """Uploads nothing yet. `run`: the run's folder."""
        self.settings, self.run, self.warn = settings, run, warn
        self.pushed: int | None = None  # the newest step on the Hub
        self.commit: str | None = None  # its URL
        self.error: str | None = None  # of the newest upload
        self._start_push, self._clock = start_push, machine.clock
        self._requested: int | None = None  # the newest commit that an upload was wanted for
        self._waiting: int | None = None  # a step to upload next
        self._push: Push | None = None  # under way

    def note_commit(self, step: int | None) -> None:
        """Requests an upload of `step`, the newest committed one (None: none yet), once, with `hub.every: checkpoint`.
        Keeps the result of an upload that has ended. Does not wait. Call it after every step."""
        if step is not None and step != self._requested and self.settings.every == "checkpoint":
            self._requested = self._waiting = step
        self._advance()

    def finish(self, step: int, is_hurried: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Waits for the upload that is due, then, with `hub.at_end` or `hub.every`, uploads the last step unless it is
        on the Hub. Each takes little more than `hub.wait_seconds`, and ends once `is_hurried` returns True. Returns the
        summary's "hub": repository, step, commit, error."""
        self._wait_until_idle(is_hurried)
        if self.pushed != step and (self.settings.at_end or self.settings.every):
            self._waiting = step
            self._wait_until_idle(is_hurried)
        return {"repository": self.settings.repository, "step": self.pushed, "commit": self.commit, "error": self.error}

    def close(self) -> None:
        """Kills an upload that is under way, and starts no other."""
        push, self._push, self._waiting = self._push, None, None
        if push:
            push.kill()

    def _wait_until_idle(self, is_hurried: Callable[[], bool]) -> None:
        """Waits until no upload runs or is due. After `hub.wait_seconds`, or once `is_hurried` returns True, kills the
        one that runs, which counts as its failure, and drops the one that is due."""
        deadline = self._clock.monotonic() + self.settings.wait_seconds
        self._advance()
        while self._push:
            if is_hurried():
                reason = "when this host was asked to stop"
            elif self._clock.monotonic() >= deadline:
                reason = f"within hub.wait_seconds ({self.settings.wait_seconds:g} s)"
            else:
                self._clock.sleep(_POLL_SECONDS)
                self._advance()
                continue
            self.close()
            self._fail(f"not done {reason}")

    def _advance(self) -> None:
        """Keeps the commit or the failure of an upload that has ended, then starts the one that is due. Raises nothing:
        an upload that can't be started or read has failed, as in `_fail`."""
        try:
            push, self._push = self._push, None  # dropped if its end can't be read
            if end := push and push.poll():
                self._keep(end)
            else:
                self._push = push
            if self._waiting is not None and not self._push:
                step, self._waiting = self._waiting, None
                arguments = [self.run, self.settings.repository, "--step", str(step), "--beside"]
                self._push = self._start_push([*arguments, "--private" if self.settings.private else "--public"])
        except Exception as error:
            self._fail(str(error) if isinstance(error, TrainError) else f"{type(error).__name__}: {error}")

    def _keep(self, end: PushEnd) -> None:
        """Keeps the commit of an upload that has ended, or its failure, as `_fail`."""
        result, last_line = find_result(end.out), (end.err or end.out or [""])[-1]
        if end.code == 0 and result:
            self.pushed, self.commit, self.error = result["step"], result["commit"], None
        elif end.code == 0:
            self._fail(f"the upload told no commit: {last_line[:400]}")
        else:
            self._fail(last_line.removeprefix("tpu-train: error: ") or f"the upload ended with {end.code}")

    def _fail(self, reason: str) -> None:
        """Keeps the reason, without the token, for the summary; warns unless the upload before failed too."""
        reason = reason.replace(os.environ.get(TOKEN) or "\0", "***")
        if self.error is None:
            self.warn(f"hub: {reason}; the run goes on")
        self.error = reason


def find_result(lines: Sequence[str]) -> dict[str, Any] | None:
    """Returns the step and the commit that `push --beside` printed among other lines; None if they are not there."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get("step"), int) and isinstance(value.get("commit"), str):
                return value
    return None


def _last_lines(file: IO[bytes]) -> list[str]:
    """Returns the lines in the last _SHOWN_BYTES of a process's output; the first may be cut."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SHOWN_BYTES))
    return file.read().decode(errors="replace").strip().splitlines()
